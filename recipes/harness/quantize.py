"""Quantizes a model to 4 bits once and keeps it, so that no start does it again and no GPU ever holds it whole.

transformers quantizes while loading: on every rank, at every start, half an hour for 70B on two cores. Loading what is
quantized already takes seconds a layer.
"""

import hashlib
import os
import shutil
from pathlib import Path

from filelock import FileLock

from harness import tiny
from harness.folder import write_json
from harness.launched import say

SOURCE = "source.json"  # in a quantized model's folder: which model it was made from


def folder_of(model) -> Path:
    """Where the 4-bit weights of `model` (a `trl.ModelConfig`) are kept: one folder for every id and way of quantizing."""
    from huggingface_hub.constants import HF_HOME

    kind = [model.model_revision, model.bnb_4bit_quant_type, model.use_bnb_nested_quant, model.bnb_4bit_quant_storage]
    rehearsed = Path(model.model_name_or_path).is_relative_to(tiny.FOLDER.absolute())
    root = tiny.FOLDER.absolute().with_name(".quantized") if rehearsed else Path(HF_HOME, "quantized")
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
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        _quantize(model, draft)
        draft.rename(folder)


def _quantize(model, folder: Path):
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(os.cpu_count() or 1)
    quantized = AutoModelForCausalLM.from_pretrained(
        model.model_name_or_path,
        revision=model.model_revision,
        dtype=model.dtype,
        device_map={"": "cpu"},
        quantization_config=trl.get_quantization_config(model),
    )
    quantized.save_pretrained(folder, max_shard_size="2GB")
    AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision).save_pretrained(folder)
    write_json(folder / SOURCE, {"model": model.model_name_or_path, "revision": model.model_revision})


def substitute(model, args):
    """Puts the quantized folder in the place of the model's name. Its config says how it is quantized."""
    model.model_name_or_path, model.model_revision = str(folder_of(model)), "main"
    model.load_in_4bit = False
    args.model_init_kwargs = {**args.model_init_kwargs, "revision": "main"}
