"""A model against the run that is to train it, before it is loaded: weights, tokenizer, length."""

import json
from pathlib import Path

from harness import hub
from harness.launched import fail

WEIGHTS = "model.safetensors"


def check(args, model, with_weights: bool):
    """Fails unless the config can be read, the weights of a folder are whole, and tokenizer and length fit the model."""
    from transformers import AutoConfig, AutoTokenizer

    name, revision = model.model_name_or_path, model.model_revision
    hub.reachable(name, revision)
    with hub.errors("model", name):
        config = AutoConfig.from_pretrained(name, revision=revision)
        config = config.get_text_config()
    if Path(name).is_dir() and with_weights:
        _weights(Path(name))
    with hub.errors("the tokenizer of", name):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        last = max(tokenizer.get_vocab().values())
    files = tokenizer.vocab_files_names.values()
    if Path(name).is_dir() and not any(Path(name, file).is_file() for file in files):
        fail(f"{name} has no tokenizer ({' or '.join(files)}): copy it from where the weights are from")
    words = getattr(config, "vocab_size", None)
    if words and last >= words:
        fail(
            f"the tokenizer of {name} has tokens up to number {last}, and the model has {words}: they do not belong together; "
            "copy the tokenizer's files from where the weights are from"
        )
    positions, length = getattr(config, "max_position_embeddings", None), getattr(args, "max_length", None)
    if positions and length and length > positions:
        fail(f"--max_length {length} is more than the {positions} positions of {name}: give {positions} or less")


def _weights(folder: Path):
    """Every safetensors file of a model folder is there and as long as its header says. Reads the headers only."""
    index, files = folder / f"{WEIGHTS}.index.json", [WEIGHTS]
    if index.is_file() and not (folder / WEIGHTS).is_file():
        with hub.errors("model", str(folder)):
            files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    if absent := [name for name in files if not (folder / name).is_file()]:
        fail(f"{folder} has no {absent[0]}: it is not whole, or has weights in another format (only safetensors are loaded)")
    for name in files:
        try:
            with (folder / name).open("rb") as file:
                header = json.loads(file.read(size := int.from_bytes(file.read(8), "little")))
            wanted = 8 + size + max((entry["data_offsets"][1] for word, entry in header.items() if word != "__metadata__"))
        except (ValueError, TypeError, KeyError, OverflowError, MemoryError, AttributeError):
            fail(f"{folder / name} is not a whole safetensors file: copy or download it again")
        if (found := (folder / name).stat().st_size) != wanted:
            fail(f"{folder / name} has {found:,} bytes, its header says {wanted:,}: copy or download it again")
