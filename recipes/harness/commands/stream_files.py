"""The files of a stream that a run will read, on this machine: `--prepare` chooses and links them, a run finds them.

A stream has too many files to have all of them. The ends of Parquet files say how many rows they hold, so that as many are
chosen as the budget needs; from all over the list, whose neighbours are often alike.
"""

import hashlib
import random
from pathlib import Path

from harness.folder import read_json, write_json
from harness.launched import fail, say

import yaml

RECORD = "stream.json"  # beside the links: what they are enough for
SPARE = 1.1  # rows differ in length; the sample is small
PROCESSES = 8  # of a run whose config is not known yet, where it matters


def processes(data) -> int:
    """How many a run is thought to have: one stands for any number where the batch is one for all of them."""
    return 1 if data.global_batch_size and "gradient_accumulation_steps" not in data.given else PROCESSES


def _length(args) -> int:
    return getattr(args, "max_length", None) or 1024


def _tokens(data, args, processes: int) -> int:
    """The tokens a run reads."""
    a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * _length(args) * processes
    return data.max_tokens or args.max_steps * a_step


def choose(data, args, files: dict[str, list[str]], tokenizer) -> tuple[dict[str, list[str]], dict]:
    """The files to have of each split, and the record of what they are enough for; fails where that cannot be known.

    `files` are `hf://` addresses by split.
    """
    from huggingface_hub import HfFileSystem
    from pyarrow import parquet

    names = list(files[data.dataset_train_split])
    if not all(name.endswith(".parquet") for name in names):
        fail(
            f"{data.dataset_name} is a stream whose files are not Parquet, so nothing says how many of them a run needs: "
            "--dataset_streaming false downloads all of it"
        )
    tokens, packing = _tokens(data, args, processes(data)), getattr(args, "packing", False)
    rows = tokens / (min(_tokens_a_row(data, tokenizer), _length(args)) if packing else _length(args))
    random.Random(0).shuffle(names)
    chosen, found = [], 0
    while names and found < rows * SPARE + data.max_eval_samples:
        chosen.append(names.pop())
        with HfFileSystem().open(chosen[-1]) as file:
            found += parquet.read_metadata(file).num_rows
    test = data.dataset_test_split
    held_out = {test: files[test][:1]} if test in files and test != data.dataset_train_split else {}
    record = {"packing": packing, "tokens": tokens, "files": len(chosen), "of": len(chosen) + len(names)}
    return {data.dataset_train_split: sorted(chosen), **held_out}, record


def _tokens_a_row(data, tokenizer) -> float:
    from datasets import load_dataset

    stream = load_dataset(data.dataset_name, data.dataset_config, split=data.dataset_train_split, streaming=True)
    rows = list(stream.take(100))
    return sum(len(tokenizer(str(row.get(data.text_field, row)))["input_ids"]) for row in rows) / len(rows)


def path_in(address: str) -> str:
    """The path of a file in its repository, of `hf://datasets/OWNER/NAME@REVISION/PATH`."""
    return address.split("@")[1].split("/", 1)[1]


def _folder(data) -> Path:
    """Where the links of a data set are, in a folder of their own for every number of files."""
    from huggingface_hub.constants import HF_HOME

    kind = repr([data.dataset_name, data.dataset_config, data.dataset_train_split])
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    return Path(HF_HOME, "streams", f"{data.dataset_name.replace('/', '--')[-80:]}-{digest}")


def link(data, files: dict[str, list[str]], record: dict, snapshot: Path):
    """Makes a data set of these files of a snapshot, with the config and splits of the original."""
    folder = _folder(data) / f"{record['files']}-of-{record['of']}"
    paths = {split: [path_in(address) for address in addresses] for split, addresses in files.items()}
    for path in (path for split in paths.values() for path in split):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).unlink(missing_ok=True)
        (folder / path).symlink_to(snapshot / path)
    splits = [{"split": split, "path": names} for split, names in paths.items()]
    config = {"configs": [{"config_name": data.dataset_config or "default", "data_files": splits}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(config)}---\n", "utf-8")
    write_json(folder / RECORD, record)


def substitute(data, args, processes: int):
    """Puts the files that were prepared in the place of a stream of the hub, where they are enough for this run."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if not data.dataset_streaming or Path(data.dataset_name).exists():
        return
    records = [(read_json(path), path.parent) for path in _folder(data).glob(f"*/{RECORD}")]
    for record, folder in sorted(records, key=lambda pair: pair[0]["files"]):
        is_enough = record["packing"] == getattr(args, "packing", False) and _tokens(data, args, processes) <= record["tokens"]
        if is_enough or record["files"] == record["of"]:
            say(f"{data.dataset_name}: {record['files']} of its {record['of']} files, which --prepare has put into the cache")
            data.dataset_name = str(folder)
            return
    if HF_HUB_OFFLINE:
        fail(
            f"data set {data.dataset_name} is a stream, and this machine has {'too few' if records else 'none'} of its files; "
            "the hub cannot be reached: call ./launch.sh --prepare with the same flags where it can"
        )
