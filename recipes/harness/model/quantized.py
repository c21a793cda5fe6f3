"""4-bit models under FSDP: quantized once and kept on the disk, sharded from host memory, checked byte for byte.

transformers quantizes while it loads, on every process and at every start: half an hour for 70B on two cores. Loading a model
that is already quantized takes seconds per layer.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compat.transformers import transformer_layers
from harness.folder import read_json, write_json
from harness.messages import UserError, print_once
from harness.model.models import FILES_OF_MODEL, weight_files
from harness.rehearsal import tiny

import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig, TrainingArguments
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer
from trl import ModelConfig

SOURCE = "source.json"  # in the folder of a quantized model: the model it was made from


def quantized_folder(model_args: ModelConfig) -> Path:
    """Where the 4-bit weights of a model are kept: a folder for every model and way of quantizing.

    The revision is a commit here, see `use_commits`, so that the weights of an earlier one are not used.
    """
    from huggingface_hub.constants import HF_HOME

    local = Path(model_args.model_name_or_path).absolute()
    # A local model can be replaced by another one at the same path, so its files belong to the key.
    files = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(local.glob("*.safetensors"))]
    model = str(local) if files else model_args.model_name_or_path
    options = [
        model,
        files,
        model_args.model_revision,
        model_args.bnb_4bit_quant_type,
        model_args.use_bnb_nested_quant,
        model_args.bnb_4bit_quant_storage,
    ]
    digest = hashlib.sha256(repr(options).encode()).hexdigest()[:8]
    tiny_models = tiny.FOLDER.absolute()
    if local.is_relative_to(tiny_models):
        root = tiny_models.with_name(".quantized")
        name = local.name
    else:  # the end of the name is for people; the digest tells models apart
        root = Path(HF_HOME, "quantized")
        name = model.strip("/").replace("/", "--")
    return root / f"{name[-80:]}-{model_args.bnb_4bit_quant_type}-{digest}"


def quantize_once(model_args: ModelConfig) -> None:
    """Quantizes a model unless its folder exists. Only one process at a time does it; an interrupted one is continued."""
    folder = quantized_folder(model_args)
    name = model_args.model_name_or_path
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            print_once(f"The 4-bit weights of {name} are in {folder}.")
            return
        print_once(f"Quantizing {name} to 4 bits, once, into {folder} …")
        draft = folder.with_name(f".{folder.name}.draft")
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        try:
            quantize_files(model_args, draft)
        finally:
            torch.set_num_threads(threads)  # this process trains afterwards, as the others do
        draft.rename(folder)


def use_quantized_weights(model_args: ModelConfig, training_args: TrainingArguments) -> None:
    """Makes the arguments name the quantized folder. Its config.json says how it is quantized."""
    tiny.use_model(training_args, model_args, quantized_folder(model_args))
    model_args.load_in_4bit = False


def quantize_files(model_args: ModelConfig, folder: Path) -> None:
    """Writes what transformers would save of the quantized model, with one file of the original in memory at a time.

    Files that are already in `folder` are kept. (transformers 5.23 needs nearly twice the original model to quantize it:
    260 GB of host memory for 70B.)
    """
    import trl
    from huggingface_hub import snapshot_download
    from tqdm import tqdm
    from transformers import AutoConfig, AutoTokenizer

    quantization = trl.get_quantization_config(model_args)
    dtype = getattr(torch, model_args.dtype)
    name = model_args.model_name_or_path
    revision = model_args.model_revision
    config = AutoConfig.from_pretrained(name, revision=revision)
    with torch.device("meta"):
        model = tiny.make_model(config)
    head = model.get_output_embeddings()
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}

    source = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, revision=revision, **FILES_OF_MODEL))
    files = weight_files(source)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    bar = tqdm(total=sum(file.stat().st_size for file in files), unit="B", unit_scale=True, disable=None)
    for file in files:
        target = folder / file.name
        if not target.is_file():
            tensors = {}
            with safe_open(file, "pt") as weights:
                for tensor_name in weights.keys():  # noqa: SIM118 (safe_open is not a dict)
                    original = weights.get_tensor(tensor_name)
                    weight = original.to(dtype)
                    if tensor_name in linear:
                        tensors |= _quantize_weight(tensor_name, weight, quantization)
                    else:
                        tensors[tensor_name] = weight.clone()
                    bar.update(original.nbytes)
            draft = folder / f"{file.name}.draft"
            save_readable(tensors, draft)
            draft.replace(target)
        with safe_open(target, "pt") as weights:
            weight_map |= dict.fromkeys(weights.keys(), target.name)
    bar.close()
    if missing := linear - weight_map.keys():
        raise UserError(f"--load_in_4bit: {source} has no weight {min(missing)} in safetensors, so it cannot be quantized")

    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    config.dtype = dtype
    config.quantization_config = quantization.to_dict()
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(name, revision=revision).save_pretrained(folder)
    write_json(folder / SOURCE, {"model": name, "revision": revision})


def read_source(folder: str | Path) -> dict[str, Any]:
    """The model, with its revision, that the quantized weights in `folder` were made from; {} for another folder."""
    return read_json(Path(folder, SOURCE))


def _quantize_weight(name: str, weight: torch.Tensor, quantization: BitsAndBytesConfig) -> dict[str, torch.Tensor]:
    """A 4-bit weight and its quantization state, under the names that bitsandbytes' Linear4bit saves."""
    packed = pack(weight, quantization, "cpu")
    state = {f"{name}.{part}": tensor for part, tensor in packed.quant_state.as_dict(packed=True).items()}
    return {name: packed.data, **state}


