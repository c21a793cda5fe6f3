"""Quantizes a model to 4 bits once and keeps it, so that no start does it again and no GPU ever holds it whole.

transformers quantizes while loading: on every rank, at every start, half an hour for 70B on two cores. Loading what is
quantized already takes seconds a layer.
"""

import hashlib
import os
from pathlib import Path

from harness.commands.shards import save
from harness.folder import write_json
from harness.launched import fail, say
from harness.rehearsal import stand_ins

from filelock import FileLock

# What is downloaded of a model's weights: not the same once more under other names.
WEIGHTS = {"allow_patterns": ["*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]}
SOURCE = "source.json"  # in a quantized model's folder: which model it was made from


def folder_of(model) -> Path:
    """Where the 4-bit weights of `model` (a `trl.ModelConfig`) are kept: one folder for every id and way of quantizing."""
    from huggingface_hub.constants import HF_HOME

    kind = [model.model_revision, model.bnb_4bit_quant_type, model.use_bnb_nested_quant, model.bnb_4bit_quant_storage]
    rehearsed = Path(model.model_name_or_path).is_relative_to(stand_ins.FOLDER.absolute())
    root = stand_ins.FOLDER.absolute().with_name(".quantized") if rehearsed else Path(HF_HOME, "quantized")
    digest = hashlib.sha256(repr([model.model_name_or_path, *kind]).encode()).hexdigest()[:8]
    name = Path(model.model_name_or_path).name if rehearsed else model.model_name_or_path.strip("/").replace("/", "--")
    return root / f"{name[-80:]}-{model.bnb_4bit_quant_type}-{digest}"


def prepare(model, name: str):
    """Makes the 4-bit weights unless they are there. One process at a time; a folder that is there is whole.

    `name` is what to call the model in messages.
    """
    folder = folder_of(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return say(f"The 4-bit weights of {name} are in {folder}.")
        say(f"Quantizing {name} to 4 bits, once, into {folder} …")
        draft = folder.with_name(f".{folder.name}.draft")  # goes on where a kill left it, file by file
        _quantize(model, draft)
        draft.rename(folder)


def _quantize(model, folder: Path):
    """Writes what transformers would save of the quantized model, holding one file of it at a time; goes on with the next file.

    (transformers 5.23 holds nearly twice the original model while it quantizes: 260 GB for 70B.)
    """
    import torch
    import trl
    from huggingface_hub import snapshot_download
    from safetensors import safe_open
    from tqdm import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(os.cpu_count() or 1)
    settings = trl.get_quantization_config(model)
    config = AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    head = whole.get_output_embeddings()
    linear = {f"{n}.weight" for n, m in whole.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}

    source = Path(model.model_name_or_path)
    if not source.is_dir():
        source = Path(snapshot_download(str(source), revision=model.model_revision, **WEIGHTS))
    folder.mkdir(parents=True, exist_ok=True)
    shards = [shard for shard in sorted(source.glob("*.safetensors")) if not shard.name.startswith("consolidated")]
    bar, index = tqdm(total=sum(shard.stat().st_size for shard in shards), unit="B", unit_scale=True, disable=None), {}
    for shard in shards:
        packed, half = folder / shard.name, folder / f"{shard.name}.half"
        if not packed.is_file():
            tensors = {}
            with safe_open(shard, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (safe_open is no dict)
                    original = weights.get_tensor(name)
                    weight = original.to(getattr(torch, model.dtype))
                    tensors |= _packed(name, weight, settings) if name in linear else {name: weight.clone()}
                    bar.update(original.nbytes)
            save(tensors, half)
            half.replace(packed)
        with safe_open(packed, "pt") as weights:
            index |= dict.fromkeys(weights.keys(), packed.name)
    bar.close()
    if missing := linear - index.keys():
        fail(f"{source} has no weight {sorted(missing)[0]} in safetensors, so it cannot be quantized here")
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    config.dtype, config.quantization_config = getattr(torch, model.dtype), settings.to_dict()
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision).save_pretrained(folder)
    write_json(folder / SOURCE, {"model": model.model_name_or_path, "revision": model.model_revision})


def _packed(name: str, weight, settings) -> dict:
    """A 4-bit weight and its quantization state under the names that bitsandbytes' Linear4bit saves."""
    from bitsandbytes.nn import Params4bit

    packed = Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=settings.bnb_4bit_use_double_quant,
        quant_type=settings.bnb_4bit_quant_type,
        quant_storage=settings.bnb_4bit_quant_storage,
    ).to("cpu")
    state = {f"{name}.{part}": tensor for part, tensor in packed.quant_state.as_dict(packed=True).items()}
    return {name: packed.data, **state}


def substitute(model, args):
    """Puts the quantized folder in the place of the model's name. Its config says how it is quantized."""
    model.model_name_or_path, model.model_revision = str(folder_of(model)), "main"
    model.load_in_4bit = False
    args.model_init_kwargs = {**args.model_init_kwargs, "revision": "main"}
