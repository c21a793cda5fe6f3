"""Whether the weight files of a model are complete, and have the weights that its config names."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.folder import read_json
from harness.hub import hub_errors, without_progress_bars
from harness.json_types import shorten
from harness.messages import UserError, plural, print_once

import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

WEIGHTS = "model.safetensors"
LONGEST_NAME = 255  # bytes of the name of a file
INDEX = f"{WEIGHTS}.index.json"
NAMED = 3  # weights in a message


def folder_of_weights(name: str, revision: str) -> Path | None:
    """The folder with the weights of a model: its own, or that in the cache of the Hub; None if they are not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).is_dir():
        return Path(name)
    for file in (WEIGHTS, INDEX):
        cached = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str) and all((Path(cached).parent / part).is_file() for part in weight_files(Path(cached).parent)):
            return Path(cached).parent
    return None


def dtype_of_weights(name: str, revision: str) -> torch.dtype | None:
    """The dtype of the first floating-point weight in the files of a model, None if they are not on this machine."""
    folder = folder_of_weights(name, revision)
    for file in weight_files(folder) if folder else []:
        with safe_open(folder / file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (safe_open is not a dict)
                dtype = weights.get_tensor(key).dtype  # memory-mapped
                if dtype.is_floating_point:
                    return dtype
    return None


def check_weights_on_hub(name: str, revision: str) -> None:
    """`check_weights` before a model is downloaded from the Hub. Does nothing if the Hub does not answer.

    Downloads only the headers of the files, which have the names and shapes of the weights. transformers gets sparse files with
    these headers, as long as the real ones, but without values. So the values of tied weights are not compared.
    """
    from huggingface_hub import HfApi, hf_hub_download, utils
    from huggingface_hub.utils import NotASafetensorsRepoError, SafetensorsParsingError, httpx

    no_header = (ValueError, TypeError, LookupError, AttributeError, NotASafetensorsRepoError, SafetensorsParsingError)

    try:
        with without_progress_bars(utils):
            found = HfApi().get_safetensors_metadata(name, revision=revision)
        config = hf_hub_download(name, "config.json", revision=revision)
    except (OSError, httpx.HTTPError, *no_header):
        return  # the download, which comes next, says what is wrong
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copyfile(config, folder / "config.json")
        if found.sharded:
            (folder / INDEX).write_text(json.dumps({"metadata": found.metadata, "weight_map": found.weight_map}), "utf-8")
        try:
            for file in weight_files(folder):
                write_header(folder / file, found.files_metadata[file].tensors)
        except (OSError, TypeError):  # a file system without such files, or lengths that no file has
            return
        check_names_and_shapes(folder, name)


def write_header(path: Path, tensors: dict[str, Any]) -> None:
    """Writes a safetensors file without its content. `tensors`: `huggingface_hub`'s TensorInfo by the names of the weights."""
    entries = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
        for name, tensor in tensors.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0))


def check_weights(folder: Path, name: str) -> PreTrainedModel | None:
    """Raises UserError unless the files in `folder` are complete and have every weight of the model, in its shape.

    Returns the model on the meta device, None if its files are quantized.

    transformers gives weights that are not in the files random values. It loads the files here onto the meta device, which reads
    only the names and shapes. `name`: of the model, in messages.
    """
    check_weight_files(folder)
    if model := check_names_and_shapes(folder, name):
        check_tied_weights(model, folder, name)
    return model


