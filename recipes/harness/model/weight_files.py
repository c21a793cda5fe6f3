"""Whether the weight files of a model have the weights that its config names. transformers gives others random values."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.folder import read_json
from harness.hub import hub_errors
from harness.messages import UserError, plural

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# What is downloaded of a model: not its weights a second time in another format.
FILES_OF_MODEL = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"],
    # No subfolders, which can have the weights a second time, but additional_chat_templates/.
    "ignore_patterns": ["[!a]*/*", "a[!d]*/*", "consolidated*"],
}
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def class_of_model(config: PreTrainedConfig) -> Any:
    """The class that a config names, with which TRL's trainers load the model."""
    return getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)


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
