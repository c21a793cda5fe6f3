"""How the model is loaded: its dtype and what the trainer passes on; whether it fits the run."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.compat.bitsandbytes import keep_4bit_layout
from harness.compat.transformers import build_from_config, load_models_with, read_no_weights
from harness.compat.trl import compute_loss_without_triton
from harness.folder import read_json
from harness.hub import TOKENIZER, hub_errors
from harness.messages import UserError, is_first_process, plural
from harness.model.attention import class_of_model, config_of, dtype_of_products, set_attention
from harness.rehearsal import tiny
from harness.runs import Run

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
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
from trl import DistillationConfig, DPOConfig, ModelConfig, SFTConfig, get_peft_config

# Classes that generate text from tokens; some read images or sound too.
GENERATING = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
}
HOST_MEMORY = {"": "cpu"}  # a device map
# What is downloaded of a model: not its weights a second time in another format.
FILES_OF_MODEL = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"],
    # No subfolders, which can have the weights a second time, but additional_chat_templates/.
    "ignore_patterns": ["[!a]*/*", "a[!d]*/*", "consolidated*"],
}
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def set_loading_options(training_args: TrainingArguments, model_args: ModelConfig, run: Run) -> None:
    """Sets how the trainer loads the model that it gets by name, and how the loss is computed."""
    if run.data.formats:  # rows of a recipe that names none can have images
        keep_adapter_in_text_part(model_args, run.tiny)
    if run.gpu.no_triton:
        compute_loss_without_triton()
    if model_args.load_in_4bit and run.on_cpu:
        keep_4bit_layout()
    if model_args.load_in_4bit and run.is_sharded:
        # FSDP2 shards floating-point parameters only, and keeps their bits if it need not cast them.
        model_args.bnb_4bit_quant_storage = model_args.bnb_4bit_quant_storage or "float32"
        model_args.dtype = "bfloat16"
        load_models_with(load_into_host_memory)
    elif run.config.cpu_ram_efficient_loading and not is_first_process():
        # The weights of a reference model, of which TRL's trainer makes a second copy, are not sent by the first process.
        # Nor are those of a teacher, of which each process needs all.
        has_reference = hasattr(training_args, "precompute_ref_log_probs") or hasattr(training_args, "sync_ref_model")
        has_teacher = hasattr(training_args, "teacher_model_name_or_path")
        if not has_teacher and (model_args.use_peft or not has_reference):
            read_no_weights()
    is_default = model_args.dtype == ModelConfig.dtype and "dtype" not in run.given
    if model_args.load_in_4bit and not run.is_sharded and (is_default or model_args.dtype == "auto"):
        # Of what is not quantized, in which the 4-bit layers compute too. TRL's default is float32: embedding and head would be
        # twice as large, and the products many times as slow.
        model_args.dtype = dtype_of_products(training_args, "float32")
    set_attention(training_args, model_args, run)  # it depends on the dtype
    # Each process has the whole teacher. Trainers refuse options for one that is loaded already, and some need a dtype in them.
    if of_teacher := getattr(training_args, "teacher_model_init_kwargs", None):
        device = {"": str(training_args.device)}  # loggers write the arguments as JSON
        training_args.teacher_model_init_kwargs = {"device_map": device} | of_teacher
    if hasattr(training_args, "model_init_kwargs"):
        options = {
            "dtype": model_args.dtype,
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
            # TRL's default on one GPU is "auto", which leaves layers on the CPU if the model does not fit. None loads into host
            # memory, from where the trainer moves the model to the GPU; quantized weights are loaded onto the GPU.
            "device_map": None,
        }
        training_args.model_init_kwargs = options | (training_args.model_init_kwargs or {})


def load_into_host_memory(load: Callable[..., PreTrainedModel], model_class: type, name: str, **options: Any) -> PreTrainedModel:
    """Loads a model into host memory, so that FSDP can move one layer at a time to the GPU.

    SFTTrainer passes `device_map=None` in every distributed run, whatever the recipe says, and transformers takes None for the
    current GPU if the weights are quantized: every process would hold the whole 4-bit model there (huggingface/trl#6158).
    A model with a device, such as a teacher, is not sharded.
    """
    return load(name, **options | {"device_map": options.get("device_map") or HOST_MEMORY})


def build_small_model(
    load: Callable[..., PreTrainedModel],
    model_class: type[PreTrainedModel],
    name: str,
    config: PreTrainedConfig | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """A model of two layers with random weights, and with the vocabulary of the real one."""

    def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
        return tiny.shrink(config, {"vocab_size": config.get_text_config().vocab_size})

    model = build_from_config(model_class, name, shrink, config, revision, dtype)
    quantization = options.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    model.is_loaded_in_4bit = quantization.get("load_in_4bit", False)  # not of every kind of quantization
    model.is_loaded_in_8bit = quantization.get("load_in_8bit", False)
    with contextlib.suppress(OSError):  # not every model has a generation config
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    return model


def check_model(training_args: TrainingArguments, model_args: ModelConfig, run: Run) -> None:
    """Raises UserError unless config and tokenizer of the model can be read, and fit each other and the run."""
    name = model_args.model_name_or_path
    revision = model_args.model_revision
    check_architecture(training_args, model_args, name)
    config = AutoConfig.from_pretrained(name, revision=revision)
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization and "mxfp4" not in str(quantization) and run.is_sharded:  # those are loaded in bf16
        raise UserError(
            f"--model_name_or_path: the files of {name} are quantized, which FSDP cannot shard: pass the model that they were "
            "made from, with --load_in_4bit --use_peft for 4-bit weights"
        )
    with hub_errors(TOKENIZER, name):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    files = tokenizer.vocab_files_names.values()
    is_missing = Path(name).is_dir() and not any(Path(name, file).is_file() for file in files)  # transformers makes an empty one
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if is_missing or (vocabulary and max(tokenizer.get_vocab().values()) >= vocabulary):
        raise UserError(
            f"--model_name_or_path: the tokenizer of {name} ({' or '.join(files)}) is missing, or has tokens beyond the model's "
            f"vocab_size, {vocabulary}: copy its files from the source of the weights"
        )
    positions = count_positions(config.get_text_config())
    length = getattr(training_args, "max_length", None)
    if positions and length and length > positions:
        raise UserError(f"--max_length is {length}, but {name} has {positions} positions: pass {positions} or less")


def check_teacher(training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Raises UserError if a teacher's tokens are others than the model's.

    DistillationTrainer compares only the sizes of the vocabularies, and would compare the probabilities of different words.
    """
    teacher = training_args.teacher_model_name_or_path
    student = model_args.model_name_or_path
    vocabularies = []
    for name, revision in ((teacher, training_args.teacher_model_revision or "main"), (student, model_args.model_revision)):
        with hub_errors(TOKENIZER, name):
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        vocabularies.append(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    # Tokens that only one of them has are at the end, where the other model has unused rows.
    shared = min(map(len, vocabularies))
    if isinstance(training_args, DistillationConfig) and vocabularies[0][:shared] != vocabularies[1][:shared]:
        raise UserError(
            f"--teacher_model_name_or_path: {teacher} has other tokens than {student}: pass a teacher of the same family"
        )


def check_architecture(training_args: TrainingArguments, model_args: ModelConfig, name: str) -> None:
    """Raises UserError if TRL's trainer would load a class that is no causal language model.

    It loads the class that config.json names. A recipe with a plain Trainer loads its model itself. `name`: of the model, in
    messages.
    """
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    architecture = (config.architectures or [""])[0]
    is_other = hasattr(transformers, architecture) and architecture not in GENERATING
    if is_other and isinstance(training_args, SFTConfig | DPOConfig):
        raise UserError(
            f"--model_name_or_path: {name} is a {architecture}, and this recipe trains causal language models, such as "
            "Qwen2ForCausalLM: pass another model, or use a recipe that loads this one itself"
        )


def count_positions(config: PreTrainedConfig) -> int | None:
    """How many positions a model has, also with a RoPE that scales them; None if it has no such limit."""
    positions = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or {}  # of some models for each type of layer
    factor = scaling.get("factor") or 1
    return positions and max(positions, int(factor * (scaling.get("original_max_position_embeddings") or positions)))


def build_on_meta(model_args: ModelConfig) -> PreTrainedModel:
    """The model without its weights, on the meta device."""
    name = model_args.model_name_or_path
    revision = model_args.model_revision
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(name, revision=revision)
        if model_args.lora_task_type == "SEQ_CLS":  # set by a recipe for a classifier or a reward model
            return AutoModelForSequenceClassification.from_config(config)
        return tiny.make_model(config)


def keep_adapter_in_text_part(model_args: ModelConfig, is_tiny: bool) -> None:
    """If the rows are texts, keeps the adapter of a model for text and images out of the part that reads images.

    An adapter there would get no gradient, and servers such as vLLM refuse it. A regular expression of the user stays.
    """
    names = model_args.lora_target_modules
    if not model_args.use_peft or not names or (isinstance(names, str) and names != "all-linear"):
        return
    config = config_of(model_args, is_tiny)
    if config is None or not tiny.has_vision_part(config) or config.is_encoder_decoder:
        return
    with torch.device("meta"):
        model = tiny.make_model(config)
    text = model.get_decoder()
    (prefix,) = (path for path, module in model.named_modules() if module is text)
    if names == "all-linear":
        names = linear_modules(text)
    model_args.lora_target_modules = rf"{re.escape(prefix)}\.(.*\.)?({'|'.join(names)})"


def build_adapter_on_meta(model_args: ModelConfig, name: str) -> PeftModel:
    """The model with its adapter on the meta device.

    Raises UserError for a name that PEFT would ignore next to known ones, so that less is trained than the flags say.
    """
    model = build_on_meta(model_args)
    settings = get_peft_config(model_args)
    modules = [path for path, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None]
    weights = [path for path, _ in model.named_parameters()]
    with torch.device("meta"):
        adapted = get_peft_model(model, settings)  # replaces names of transformers 4 in the settings
    settings.modules_to_save = model_args.lora_modules_to_save  # PEFT adds the names that heads of classifiers can have
    for option, paths in (("target_modules", modules), ("target_parameters", weights), ("modules_to_save", modules)):
        given = getattr(settings, option) or []
        if isinstance(given, str):  # all-linear, or a regular expression for whole names
            continue
        unknown = [word for word in given if not any(f".{path}".endswith(f".{word}") for path in paths)]
        if unknown:
            known = dict.fromkeys(re.sub(r".*\.\d+\.", "", path) for path in paths)
            raise UserError(f"--lora_{option}: {name} has no {', '.join(sorted(unknown))}: pass some of {', '.join(known)}")
    return adapted


def linear_modules(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear modules but the output head, each once."""
    head = model.get_output_embeddings()
    names = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
            names[path.split(".")[-1]] = None
    return list(names)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads, sorted: a folder can have the same weights a second time."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    names = read_json(folder / INDEX, "weight_map").get("weight_map", {}).values()
    return [folder / name for name in sorted(set(names))]


def check_weights(name: str, revision: str = "main") -> PreTrainedModel | None:
    """Raises UserError unless the files of a model, which are downloaded first, have all of its weights, in their shapes.

    Returns the model on the meta device, which reads only names and shapes; None if the files are quantized: those have other
    weights, which the quantizer checks.
    """
    options = {"device_map": {"": "meta"}, "dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet_transformers(), hub_errors("model", name):
        config = AutoConfig.from_pretrained(name, revision=revision)
        if getattr(config, "quantization_config", None) is not None:
            return None
        model, found = class_of_model(config).from_pretrained(name, revision=revision, **options)
    check_found(found, name)
    return model


def check_found(found: dict[str, Any], name: str) -> None:
    """Raises UserError for weights that are missing or of another shape. `found`: from `from_pretrained`, its loading info."""
    problems = [
        f"{weight} is {list(size)} instead of {list(needed)}" for weight, size, needed in sorted(found["mismatched_keys"])
    ]
    problems += [f"{weight} is missing" for weight in sorted(found["missing_keys"])]
    if problems:
        raise UserError(
            f"{plural(len(problems), 'weight')} of {name} would be random, because its files do not fit its config.json "
            f"({', '.join(problems[:3])}): copy or download it again"
        )


def dtype_of_files(name: str, revision: str) -> torch.dtype | None:
    """The dtype of the first floating-point weight in the files of a model on this machine."""
    cached = try_to_load_from_cache(name, "config.json", revision=revision) if not Path(name).is_dir() else None
    folder = Path(cached).parent if isinstance(cached, str) else Path(name)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (safe_open is not a dict)
                if (dtype := weights.get_tensor(key).dtype).is_floating_point:  # memory-mapped
                    return dtype
    return None


def check_adapter_weights(model: PeftModel, folder: Path) -> None:
    """Raises UserError if the file of an adapter lacks weights that its adapter_config.json requires. PEFT only warns."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        missing = sorted(get_peft_model_state_dict(model, save_embedding_layers=False).keys() - set(weights.keys()))
    if missing:
        raise UserError(
            f"the adapter in {folder} lacks {plural(len(missing), 'weight')} that its adapter_config.json requires "
            f"({missing[0]}): copy it again"
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and its report about loaded weights."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()


def check_models(run: Run, arguments: tuple[Any, TrainingArguments, ModelConfig], with_weights: bool = True) -> None:
    """Raises UserError unless the model, and a teacher, fit each other and the run. In the first process only.

    A wrong model would be trained to the end, or fail after minutes of tokenizing. A rehearsal makes its tiny models here.
    `with_weights`: also of the files of the weights, which are downloaded.
    """
    _, training_args, model_args = arguments
    name = model_args.model_name_or_path
    teacher = getattr(training_args, "teacher_model_name_or_path", None)
    opened = copy.copy(model_args)
    if run.tiny:
        if name and tiny.family_of(name) is None:
            check_architecture(training_args, model_args, name)
        tiny.make_models(training_args, model_args)
        if name:
            opened.model_name_or_path, opened.model_revision = str(tiny.tiny_model_folder(model_args)), "main"
    elif name:
        check_model(training_args, model_args, run)
    if teacher and not run.tiny:
        check_teacher(training_args, model_args)
    if name and model_args.use_peft:
        build_adapter_on_meta(opened, name)
    if with_weights and not run.tiny:  # last: it downloads them
        if name:
            check_weights(name, model_args.model_revision)
        if teacher:
            check_weights(teacher, training_args.teacher_model_revision or "main")
