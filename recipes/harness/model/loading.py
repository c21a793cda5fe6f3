"""How the model is loaded: its dtype, its attention, whether it fits the run; what the GPUs of this machine support."""

import json
import os
import warnings
from pathlib import Path

from harness.compat.transformers import load_4bit_models_on_cpu, read_no_weights, supports_flash_attention
from harness.compat.trl import compute_loss_without_triton
from harness.hub import check_model_exists, hub_errors
from harness.launched import Launched, UserError, print_once
from harness.rehearsal import tiny

from transformers import TrainingArguments
from trl import ModelConfig

WEIGHTS = "model.safetensors"


def set_loading_options(training_args: TrainingArguments, model_args: ModelConfig, is_sharded: bool, launched: Launched) -> None:
    """Sets how the trainer loads the model that it gets by name, and how the loss is computed."""
    can_choose = launched.attention and not launched.on_cpu and not model_args.attn_implementation
    if can_choose and can_use_flash_attention(training_args, model_args, launched.tiny):
        model_args.attn_implementation = launched.attention
    if isinstance(model_args.lora_target_modules, str) and model_args.lora_target_modules.isidentifier():
        # TRL makes a string of a single name, which PEFT reads as a regular expression for whole names.
        model_args.lora_target_modules = [model_args.lora_target_modules]
    if launched.no_triton:
        compute_loss_without_triton()
    if model_args.load_in_4bit and is_sharded:
        # FSDP2 shards floating-point parameters only, and keeps their bits if it need not cast them.
        model_args.bnb_4bit_quant_storage = model_args.bnb_4bit_quant_storage or "float32"
        model_args.dtype = "bfloat16"
        load_4bit_models_on_cpu()
    elif is_sharded and os.environ.get("RANK", "0") != "0" and os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING") == "true":
        read_no_weights()
    if hasattr(training_args, "model_init_kwargs"):
        given = training_args.model_init_kwargs or {}
        given = json.loads(given) if isinstance(given, str) else given
        options = {
            "dtype": model_args.dtype,
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
        }
        training_args.model_init_kwargs = options | given


def can_use_flash_attention(training_args: TrainingArguments, model_args: ModelConfig, is_tiny: bool) -> bool:
    """Whether the model's class has FlashAttention and computes in 16 bits, the only dtypes that it supports."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if not (training_args.bf16 or training_args.fp16 or model_args.dtype in ("bfloat16", "float16")):
        return False
    name, revision = model_args.model_name_or_path, model_args.model_revision
    if is_tiny:
        name, revision = str(tiny.tiny_model_folder(model_args)), "main"
        if not Path(name).is_dir():  # it is made after this; nothing is loaded before
            return True
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError):  # `check_model` explains it
        return True
    return supports_flash_attention(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))


def find_gpu_features() -> tuple[str, str]:
    """What the GPUs of this machine support. The launcher asks once, so that all processes do the same.

    Returns the attention implementation, "" to leave it to transformers (SDPA for most models), and why TRL's loss cannot use
    Triton, "" if it can.
    """
    import torch
    from transformers.utils import is_flash_attn_2_available

    warnings.filterwarnings("ignore")  # `checks.count_gpus` reports a driver that is too old
    if not torch.cuda.is_available():
        return "", ""
    if torch.cuda.get_device_capability() < (8, 0):  # triton-lang/triton#10918
        return "", f"it does not support {torch.cuda.get_device_name()}"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles the code with which it launches kernels
        reason = ""
    except Exception as error:  # no compiler, no Python.h, no libcuda: each raises its own type
        reason = f"{(str(error).splitlines() or [repr(error)])[0]} (apt install gcc python3-dev)"
    return "flash_attention_2" if is_flash_attn_2_available(kernels_fallback_ok=True) else "", reason


def print_attention(training_args: TrainingArguments, model_args: ModelConfig, launched: Launched) -> None:
    """Prints which attention a run on GPUs uses, what it costs, and whether the loss runs without Triton."""
    from transformers import AutoConfig

    if launched.on_cpu:
        return
    if launched.no_triton:
        print_once(f"TRL's loss runs in PyTorch instead of Triton, a little slower: {launched.no_triton}")
    if "flash" in (model_args.attn_implementation or ""):
        print_once(f"Attention: {model_args.attn_implementation}.")
        return
    tokens = training_args.per_device_train_batch_size * (getattr(training_args, "max_length", None) or 0)
    if not getattr(training_args, "packing", False) or not tokens:
        return
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision).get_text_config()
    # Per token and layer: 4 x tokens x hidden_size FLOP of attention, 2 x 12 x hidden_size^2 of the weights.
    share = tokens / 6 / config.hidden_size
    print_once(
        f"Attention: {model_args.attn_implementation or 'chosen by transformers, SDPA for most models'}, with a mask: each token "
        f"attends to all {tokens:,} of its row, which adds about {share:.0%} to the FLOP of the weights. FlashAttention-2 needs "
        "compute capability 8.0, 16 bits, a model that supports it, and a kernel from the Hub or the flash-attn package."
    )


def check_model(training_args: TrainingArguments, model_args: ModelConfig, with_weights: bool) -> None:
    """Raises UserError unless config, tokenizer and (in a folder) weights can be read and fit each other and the run."""
    from transformers import AutoConfig, AutoTokenizer

    name, revision = model_args.model_name_or_path, model_args.model_revision
    check_model_exists(name, revision)
    with hub_errors("model", name):
        config = AutoConfig.from_pretrained(name, revision=revision).get_text_config()
    if Path(name).is_dir() and with_weights:
        check_weight_files(Path(name))
    with hub_errors("the tokenizer of", name):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        largest_token = max(tokenizer.get_vocab().values())
    files = tokenizer.vocab_files_names.values()
    if Path(name).is_dir() and not any(Path(name, file).is_file() for file in files):
        raise UserError(
            f"--model_name_or_path: {name} has no tokenizer ({' or '.join(files)}): copy it from the source of the weights"
        )
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary and largest_token >= vocabulary:
        raise UserError(
            f"--model_name_or_path: the tokenizer of {name} has tokens up to {largest_token}, but the model's vocab_size is "
            f"{vocabulary}: copy the tokenizer's files from the source of the weights"
        )
    positions, length = getattr(config, "max_position_embeddings", None), getattr(training_args, "max_length", None)
    if positions and length and length > positions:
        raise UserError(f"--max_length is {length}, but {name} has {positions} positions: pass {positions} or less")


def check_weight_files(folder: Path) -> None:
    """Raises UserError unless every safetensors file of a model folder exists and has the length that its header says."""
    index, files = folder / f"{WEIGHTS}.index.json", [WEIGHTS]
    if index.is_file() and not (folder / WEIGHTS).is_file():
        with hub_errors("model", str(folder)):
            files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    for name in files:
        path = folder / name
        if not path.is_file():
            raise UserError(
                f"--model_name_or_path: {folder} has no {name}: it is incomplete, or has weights in another format (only "
                "safetensors are loaded)"
            )
        try:
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_size))
            ends = [entry["data_offsets"][1] for tensor, entry in header.items() if tensor != "__metadata__"]
            expected = 8 + header_size + max(ends)
        except (ValueError, TypeError, KeyError, OverflowError, MemoryError, AttributeError) as error:
            raise UserError(
                f"--model_name_or_path: {path} is not a complete safetensors file: copy or download it again"
            ) from error
        if path.stat().st_size != expected:
            raise UserError(
                f"--model_name_or_path: {path} has {path.stat().st_size:,} bytes, its header says {expected:,}: copy or download "
                "it again"
            )
