"""How the model is loaded: its dtype and what the trainer passes on; whether it fits the run."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from harness.batches import length_of_rows
from harness.compat.transformers import (
    build_from_config,
    load_models_with,
    read_no_weights,
    transformer_layers,
)
from harness.compat.trl import compute_loss_without_triton
from harness.configs import LAYER_CLASSES, AccelerateConfig
from harness.contexts import Context
from harness.hub import TOKENIZER, check_model_exists, hub_errors
from harness.messages import UserError, last_line, print_once
from harness.model.attention import config_and_class, set_attention
from harness.model.weight_files import check_weights, check_weights_on_hub, folder_of_weights
from harness.nodes.hardware import memory_limit
from harness.rehearsal import tiny

import torch
import transformers
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer
from transformers.utils.quantization_config import QuantizationMethod
from trl import DPOConfig, ModelConfig, SFTConfig, get_peft_config

# Classes that generate text from tokens; some read images or sound too.
GENERATING = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
}
PROCESS_BYTES = 2_500_000_000  # of host memory: Python, torch, CUDA's libraries; assumed


def set_loading_options(
    training_args: TrainingArguments,
    model_args: ModelConfig,
    is_sharded: bool,
    context: Context,
    given: Collection[str] = (),
) -> None:
    """Sets how the trainer loads the model that it gets by name, and how the loss is computed. `given`: names of flags."""
    if isinstance(model_args.lora_target_modules, str) and model_args.lora_target_modules.isidentifier():
        # TRL makes a string of a single name, which PEFT reads as a regular expression for whole names.
        model_args.lora_target_modules = [model_args.lora_target_modules]
    if context.no_triton:
        compute_loss_without_triton()
    if model_args.load_in_4bit and is_sharded:
        # FSDP2 shards floating-point parameters only, and keeps their bits if it need not cast them.
        model_args.bnb_4bit_quant_storage = model_args.bnb_4bit_quant_storage or "float32"
        model_args.dtype = "bfloat16"
        load_models_with(load_into_host_memory)
    elif is_sharded and os.environ.get("RANK", "0") != "0" and os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING") == "true":
        # The weights of a reference model, of which TRL's trainer makes a second copy, are not sent by the first process.
        has_reference = hasattr(training_args, "precompute_ref_log_probs") or hasattr(training_args, "sync_ref_model")
        if model_args.use_peft or not has_reference:
            read_no_weights()
    if model_args.load_in_4bit and not is_sharded and ("dtype" not in given or model_args.dtype == "auto"):
        set_dtype_of_4bit_model(training_args, model_args)
    set_attention(training_args, model_args, context)  # it depends on the dtype
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


def load_into_host_memory(load: Callable[..., PreTrainedModel], model_class: type, name: str, **options: Any) -> PreTrainedModel:
    """Loads a model into host memory, so that FSDP can move one layer at a time to the GPU.

    SFTTrainer passes `device_map=None` in every distributed run, whatever the recipe says, and transformers takes None for the
    current GPU if the weights are quantized: every process would hold the whole 4-bit model there (huggingface/trl#6158).
    """
    return load(name, **options | {"device_map": {"": "cpu"}})


def load_small_models() -> None:
    """From here on, models have two layers, the vocabulary of the real model, and random weights.

    For commands that run a recipe only until its trainer is built: the rows are tokenized for the real model, and loading 70B
    would take an hour.
    """
    load_models_with(build_small_model)


def build_small_model(
    load: Callable[..., PreTrainedModel],
    model_class: type[PreTrainedModel],
    name: str,
    config: PreTrainedConfig | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
        return tiny.shrink(config, {"vocab_size": config.get_text_config().vocab_size})

    model = build_from_config(model_class, name, shrink, config, revision, dtype)
    with contextlib.suppress(OSError):  # not every model has a generation config
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    return model


def set_dtype_of_4bit_model(training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Sets the dtype of what is not quantized, in which the 4-bit layers compute too, unless the recipe has set it.

    TRL's default is float32: embedding and head would be twice as large, and the products many times as slow.
    """
    if model_args.dtype in (ModelConfig.dtype, "auto"):
        model_args.dtype = "bfloat16" if training_args.bf16 else "float16" if training_args.fp16 else "float32"


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
    check_architecture(training_args, model_args, name)
    with hub_errors("model", name):
        config = AutoConfig.from_pretrained(name, revision=revision).get_text_config()
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
    for flag in ("eos_token", "pad_token"):
        token = getattr(training_args, flag, None)
        if token and token not in tokenizer.get_vocab():
            raise UserError(f"--{flag} {token}: the tokenizer of {name} does not have this token: leave out the flag")
    positions, length = count_positions(config), length_of_rows(training_args)
    if positions and length and length > positions:
        raise UserError(f"--max_length is {length}, but {name} has {positions} positions: pass {positions} or less")
    if not with_weights:
        return
    if folder := folder_of_weights(name, revision):
        check_weights(folder, name)
    else:
        check_weights_on_hub(name, revision)


def check_model_of_liger(name: str, revision: str | None) -> None:
    """Raises UserError for a model that Liger has no kernels for: it would train unchanged, without a word."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model_type = AutoConfig.from_pretrained(name, revision=revision).model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"--use_liger_kernel: Liger has no kernels for {name} ({model_type}): leave out the flag")


def host_memory_of_node(processes: int, loading: float, training: float, saving: float) -> float:
    """Bytes of host memory that a run needs on a node with so many processes.

    `loading`: of all copies of the model while they are loaded. `training`: of what offload keeps there. `saving`: of the model
    that the first process gathers, in float32.
    """
    return processes * PROCESS_BYTES + max(loading, training, saving)


def check_architecture(training_args: TrainingArguments, model_args: ModelConfig, name: str) -> None:
    """Raises UserError if the model is no causal language model, and the recipe's trainer loads it by its name to train one.

    TRL's trainers load the class that config.json names. A recipe with a plain Trainer loads its model itself. `name`: of the
    model, in messages.
    """
    if not isinstance(training_args, SFTConfig | DPOConfig):
        return
    with hub_errors("model", name):
        config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    if not config.architectures:
        raise UserError(
            f'--model_name_or_path: config.json of {name} has no "architectures", which names the class of the model, such as '
            '["Qwen2ForCausalLM"]: copy it from the source of the weights'
        )
    architecture = config.architectures[0]
    if hasattr(transformers, architecture) and architecture not in GENERATING:
        raise UserError(
            f"--model_name_or_path: {name} is a {architecture}, and this recipe trains causal language models, such as "
            "Qwen2ForCausalLM: pass another model, or use a recipe that loads this one itself"
        )


def check_quantization(training_args: TrainingArguments, model_args: ModelConfig, is_sharded: bool) -> None:
    """Raises UserError for a model whose files are quantized, and which cannot be trained as it is."""
    name = model_args.model_name_or_path
    config = AutoConfig.from_pretrained(name, revision=model_args.model_revision)
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    advice = "pass the model that it was made from (with --load_in_4bit --use_peft for 4-bit weights)"
    method = settings["quant_method"] if isinstance(settings, dict) else settings.quant_method
    if method == QuantizationMethod.MXFP4:  # transformers can load it in bf16
        return
    try:
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantizer.validate_environment(device_map=None, dtype=config.dtype)
    except (ImportError, ValueError, RuntimeError) as error:
        raise UserError(f"--model_name_or_path: {name} is quantized: {last_line(error).rstrip('.')}: {advice}") from error
    if not quantizer.is_trainable:
        raise UserError(f"--model_name_or_path: {name} is quantized ({method}) and cannot be trained: {advice}")
    if not model_args.use_peft:
        raise UserError(
            f"--model_name_or_path: the weights of {name} are quantized and frozen, so nothing would be trained: add --use_peft, "
            "or pass the model that it was made from"
        )
    if is_sharded:
        raise UserError(f"--model_name_or_path: {name} is quantized, and FSDP cannot shard its files: {advice}")


def count_positions(config: PreTrainedConfig) -> int | None:
    """How many positions a model has, also with a RoPE that scales them; None if it has no such limit."""
    positions = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (scaling, *scaling.values()) if isinstance(kind, dict)]  # one for each type of layer
    factors = [(kind.get("factor") or 1) * (kind.get("original_max_position_embeddings") or positions or 0) for kind in kinds]
    return positions and max(positions, *map(int, factors), 0)


def check_host_memory(model_args: ModelConfig, config: AccelerateConfig, context: Context) -> None:
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
    processes = context.processes // context.nodes
    copies = 1 if config.cpu_ram_efficient_loading else processes
    # The file of the 4-bit weights is memory-mapped, so the kernel can drop its pages.
    loading = 0 if is_4bit else copies * weights
    training = 0
    if config.offload_params:
        shards = weights * processes // context.processes
        loading += shards  # they are made while the loaded weights are still there
        trained, frozen = parameters, 0
        if model_args.use_peft:
            adapter = build_adapter_on_meta(model_args, model_args.model_name_or_path)
            trained, frozen = sum(weight.numel() for weight in adapter.parameters() if weight.requires_grad), shards
        training = frozen + 16 * trained * processes // context.processes  # weights, gradients and two moments in float32
    saving = 0 if model_args.use_peft else 4 * parameters
    needed = host_memory_of_node(processes, loading, training, saving)
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
        config = AutoConfig.from_pretrained(name, revision=revision)
        if model_args.lora_task_type == "SEQ_CLS":  # set by a recipe for a classifier or a reward model
            return AutoModelForSequenceClassification.from_config(config)
        return tiny.make_model(config)


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


def keep_adapter_in_text_part(model_args: ModelConfig, is_tiny: bool) -> None:
    """If the rows are texts, keeps the adapter of a model for text and images out of the part that reads images.

    An adapter there would get no gradient, and servers such as vLLM refuse it. Names that only the text part has are not changed.
    """
    config, _ = config_and_class(model_args, is_tiny)
    if not model_args.use_peft or not model_args.lora_target_modules or config is None or not tiny.has_vision_part(config):
        return
    if config.is_encoder_decoder:
        return
    with torch.device("meta"):
        model = tiny.make_model(config)
    text = model.get_decoder()
    (prefix,) = (name for name, module in model.named_modules() if module is text)
    outside = [name for name, _ in model.named_modules() if not f"{name}.".startswith(f"{prefix}.")]
    names = model_args.lora_target_modules
    if names == "all-linear":
        names = linear_modules(text)
    elif isinstance(names, str) or not any(path.split(".")[-1] in names for path in outside):
        return
    model_args.lora_target_modules = rf"{re.escape(prefix)}\..*\.({'|'.join(names)})"


def build_adapter_on_meta(model_args: ModelConfig, name: str) -> PeftModel:
    """The model with its adapter on the meta device. Raises UserError for what PEFT or TRL's loss refuse."""
    model = build_on_meta(model_args)
    choice = f"the linear modules of {name} are {', '.join(linear_modules(model))}"
    try:
        with torch.device("meta"):
            model = get_peft_model(model, get_peft_config(model_args))
    except ValueError as error:
        reason = re.sub(r"(?s)(Target module \w+)\(.*\) is", r"\1 is", str(error))  # without all modules in that one
        raise UserError(f"--use_peft: {' '.join(reason.split())[:300]} ({choice})") from error
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