def pack(weight: torch.Tensor, quantization: BitsAndBytesConfig, device: str) -> Any:
    """The `Params4bit` that bitsandbytes makes of a weight."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=quantization.bnb_4bit_use_double_quant,
        quant_type=quantization.bnb_4bit_quant_type,
        quant_storage=quantization.bnb_4bit_quant_storage,
    ).to(device)


@dataclass
class TrainedQuantization:
    """How the weights were quantized that an adapter was trained on."""

    settings: BitsAndBytesConfig
    dtype: torch.dtype  # of the weights that were quantized, and of what a 4-bit layer makes of them
    device: str  # that quantizes: other devices can round in another way

    def weights_in(self, model: torch.nn.Module) -> dict[str, bool]:
        """The names of the weights of a model that transformers quantizes, and whether it transposes them before.

        `model`: on the meta device. Its layers are replaced.
        """
        from bitsandbytes.nn import Linear4bit

        AutoHfQuantizer.from_config(self.settings, pre_quantized=False).preprocess_model(model=model, device_map=None)
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Linear4bit)]
        return {f"{name}.weight": issubclass(layer.source_cls, Conv1D) for name, layer in layers}

    def as_trained(self, weight: torch.Tensor, is_transposed: bool = False) -> torch.Tensor:
        """What a 4-bit layer computes with instead of an original weight: quantized, and unpacked again by bitsandbytes."""
        from bitsandbytes.functional import dequantize_4bit

        original = weight.T if is_transposed else weight
        packed = pack(original.to(self.dtype), self.settings, self.device)
        unpacked = dequantize_4bit(packed.data, packed.quant_state).cpu()
        if is_transposed:
            return unpacked.T
        return unpacked


def read_quantization(recorded: dict[str, Any]) -> TrainedQuantization | None:
    """What `quantization_of` in run/sharding.py has recorded in results or in a checkpoint; None without 4 bits."""
    if not recorded.get("quantization", {}).get("load_in_4bit"):
        return None
    settings = BitsAndBytesConfig.from_dict(recorded["quantization"])
    # Weights that are kept in a folder were quantized on the CPU, the others where they were loaded to.
    device = "cuda" if torch.cuda.is_available() and not recorded.get("quantized_weights") else "cpu"
    return TrainedQuantization(settings, getattr(torch, recorded["quantized_dtype"]), device)


def save_readable(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Saves a safetensors file that everyone who may read its folder can read; safetensors makes it the owner's alone."""
    save_file(tensors, path, {"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)


def install_byte_check(model: torch.nn.Module) -> None:
    """Stops the run, on any process, if 4-bit weights do not leave FSDP as they entered it. Call it before FSDP wraps the model.

    The packed bytes of every 4-bit weight in the first and the last layer are compared with those in the first forward pass,
    where they are all-gathered and on the device.
    """
    layers = list(transformer_layers(model).values())
    loaded = {}
    for layer in layers[:1] + layers[-1:]:
        for module in layer.modules():
            for weight in module.parameters(recurse=False):  # not again of the adapter around it
                if type(weight).__name__ == "Params4bit":
                    loaded[module] = _digest(weight)
    if not loaded:
        return
    torch.compiler.set_stance("force_eager")  # compiled layers contain the hooks, and would call them again after their removal

    def compare(module: torch.nn.Module, inputs: tuple) -> None:
        hooks.pop(module).remove()
        if _digest(module.weight) != loaded[module]:
            raise RuntimeError(
                "sharding changed the 4-bit weights: their storage was cast or its bits were not kept. "
                "Use bnb_4bit_quant_storage float32 with mixed_precision 'no'"
            )
        if not hooks:
            torch.compiler.set_stance("default")
            print_once(f"Sharding kept the 4-bit weights: {len(loaded)} compared byte for byte.")

    hooks = {module: module.register_forward_pre_hook(compare) for module in loaded}


def _digest(weight: torch.Tensor) -> str:
    copy = weight.detach().clone().view(torch.uint8).cpu()  # a view by numpy would keep FSDP2 from freeing the storage
    return hashlib.sha256(copy.numpy()).hexdigest()
