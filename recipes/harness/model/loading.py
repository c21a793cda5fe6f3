"""How the model is loaded: its dtype, its attention, whether it fits the run; what the GPUs of this machine support."""

import contextlib
import importlib
import json
import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness.compat.torch import compute_varlen_attention_on_cpu
from harness.compat.transformers import (
    load_4bit_models_on_cpu,
    read_no_weights,
    supports_flash_attention_2,
    takes_other_attention,
    transformer_layers,
)
from harness.compat.trl import compute_loss_without_triton
from harness.configs import LAYER_CLASSES, AccelerateConfig
from harness.hub import TOKENIZER, check_model_exists, hub_errors
from harness.launched import Launched, UserError, print_once
from harness.nodes.hardware import memory_limit
from harness.rehearsal import tiny

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from trl import ModelConfig, get_peft_config

WEIGHTS = "model.safetensors"
VARLEN, FLASH = "varlen", "flash_attention_2"  # values of --attn_implementation
MAX_HEAD_SIZE = 256  # of FlashAttention-2, also of the one in PyTorch (Dao-AILab/flash-attention#2427)
REFUSED = ("softcap", "s_aux", "position_bias")  # arguments of attention functions that `varlen_attn` does not have
PROCESS_BYTES = 2_500_000_000  # of host memory: Python, torch, CUDA's libraries; assumed


def set_loading_options(
    training_args: TrainingArguments,
    model_args: ModelConfig,
    is_sharded: bool,
    launched: Launched,
    given: Collection[str] = (),
) -> None:
    """Sets how the trainer loads the model that it gets by name, and how the loss is computed. `given`: names of flags."""
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
    if model_args.load_in_4bit and not is_sharded and ("dtype" not in given or model_args.dtype == "auto"):
        set_dtype_of_4bit_model(training_args, model_args)
    set_attention(training_args, model_args, launched)  # it depends on the dtype
    if hasattr(training_args, "model_init_kwargs"):
        given = training_args.model_init_kwargs or {}
        given = json.loads(given) if isinstance(given, str) else given
        options = {
            "dtype": model_args.dtype,
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
            # TRL's default on one GPU is "auto", which leaves layers on the CPU if the model does not fit. None loads into host
            # memory, from where the trainer moves the model to the GPU; quantized weights are loaded onto the GPU.
            "device_map": None,
        }
        training_args.model_init_kwargs = options | given


