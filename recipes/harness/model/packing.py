"""Whether packed documents of a model are kept apart, also in layers that carry a state from one token to the next."""

import importlib.util
import re

from harness.batches import is_packed
from harness.compat.transformers import is_stateful, use_no_gpu_kernels
from harness.messages import UserError, print_once
from harness.model.gpu_features import VARLEN
from harness.model.weight_files import class_of_model
from harness.rehearsal import tiny

import torch
from transformers import AutoConfig, PreTrainedConfig, TrainingArguments
from trl import ModelConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

# Models that give the kernels the lengths of packed documents, by the type of their text part; see tests/model/test_packing.py.
KEPT_APART_BY_KERNELS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
# The modules of the kernels of linear attention.
KERNELS = ("fla", "causal_conv1d")


def check_packing(
    training_args: TrainingArguments, model_args: ModelConfig, name: str, can_use_kernels: bool = True, can_compute: bool = True
) -> None:
    """Raises UserError if packed documents change each other in layers that carry a state from one token to the next.

    Prints a warning if they do in other layers: without FlashAttention, some models attend to all tokens of a row.
    `name`: of the model, in messages. `can_use_kernels`: those of linear attention, which need a GPU. `can_compute`: with
    a small model of this architecture, to find out; otherwise every model with a state is refused.
    """
    if not has_documents(training_args):
        return
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    has_state = carries_state(config)
    kind = config.get_text_config().model_type
    has_kernels = can_use_kernels and all(map(importlib.util.find_spec, KERNELS))
    if has_state and kind in KEPT_APART_BY_KERNELS and has_kernels:
        return
    attention = None if has_state else model_args.attn_implementation
    if attention and (attention == VARLEN or "flash" in attention):
        return
    keeps_apart = keeps_documents_apart(config, attention) if can_compute else None
    if has_state and not keeps_apart:
        advice = ""
        if kind in KEPT_APART_BY_KERNELS:
            advice = ", or install flash-linear-attention and causal-conv1d, which need a GPU"
        raise UserError(
            f"--packing: {name} ({kind}) has layers that carry a state from one token to the next, so packed documents would "
            f"change each other: pass --packing false{advice}"
        )
    if keeps_apart is False:
        print_once(f"warning: packed documents of {name} ({kind}) attend to each other: pass --packing false.")


def has_documents(training_args: TrainingArguments) -> bool:
    """Whether a batch is one row of documents, of which the model gets the lengths."""
    keeps_lengths = is_packed(training_args) and training_args.packing_strategy in ("bfd", "bfd_split")
    return keeps_lengths or getattr(training_args, "padding_free", False)


def carries_state(config: PreTrainedConfig) -> bool:
    """Whether a layer of a model carries a state from one token to the next: linear attention, Mamba, or a convolution."""
    text = config.get_text_config()
    kinds = [*(getattr(text, "layer_types", None) or []), *(getattr(text, "layers_block_type", None) or [])]
    has_other_layers = any("linear" in kind or not re.search("attention|mlp|moe|dense|sparse", kind) for kind in kinds)
    return has_other_layers or is_stateful(class_of_model(config))


def keeps_documents_apart(config: PreTrainedConfig, attention: str | None) -> bool | None:
    """Whether a packed document gets the logits that it has alone, in a small model of this architecture on the CPU.

    `attention`: its implementation, None for the model's default. Returns None if there is no such small model.
    """
    tokens = list(range(10, 26))
    packed = DataCollatorForLanguageModeling(0, padding_free=True)([{"input_ids": tokens, "seq_lengths": [8, 8]}])
    with use_no_gpu_kernels(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            small = tiny.shrink(config, {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
            small.architectures = config.architectures
            model = tiny.make_model(small, dtype=torch.float32, attn_implementation=attention).eval()
            alone = model(input_ids=torch.tensor([tokens[8:]]), use_cache=False).logits[0]
        except Exception:  # any architecture can fail in its own way when its sizes change
            return None
        try:
            together = model(**packed, use_cache=False).logits[0, 8:]
        except Exception:  # any architecture can refuse the collator's arguments in its own way
            return False
    return torch.allclose(together, alone, atol=0.01 * alone.abs().max().item())
