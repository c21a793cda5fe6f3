"""Which attention a run uses."""

import importlib.util
import itertools
import re
from typing import Any

from harness.compat.transformers import is_stateful, supports_flash_attention_2, takes_other_attention, use_no_gpu_kernels
from harness.messages import UserError, print_once
from harness.model.gpu_features import FLASH, VARLEN
from harness.rehearsal import tiny
from harness.runs import Run

import torch
import transformers
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    TrainingArguments,
)
from trl import ModelConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

# Models that give the kernels the lengths of packed documents, by the type of their text part; see tests/model/test_packing.py.
KEPT_APART_BY_KERNELS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
# The modules of the kernels of linear attention.
KERNELS = ("fla", "causal_conv1d")
MAX_HEAD_SIZE = 256  # of FlashAttention-2, also of the one in PyTorch (Dao-AILab/flash-attention#2427)
REFUSED = ("dropout", "softcap", "s_aux", "position_bias")  # arguments of attention functions that `varlen_attn` does not have


def set_attention(training_args: TrainingArguments, model_args: ModelConfig, run: Run) -> None:
    """Sets the attention implementation unless a flag has. Raises UserError for an impossible `varlen`."""
    given = model_args.attn_implementation
    chosen = choose_attention(training_args, model_args, run)
    if given == VARLEN and chosen != VARLEN:
        raise UserError(f"--attn_implementation {VARLEN} is not for these rows, flags, model, dtype or GPU: leave it out")
    if given is None:
        model_args.attn_implementation = chosen
    if model_args.attn_implementation == VARLEN:
        register_varlen()


def choose_attention(training_args: TrainingArguments, model_args: ModelConfig, run: Run) -> str | None:
    """The attention implementation: `varlen` or FlashAttention-2 if possible, None to leave it to transformers.

    A rehearsal on CPU can do what a GPU can. TRL's selective activation checkpointing does not know `varlen`: it would compute it
    a second time, as without the option.
    """
    config = config_of(model_args, run.tiny)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    in_16_bit = dtype_of_products(training_args, str(model_args.dtype)) in ("bfloat16", "float16")
    is_selective = (training_args.activation_checkpointing_kwargs or {}).get("selective")
    has_kernel = not is_selective and (run.on_cpu or (VARLEN in run.gpu.attention and in_16_bit))
    if has_kernel and has_documents(training_args) and (config is None or can_use_varlen(config, model_class)):
        return VARLEN
    has_flash = FLASH in run.gpu.attention and not run.on_cpu and in_16_bit
    fits = config is None or max(head_sizes(config)) <= MAX_HEAD_SIZE
    if has_flash and fits and supports_flash_attention_2(model_class):
        return FLASH
    return None


def dtype_of_products(training_args: TrainingArguments, otherwise: str) -> str:
    """The dtype of mixed precision, `otherwise` if it is off."""
    if training_args.bf16:
        return "bfloat16"
    if training_args.fp16:
        return "float16"
    return otherwise


def class_of_model(config: PreTrainedConfig) -> Any:
    """The class that a config names, with which TRL's trainers load the model."""
    return getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)


def config_of(model_args: ModelConfig, is_tiny: bool) -> PreTrainedConfig | None:
    """The config of the model, None if the recipe makes its model itself. `is_tiny`: a rehearsal."""
    name = model_args.model_name_or_path
    if not name:
        return None
    if is_tiny and (known := tiny.family_of(name)):
        return AutoConfig.for_model(**known["config"])
    return AutoConfig.from_pretrained(name, revision=model_args.model_revision)