def set_dtype_of_4bit_model(training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Sets the dtype of what is not quantized, in which the 4-bit layers compute too, unless the recipe has set it.

    TRL's default is float32: embedding and head would be twice as large, and the products many times as slow.
    """
    if model_args.dtype in (ModelConfig.dtype, "auto"):
        model_args.dtype = "bfloat16" if training_args.bf16 else "float16" if training_args.fp16 else "float32"


def set_attention(training_args: TrainingArguments, model_args: ModelConfig, launched: Launched) -> None:
    """Sets the attention implementation unless a flag has, and raises UserError for a flag that cannot work."""
    given = model_args.attn_implementation
    if given is None or (launched.mode == "plan" and "flash" in given):  # a plan simulates any FlashAttention as PyTorch's
        model_args.attn_implementation, _ = choose_attention(training_args, model_args, launched)
    elif "/" not in given and given not in (known := ["eager", VARLEN, *ALL_ATTENTION_FUNCTIONS.valid_keys()]):
        raise UserError(f"--attn_implementation {given} is unknown: pass {', '.join(known)} or a kernel of the Hub")
    elif given == VARLEN and (reason := why_not_varlen(training_args, model_args, launched)):
        raise UserError(f"--attn_implementation {VARLEN}: {reason}: leave out the flag")
    elif given == FLASH and (problem := problem_of_flash_attn()):
        raise UserError(f"--attn_implementation {FLASH}: {problem}: install flash-attn again, or leave out the flag")
    elif given == FLASH and (size := largest_head(model_args, launched)) > MAX_HEAD_SIZE:
        raise UserError(
            f"--attn_implementation {FLASH}: it takes head sizes up to {MAX_HEAD_SIZE}, and this model has {size}: leave out "
            "the flag"
        )
    if model_args.attn_implementation == VARLEN:
        register_varlen()


def register_varlen() -> None:
    """Makes `varlen` an attention implementation of transformers, in this process."""
    AttentionInterface.register(VARLEN, attend_within_documents)
    AttentionMaskInterface.register(VARLEN, mask_between_documents)
    compute_varlen_attention_on_cpu()


def choose_attention(training_args: TrainingArguments, model_args: ModelConfig, launched: Launched) -> tuple[str | None, str]:
    """The attention implementation, None to leave it to transformers, and the reason why it is not the first choice."""
    reason = why_not_varlen(training_args, model_args, launched)
    if not reason:
        return VARLEN, ""
    if FLASH not in launched.attention or launched.on_cpu or not computes_in_16_bits(training_args, model_args):
        return None, reason
    _, model_class = config_and_class(model_args, launched.tiny)
    can_use_flash = supports_flash_attention_2(model_class) and largest_head(model_args, launched) <= MAX_HEAD_SIZE
    return FLASH if can_use_flash else None, reason


def why_not_varlen(training_args: TrainingArguments, model_args: ModelConfig, launched: Launched) -> str:
    """Why a run cannot use `varlen_attn`, "" if it can. A rehearsal on CPU and a plan can do what a GPU can."""
    if not has_documents(training_args):
        return "it is for rows packed with --packing_strategy bfd or bfd_split"
    if launched.mode == "plan" and training_args.fp16:
        return "a plan in fp16 is for T4s, which do not support FlashAttention"
    if not launched.on_cpu and not gpu_supports_varlen(training_args, launched):
        return "it needs GPUs of compute capability 8.0"
    if (not launched.on_cpu or launched.mode == "plan") and not computes_in_16_bits(training_args, model_args):
        return "it computes in bf16 or fp16 only"
    config, model_class = config_and_class(model_args, launched.tiny)
    if config is None:  # `check_model` explains it
        return ""
    text = config.get_text_config()
    values, kind = text.to_dict(), text.model_type
    if values.get("attn_logit_softcapping"):
        return f"it has no softcap, and attn_logit_softcapping of {kind} is {values['attn_logit_softcapping']}"
    if not takes_other_attention(model_class):
        return f"the class of {kind} does not support it (attention sinks, position biases, or masks of its own)"
    for size in head_sizes(config):
        if size > MAX_HEAD_SIZE or size % 8 or 192 < size <= 224:  # on consumer GPUs it has no backward pass for sizes up to 224
            return f"it takes head sizes that are multiples of 8, up to 192 or from 232 to 256, and a head of {kind} has {size}"
    for name, value in values.items():
        if re.match("att.*(dropout|pdrop)", name) and value:
            return f"it has no dropout, and {name} of {kind} is {value}"
    return ""


def head_sizes(config: PreTrainedConfig) -> list[int]:
    """The sizes of the attention heads of a model. Layers can have different ones, as in Gemma 4."""
    text = config.get_text_config()
    sizes = [int(size) for size in re.findall(r'head_dim": (\d+)', text.to_json_string(use_diff=False))]
    # By their usual names, which every config maps to its own: GPT-2's n_embd, GPT-Neo's num_heads.
    return sizes or [getattr(text, "hidden_size", 64) // (getattr(text, "num_attention_heads", None) or 1)]


def largest_head(model_args: ModelConfig, launched: Launched) -> int:
    """The largest head size of the model, 0 if its config cannot be read."""
    config, _ = config_and_class(model_args, launched.tiny)
    return max(head_sizes(config)) if config else 0


def gpu_supports_varlen(training_args: TrainingArguments, launched: Launched) -> bool:
    if launched.recipe:
        return VARLEN in launched.attention
    # Started without launch.sh.
    return training_args.device.type == "cuda" and torch.cuda.get_device_capability(training_args.device) >= (8, 0)


def has_documents(training_args: TrainingArguments) -> bool:
    """Whether a batch is one row of documents, of which the model gets the lengths."""
    is_packed = getattr(training_args, "packing", False) and training_args.packing_strategy in ("bfd", "bfd_split")
    return is_packed or getattr(training_args, "padding_free", False)


def computes_in_16_bits(training_args: TrainingArguments, model_args: ModelConfig) -> bool:
    return training_args.bf16 or training_args.fp16 or model_args.dtype in ("bfloat16", "float16")


def config_and_class(model_args: ModelConfig, is_tiny: bool) -> tuple[PreTrainedConfig | None, type | None]:
    """Config and class of the model, (None, None) if the config cannot be read. For a rehearsal, those of the original."""
    name, revision = model_args.model_name_or_path, model_args.model_revision
    known = tiny.family_of(name) if is_tiny else None
    try:
        if not known:
            check_model_exists(name, revision)  # fails at once if the Hub is unreachable; `from_pretrained` tries for 20 seconds
        config = AutoConfig.for_model(**known["config"]) if known else AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, UserError):
        return None, None
    return config, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


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
    """The attention function `varlen` of transformers: PyTorch's FlashAttention-2, in which tokens attend to their own document.

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
            length = query.shape[2]
            attention_mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - sliding_window)
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **options)
    needed = ["dropout"] if dropout else [name for name in REFUSED if options.get(name) is not None]
    if needed:
        raise UserError(f"--attn_implementation {VARLEN} has no {needed[0]}, which this model needs: pass another one")
    device, size = query.device.type, value.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))  # of latent attention, value heads are smaller
    output = varlen_attn(
        *(tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        # A token and the `sliding_window - 1` before it.
        window_size=(sliding_window - 1 if sliding_window else -1, 0 if is_causal else -1),
        enable_gqa=True,
    )
    return output[None, :, :, :size], None


def mask_between_documents(
    attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **options: Any
) -> torch.Tensor | None:
    """The mask for `attend_within_documents`: none for documents without padding, otherwise that of SDPA."""
    if attention_mask is None and options["q_length"] == options["kv_length"] and not use_vmap:
        return None
    return AttentionMaskInterface()["sdpa"](attention_mask=attention_mask, use_vmap=use_vmap, **options)


def find_gpu_features() -> tuple[list[str], str, str, str]:
    """What the GPUs of this machine support. The launcher asks once, so that all processes do the same.

    Returns the attention implementations besides those of transformers, why one that is installed cannot be used, why TRL's
    loss cannot use Triton, and what is wrong with the GPU itself, which is full or busy, for example: each "" if nothing.
    """
    from transformers.utils import is_flash_attn_2_available

    warnings.filterwarnings("ignore")  # `checks.count_gpus` reports a driver that is too old
    if not torch.cuda.is_available():
        return [], "", "", ""
    try:
        reason = why_not_triton()
        if not has_capability_8():
            return [], "", reason, ""
        problems = {VARLEN: problem_of_varlen(), FLASH: problem_of_flash_attn()}
    except UserError as error:
        return [], "", "", str(error)
    if not is_flash_attn_2_available(kernels_fallback_ok=True):
        del problems[FLASH]
    usable = [implementation for implementation, problem in problems.items() if not problem]
    return usable, "; ".join(filter(None, problems.values())), reason, ""


def raise_if_gpu_fails(error: Exception) -> None:
    """Raises UserError if `error` is about the GPU itself, such as one that is full or busy, and not about what it lacks."""
    is_of_gpu = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
    if is_of_gpu and not re.search("kernel image|device function|PTX", str(error)):
        raise UserError(
            f"the GPU cannot be used: {_first_line(error)} (`nvidia-smi` lists the programs that use it): stop them, or choose "
            "another GPU with CUDA_VISIBLE_DEVICES"
        ) from error


def has_capability_8() -> bool:
    """Whether all GPUs that this process sees have compute capability 8.0 or higher."""
    return all(torch.cuda.get_device_capability(index) >= (8, 0) for index in range(torch.cuda.device_count()))


def why_not_triton() -> str:
    """Why TRL's loss cannot use Triton on the GPUs that this process sees, "" if it can."""
    if not has_capability_8():  # triton-lang/triton#10918
        oldest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
        return f"it does not support {torch.cuda.get_device_name(oldest)}"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles the code with which it launches kernels
    except Exception as error:  # no compiler, no Python.h, no libcuda: each raises its own type
        raise_if_gpu_fails(error)
        return f"{_first_line(error)} (apt install gcc python3-dev)"
    return ""


def problem_of_varlen() -> str:
    """Why PyTorch's FlashAttention does not run on this machine's GPU, "" if it does. Not every build of PyTorch has it."""
    try:
        tokens, ends = torch.zeros(8, 1, 8, dtype=torch.float16, device="cuda"), torch.tensor([0, 8], device="cuda")
        varlen_attn(tokens, tokens, tokens, ends.int(), ends.int(), 8, 8, window_size=(-1, 0))
        torch.cuda.synchronize()
    except Exception as error:  # not built, no kernel for this GPU: each raises its own type
        raise_if_gpu_fails(error)
        return f"PyTorch's FlashAttention does not run on this GPU ({_first_line(error)})"
    return ""


def problem_of_flash_attn() -> str:
    """Why the installed flash-attn package cannot be imported; "" if it can, or if there is none.

    transformers asks only whether it is installed. One that was built for another PyTorch raises an error when it is imported.
    """
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        return ""
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # a missing symbol, a missing library, an operator that exists already
        return f"the installed flash-attn cannot be imported ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def print_attention(training_args: TrainingArguments, model_args: ModelConfig, launched: Launched) -> None:
    """Prints which attention a run uses and why, what it costs, and whether the loss runs without Triton."""
    used, (choice, reason) = model_args.attn_implementation, choose_attention(training_args, model_args, launched)
    if launched.on_cpu and not has_documents(training_args):
        return
    if launched.no_triton and not launched.on_cpu:
        print_once(f"TRL's loss runs in PyTorch instead of Triton, a little slower: {launched.no_triton}")
    if launched.no_flash and not launched.on_cpu:
        print_once(f"warning: {launched.no_flash}")
    why = f", not {VARLEN}: {reason}" if reason else ""
    if used != choice:
        why = ", from --attn_implementation"
    elif used == VARLEN:
        why = ", PyTorch's FlashAttention-2: tokens attend to their own document only"
        if launched.on_cpu:
            why += " (on a CPU, one SDPA per document)"
    config, _ = config_and_class(model_args, launched.tiny)
    tokens = training_args.per_device_train_batch_size * (getattr(training_args, "max_length", None) or 0)
    cost = ""
    has_mask = used in (None, "sdpa", "eager") and has_documents(training_args) and not launched.on_cpu
    if has_mask and tokens and config is not None:
        # Per token and layer: 4 x tokens x hidden_size FLOP of attention, 2 x 12 x hidden_size^2 of the weights.
        share = tokens / 6 / config.get_text_config().hidden_size
        cost = f" With a mask, each token attends to all {tokens:,} of its batch: {share:.0%} of the FLOP of the weights."
    print_once(f"Attention: {used or 'chosen by transformers, SDPA for most models'}{why}.{cost}")


def check_experts(model_args: ModelConfig) -> None:
    """Prints what 4-bit weights and adapters do with fused experts, which are 3-D parameters and no linear layers.

    Raises UserError if PEFT refuses to put the adapter on the model.
    """
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not model_args.use_peft or model_class is None or not any("expert" in name for name in config.to_dict()):
        return
    with torch.device("meta"):
        model = model_class(config)
    experts = {name: weight for name, weight in model.named_parameters() if weight.dim() > 2}
    total, fused = model.num_parameters(), sum(weight.numel() for weight in experts.values())
    if not fused:
        return
    try:
        adapter = get_peft_model(model, get_peft_config(model_args))
    except ValueError as error:
        raise UserError(f"--use_peft: PEFT refuses the adapter: {error} (for fused experts: --lora_dropout 0)") from error
    trained = " ".join(name for name, weight in adapter.named_parameters() if weight.requires_grad)
    has_adapter = any(name.rpartition(".")[0] in trained for name in experts)
    messages = []
    if model_args.load_in_4bit:
        dtype = getattr(torch, model_args.dtype or "auto", config.dtype or torch.float32)  # "auto" is no attribute of torch
        messages.append(
            f"--load_in_4bit does not quantize fused experts: {fused:,} of {total:,} parameters stay in "
            f"{str(dtype).removeprefix('torch.')} ({fused * dtype.itemsize / 1e9:.1f} GB)."
        )
    if "all-linear" in (model_args.lora_target_modules or "") and not has_adapter:
        names = sorted({name.rpartition(".")[2] for name in experts})
        messages.append(
            f"The adapter (all-linear) skips the fused experts: --lora_target_parameters {' '.join(names)} --lora_dropout 0 adds "
            "them."
        )
    if messages:
        print_once(" ".join(messages))


def check_model(training_args: TrainingArguments, model_args: ModelConfig, with_weights: bool) -> None:
    """Raises UserError unless config, tokenizer and (in a folder) weights can be read and fit each other and the run."""
    from transformers import AutoTokenizer

    name, revision = model_args.model_name_or_path, model_args.model_revision
    check_model_exists(name, revision)
    with hub_errors("model", name):
        config = AutoConfig.from_pretrained(name, revision=revision).get_text_config()
    if Path(name).is_dir() and with_weights:
        check_weight_files(Path(name))
    with hub_errors(TOKENIZER, name):
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


def check_host_memory(model_args: ModelConfig, config: AccelerateConfig, launched: Launched) -> None:
    """Prints and checks what a run that keeps weights in host memory needs there. Raises UserError if it is too little.

    The estimate is that of `--plan`, without a simulation.
    """
    import psutil
    from transformers import AutoModelForCausalLM

    is_4bit = model_args.load_in_4bit and config.is_fsdp
    if not config.offload_params and not is_4bit:
        return
    hub_config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    if type(hub_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hub_config)
    packed = 0
    if is_4bit:
        head = model.get_output_embeddings()
        packed = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
    parameters = sum(weight.numel() for weight in model.parameters())
    loaded_bytes = 4 if model_args.dtype == "float32" or not model_args.use_peft else 2
    weights = packed // 2 + (parameters - packed) * loaded_bytes
    processes = launched.processes // launched.nodes
    copies = 1 if config.cpu_ram_efficient_loading else processes
    # The file of the 4-bit weights is memory-mapped, so the kernel can drop its pages.
    loading = 0 if is_4bit else copies * weights
    training = 0
    if config.offload_params:
        loading += weights * processes // launched.processes  # the shards are made while the loaded weights are still there
        if not model_args.use_peft:  # weights, gradients and two moments in float32
            training = 16 * parameters * processes // launched.processes
    needed = processes * PROCESS_BYTES + max(loading, training)
    free, swap = min(psutil.virtual_memory().available, memory_limit()), psutil.swap_memory().free
    numbers = f"about {needed / 1e9:.0f} GB of host memory, {free / 1e9:.0f} GB are free"
    if needed > free + swap:
        raise UserError(
            f"{config.name}: this run needs {numbers}, and {swap / 1e9:.0f} GB of swap: stop other programs, "
            "request more memory (SLURM: --mem), or use another config or a smaller model; --plan shows what each needs"
        )
    print_once(f"This run needs {numbers}." if needed <= free else f"warning: this run needs {numbers}. The rest is swap: slow.")


def check_module_names(model_args: ModelConfig, config: AccelerateConfig, name: str) -> None:
    """Raises UserError unless adapter and Accelerate config name modules of the model, which is called `name` in messages."""
    if model_args.use_peft or config.layer_classes:
        model = build_on_meta(model_args)
        check_layer_classes(model, config, name)
        if model_args.use_peft:
            check_adapter_names(model, model_args, name)


def build_on_meta(model_args: ModelConfig) -> PreTrainedModel:
    """The model without its weights, on the meta device."""
    name, revision = model_args.model_name_or_path, model_args.model_revision
    with hub_errors("model", name), torch.device("meta"):
        return tiny.make_model(AutoConfig.from_pretrained(name, revision=revision))


def check_layer_classes(model: PreTrainedModel, config: AccelerateConfig, name: str) -> None:
    """Raises UserError unless the layer classes of the config are those of the model; others would stay unsharded."""
    expected = {type(layer).__name__ for layer in transformer_layers(model).values()}
    classes, given = {type(module).__name__ for module in model.modules()}, set(config.layer_classes)
    if given and not expected <= given <= classes:
        raise UserError(
            f"{Path(config.path).name}: {LAYER_CLASSES} is {','.join(config.layer_classes)}, but the layers of {name} are "
            f"{','.join(sorted(expected))}: write this, or delete the line"
        )


def check_adapter_names(model: PreTrainedModel, model_args: ModelConfig, name: str) -> None:
    """Raises UserError for a name that the model does not have. PEFT refuses names only if it knows none of them."""
    modules = [path for path, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None]
    weights = [path for path, _ in model.named_parameters()]
    named = {
        "lora_target_modules": (modules, f"{', '.join(linear_modules(model))}, or all-linear for all of these"),
        "lora_target_parameters": (weights, ", ".join(_last_parts(weights, 2))),
        "lora_modules_to_save": (modules, ", ".join(_last_parts(modules))),
    }
    for flag, (existing, choice) in named.items():
        given = getattr(model_args, flag) or []
        if isinstance(given, str):  # all-linear, or a regular expression for whole names
            continue
        unknown = [word for word in given if not any(f".{path}".endswith(f".{word}") for path in existing)]
        if unknown and not (flag == "lora_target_modules" and _are_renamed(unknown, model, model_args)):
            raise UserError(f"--{flag}: {name} has no {', '.join(unknown)}: pass some of {choice}")


def _are_renamed(names: list[str], model: PreTrainedModel, model_args: ModelConfig) -> bool:
    """Whether these are names of transformers 4 that PEFT replaces. Adds the adapter to the model."""
    settings = get_peft_config(model_args)
    with contextlib.suppress(ValueError), torch.device("meta"):
        get_peft_model(model, settings)
    return not set(names) & set(settings.target_modules)


def build_adapter_on_meta(model_args: ModelConfig, name: str) -> PeftModel:
    """The model with its adapter on the meta device. Raises UserError for what PEFT or TRL's loss refuse."""
    model = build_on_meta(model_args)
    choice = f"the linear modules of {name} are {', '.join(linear_modules(model))}"
    try:
        with torch.device("meta"):
            model = get_peft_model(model, get_peft_config(model_args))
    except ValueError as error:
        raise UserError(f"--use_peft: {' '.join(str(error).split())[:300]} ({choice})") from error
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise UserError(
            "--lora_target_modules: the output head cannot have an adapter, because TRL's loss reads its weight and not its "
            f"output; {choice}"
        )
    return model


def linear_modules(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear modules but the output head, each once."""
    head = model.get_output_embeddings()
    return _last_parts(
        [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D) and module is not head]
    )


def _last_parts(names: list[str], count: int = 1) -> list[str]:
    return list(dict.fromkeys(".".join(name.split(".")[-count:]) for name in names))


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