def names_in_model(model: PreTrainedModel | None) -> Callable[[str], str]:
    """The name in a model of a weight by its name in the files. The files of many models that read images have older names.

    `model`: None for quantized files.
    """
    if model is None:
        return str
    known = model.state_dict()
    renamings = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]

    def name_in_model(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        return renamed if renamed in known else name

    return name_in_model


def check_names_and_shapes(folder: Path, name: str) -> PreTrainedModel | None:
    """See `check_weights`; of complete files. Returns the model on the meta device, None if its files are quantized."""
    with hub_errors("model", name):
        config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:  # its files have other weights, which the quantizer checks
        return None
    options = {"device_map": {"": "meta"}, "dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet_transformers(), hub_errors("model", name):
        model, found = class_of_model(config).from_pretrained(folder, **options)
    check_found(model, found, name)
    return model


def class_of_model(config: PreTrainedConfig) -> Any:
    """The class that a config names, with which TRL's trainers load the model."""
    return getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)


def check_found(model: PreTrainedModel, found: dict[str, Any], name: str) -> None:
    """Raises UserError if the files of a model lack weights, or have them in other shapes than the config says.

    `found`: what `from_pretrained` returns with `output_loading_info`. Prints a warning for weights that are not used.
    """
    if mismatched := sorted(found["mismatched_keys"]):
        weight, in_file, by_config = mismatched[0]
        shapes = f"{weight} is {list(in_file)} in the files and {list(by_config)} by config.json"
        raise UserError(f"{name}: {shapes}: copy config.json from the source of the weights")
    if missing := sorted(found["missing_keys"]):
        head = model.get_output_embeddings()
        of_head = [weight for weight, value in model.named_parameters() if head is not None and value is head.weight]
        tie = ", or set tie_word_embeddings to true in config.json if the output layer has the weights of the embeddings"
        raise UserError(
            f"the files of {name} lack {plural(len(missing), 'weight')} that its config.json requires ({_first(missing)}), which "
            f"would be random: copy or download it again{tie if missing == of_head else ''}"
        )
    if unused := sorted(found["unexpected_keys"]):
        print_once(
            f"warning: {name}: {plural(len(unused), 'weight')} in its files ({_first(unused)}) are not used: "
            f"{type(model).__name__} with this config.json does not have them."
        )


def check_tied_weights(model: PreTrainedModel, folder: Path, name: str) -> None:
    """Raises UserError if weights that the config ties are in the files with different values, so that they cannot be tied.

    `model` is on the meta device, where transformers leaves them untied if the files have both.
    """
    for target, source in model.all_tied_weights_keys.items():
        if model.get_parameter(target) is model.get_parameter(source):
            continue
        first, second = (read_weight(folder, weight) for weight in (target, source))
        if first is not None and second is not None and not torch.equal(first, second):
            raise UserError(
                f"config.json of {name} ties {target} to {source}, but its files have different values for the two: set "
                "tie_word_embeddings to false in config.json, or copy or download it again"
            )


def check_adapter_weights(model: PeftModel, folder: Path) -> None:
    """Raises UserError if the file of an adapter lacks weights that its adapter_config.json requires. PEFT only warns."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        missing = sorted(get_peft_model_state_dict(model, save_embedding_layers=False).keys() - set(weights.keys()))
    if missing:
        raise UserError(
            f"the adapter in {folder} lacks {plural(len(missing), 'weight')} that its adapter_config.json requires "
            f"({_first(missing)}): copy it again"
        )


def read_weight(folder: Path, name: str) -> torch.Tensor | None:
    """A weight by its name in the model. Files can leave out the prefix of the model without its head."""
    for file in weight_files(folder):
        with safe_open(folder / file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (safe_open is not a dict)
                if name == key or name.endswith(f".{key}"):
                    return weights.get_tensor(key)
    return None


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


def _first(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files of a model."""
    index = folder / INDEX
    if index.is_file() and not (folder / WEIGHTS).is_file():
        names = sorted(set(read_json(index, {"weight_map": dict[str, str]})["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name or len(name.encode(errors="replace")) > LONGEST_NAME]:
            raise UserError(f"{index} is damaged: it names {shorten(outside[0])}, which is no file next to it")
        return names
    return [WEIGHTS]


def check_weight_files(folder: Path) -> None:
    """Raises UserError unless every safetensors file of a model folder exists and has the length that its header says."""
    for name in weight_files(folder):
        path = folder / name
        if not path.is_file():
            raise UserError(
                f"--model_name_or_path: {folder} has no {name}: it is incomplete, or has weights in another format (only "
                "safetensors are loaded)"
            )
        try:
            with safe_open(path, "pt"):  # reads the header, and compares it with the length of the file
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"--model_name_or_path: {path} is not a complete safetensors file ({error}): copy or download it again"
            ) from error