def can_use_varlen(config: PreTrainedConfig, model_class: type | None) -> bool:
    """Whether `varlen` computes what this model needs: it has no softcap, no dropout, no sinks, and not all head sizes.

    Some models do not pass the lengths of documents to their attention, whatever their class says, such as Nemotron's.
    """
    values = config.get_text_config().to_dict()
    has_dropout = any(value for name, value in values.items() if re.match("att.*(dropout|pdrop)", name))
    # On consumer GPUs it has no backward pass for sizes up to 224.
    has_sizes = all(size <= MAX_HEAD_SIZE and size % 8 == 0 and not 192 < size <= 224 for size in head_sizes(config))
    if not has_sizes or has_dropout or values.get("attn_logit_softcapping") or not takes_other_attention(model_class):
        return False
    register_varlen()
    return keeps_documents_apart(config, VARLEN) is not False


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """The sizes of the attention heads of a model. Layers can have different ones, as in Gemma 4."""
    text = config.get_text_config()
    sizes = [int(size) for size in re.findall(r'head_dim": (\d+)', text.to_json_string(use_diff=False))]
    # By their usual names, which every config maps to its own: GPT-2's n_embd, GPT-Neo's num_heads.
    return sizes or [getattr(text, "hidden_size", 64) // (getattr(text, "num_attention_heads", None) or 1)]


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
    keeps_lengths = getattr(training_args, "packing", False) and training_args.packing_strategy in ("bfd", "bfd_split")
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


def register_varlen() -> None:
    """Makes `varlen` an attention implementation of transformers, in this process."""
    AttentionInterface.register(VARLEN, attend_within_documents)
    AttentionMaskInterface.register(VARLEN, mask_between_documents)


def attend_within_documents(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `varlen`.

    Tensors are (1, heads, tokens, head size). `cu_seq_lens_q` has the ends of the documents; TRL's collator makes it, for
    training and for evaluation. Without it, as in `generate`, this is SDPA.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is None or query.shape[2] != key.shape[2]:
        if module.training:
            raise UserError(
                f"--attn_implementation {VARLEN}: {type(module).__name__} got no lengths of documents, so they would attend to "
                "each other: pass --attn_implementation sdpa"
            )
        if attention_mask is None and sliding_window and query.shape[2] > sliding_window:
            attention_mask = mask_of_window(query.shape[2], sliding_window - 1, 0, query.device)
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **options)
    given = options | {"dropout": dropout or None}
    for name in REFUSED:
        if given.get(name) is not None:
            raise UserError(f"--attn_implementation {VARLEN} has no {name}, which this model needs: pass another one")
    device = query.device.type
    size = value.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    if size < query.shape[-1]:  # value heads of latent attention are smaller; padding by 0 would copy those of all others
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))
    tokens = [tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    # A token and the `sliding_window - 1` before it.
    window = (sliding_window - 1 if sliding_window else -1, 0 if is_causal else -1)
    if device == "cpu" and type(query) is torch.Tensor:  # not a fake tensor of --plan
        output = attend_on_cpu(*tokens, cu_seq_lens_q, scaling, window)
    else:
        output = varlen_attn(
            *tokens, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=window, enable_gqa=True
        )
    return output[None, ..., :size], None


def mask_between_documents(
    attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **options: Any
) -> torch.Tensor | None:
    """The mask for `attend_within_documents`: none for documents without padding, otherwise that of SDPA."""
    if attention_mask is None and options["q_length"] == options["kv_length"] and not use_vmap:
        return None
    return AttentionMaskInterface()["sdpa"](attention_mask=attention_mask, use_vmap=use_vmap, **options)


def attend_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """What `varlen_attn` computes, for rehearsals: it has no CPU kernel. Tensors are (tokens, heads, head size)."""
    outputs = []
    options = {"is_causal": window == (-1, 0), "scale": scale, "enable_gqa": True}
    for start, end in itertools.pairwise(ends.tolist()):
        document = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        mask = mask_of_window(end - start, *window) if window[0] >= 0 else None
        output = torch.nn.functional.scaled_dot_product_attention(*document, mask, **options)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def mask_of_window(length: int, before: int, after: int, device: torch.device | None = None) -> torch.Tensor:
    """Which tokens of a document attend to which: to so many before and after them, -1 for all."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    mask = mask.triu(-before) if before >= 0 else mask
    if after >= 0:
        return mask.tril(after)
    return mask
