"""From --dataset_name to rows: opens a file, a folder or a dataset of the Hub, converts its rows, and holds some out."""

import glob
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from harness.compat.datasets import end_streams_at_once
from harness.data import formats
from harness.folder import read_json
from harness.hub import hub_errors
from harness.launched import UserError, print_once

import numpy as np
import trl
import xxhash
from datasets import Dataset, IterableDataset, ReadInstruction, concatenate_datasets, load_dataset, load_dataset_builder
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HOME, HF_HUB_OFFLINE
from transformers import TrainingArguments

FILES_AT_ONCE, SHUFFLE_BUFFER = 4, 1_000  # of a stream: rows come from this many files in turn, and pass through this buffer
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
FIRST_ROWS = 400  # of each split, for a preview
ROWS_TO_CHECK = 20  # of each split, before a run
DIGEST_BYTES = 2**20  # at each end of a local file
# Next to the files of a stream that --prepare has downloaded: for how many tokens, and samples, they are enough.
PREPARED = "stream.json"


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """TRL's ScriptArguments, and budgets that do not depend on the number of GPUs."""

    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows per optimizer step on all processes together; sets gradient_accumulation_steps."},
    )
    max_tokens: int | None = field(default=None, metadata={"help": "Train on this many tokens; sets max_steps."})
    max_samples: int | None = field(
        default=None,
        metadata={"help": "Train on at most this many documents. A stream with num_train_epochs keeps them in memory."},
    )
    max_eval_samples: int = field(
        default=256, metadata={"help": "Documents held out for evaluation and never trained on, at most."}
    )
    profile: bool = field(default=False, metadata={"help": "Profile some steps in the middle of the run."})
    mirror: str | None = field(
        default=None,
        metadata={"help": "URL of a folder (s3://, gs://, file:// …) to which checkpoints and the model are uploaded."},
    )

    # Set by `parse`. Without an annotation they are no fields, so they are no flags.
    dataset_formats = ()  # the formats of rows that the recipe can train on (see formats.py), its first choice first
    display_name = ""  # the dataset's name in messages; dataset_name is another one in a rehearsal
    given = frozenset()  # names of all arguments that the user passed
    text_field, seed = "text", 0
    first_rows_only = False  # for a preview
    keeps_samples = False  # of a stream: its max_samples rows are read once, for all epochs


def load(script_args: ScriptArguments, keep: Callable[[dict], bool] | None = None) -> tuple[Dataset | IterableDataset, Dataset]:
    """Loads the rows to train on and the rows to evaluate on.

    Args:
        script_args: the first of the three arguments that `parse` returns.
        keep: a function of a row; rows for which it returns False are dropped.

    Returns:
        `(train_dataset, eval_dataset)`, rows in the first format of `dataset_formats` that they can be converted to, see
        formats.py. Rows without a text or an answer are dropped.

        The evaluation rows are the first `max_eval_samples` of the split for evaluation. Without such a split as many are
        held out of the training split, at most a tenth of it; equal rows are not trained on.
    """
    end_streams_at_once()
    splits = (
        open_first_rows(script_args) if script_args.first_rows_only else open_splits(script_args, script_args.dataset_streaming)
    )
    train, test = choose_splits(script_args, splits)
    format, columns, _ = find_format(script_args, train)
    if format in formats.PREFERENCE_FORMATS and formats.is_preference(dict.fromkeys(columns, True)):
        print_once(f"{script_args.display_name} is preference data: `chosen` is trained on, `rejected` is ignored.")
    settings = {"format": format, "text_field": script_args.text_field}
    if keep is not None:
        train, test = train.filter(keep), test and test.filter(keep)

    count = script_args.max_eval_samples
    if test is not None:
        eval_rows = list(test.take(count))
    elif isinstance(train, IterableDataset):
        eval_rows = hold_out_of_stream(train, count)
    else:
        parts = train.train_test_split(test_size=at_most_a_tenth(len(train), count), seed=0)
        train, eval_rows = parts["train"], list(parts["test"])
    eval_rows = [converted for row in eval_rows if (converted := formats.convert(row, **settings))]
    held_out = set()
    if test is None:
        held_out = {str(row) for row in eval_rows}
        print_once(
            f"{script_args.display_name} has no split {script_args.dataset_test_split}: {len(eval_rows)} rows of "
            f"{script_args.dataset_train_split} are held out for evaluation and never trained on."
        )

    train = train.filter(_is_trained_on, fn_kwargs=settings | {"held_out": held_out})
    if not list(train.take(1)):
        raise UserError(
            f"--dataset_name: no row of {script_args.display_name} is left to train on: all are without a text or answer, or "
            "equal to a row that is held out for evaluation"
        )
    if script_args.max_samples and not isinstance(train, IterableDataset):
        train = train.take(script_args.max_samples)
    train = train.map(formats.convert, fn_kwargs=settings, remove_columns=columns)
    if isinstance(train, IterableDataset):
        train = train.shuffle(script_args.seed, buffer_size=SHUFFLE_BUFFER, max_buffer_input_shards=FILES_AT_ONCE)
        train = train.take(script_args.max_samples) if script_args.max_samples else train
    if isinstance(train, IterableDataset) and script_args.keeps_samples:
        train = Dataset.from_list(list(train.take(FIRST_ROWS) if script_args.first_rows_only else train))
        print_once(f"{script_args.display_name}: {len(train):,} rows of the stream are kept in memory, for every epoch the same.")
    return train, Dataset.from_list(eval_rows)


def choose_splits(script_args: ScriptArguments, splits: dict[str, Any]) -> tuple[Any, Any]:
    """The rows to train on and to evaluate on, splits or slices of splits; None for the latter if there is no such split."""
    names = script_args.dataset_train_split, script_args.dataset_test_split
    if names[0] in splits and not is_slice(names[1]):
        return splits[names[0]], splits.get(names[1])
    lengths = {str(split): len(rows) for split, rows in splits.items()}
    chosen = [
        concatenate_datasets([splits[split].select(range(start, end)) for split, start, end in parts]) if parts else None
        for parts in parts_of_splits(script_args, lengths)
    ]
    return chosen[0], chosen[1]


def is_slice(name: str) -> bool:
    """Whether this is `train[:1%]`, `train+test` or the like, and not the name of one split."""
    return "[" in name or "+" in name


def splits_of(name: str) -> list[str]:
    """The splits of `train[:1%]+test`: train and test."""
    return [part.split("[")[0].strip() for part in name.split("+")]


Parts = list[tuple[str, int, int]]  # split, start and end


def parts_of_splits(script_args: ScriptArguments, lengths: dict[str, int]) -> tuple[Parts, Parts]:
    """Which rows of which splits to train on and to evaluate on; [] for the latter if there is no such split.

    Raises UserError for a slice that `datasets` does not understand, that has no rows, or that shares rows with the other.
    """
    found = []
    for flag in ("dataset_train_split", "dataset_test_split"):
        name = getattr(script_args, flag)
        if not is_slice(name) and name not in lengths:
            found.append([])
            continue
        try:
            parts = [(part.splitname, part.from_, part.to) for part in ReadInstruction.from_spec(name).to_absolute(lengths)]
        except ValueError as error:
            raise UserError(f"--{flag} {name}: {error}") from error
        if not any(start < end for _, start, end in parts):
            sizes = ", ".join(f"{split} has {lengths[split]:,}" for split, _, _ in parts)
            raise UserError(f"--{flag} {name} has no rows; {sizes}")
        found.append(parts)
    for split, start, end in found[0]:
        for other, other_start, other_end in found[1]:
            if split == other and max(start, other_start) < min(end, other_end):
                raise UserError(
                    f"--dataset_train_split {script_args.dataset_train_split} and --dataset_test_split "
                    f"{script_args.dataset_test_split} share rows of {split}: pass slices that do not overlap"
                )
    return found[0], found[1]


def _is_trained_on(row: dict, format: str, text_field: str, held_out: set[str]) -> bool:
    converted = formats.convert(row, format, text_field)
    return converted is not None and str(converted) not in held_out


def hold_out_of_stream(rows: IterableDataset, count: int) -> list[dict]:
    """The first rows of the last row group of the last file, which is far from what is trained on first.

    A stream of one file without row groups gives a random tenth of its first `10 * count` rows.
    """
    last_file = rows.shard(rows.num_shards, rows.num_shards - 1).reshard()
    last_group = last_file.shard(last_file.num_shards, last_file.num_shards - 1)
    if rows.num_shards * last_file.num_shards > 1:
        return list(last_group.take(count))
    first = list(last_group.take(10 * count))
    order = np.random.default_rng(0).permutation(len(first))
    return [first[index] for index in order[: at_most_a_tenth(len(first), count)]]


def at_most_a_tenth(rows: int, count: int) -> int:
    """How many of `rows` to hold out."""
    if rows < 2:
        raise UserError("--dataset_name: a dataset of one row leaves none to evaluate on: pass a split as --dataset_test_split")
    return min(count, max(1, rows // 10))


def dataset_path(script_args: ScriptArguments) -> Path:
    return Path(script_args.dataset_name).expanduser().absolute()


def open_splits(script_args: ScriptArguments, streaming: bool) -> dict[str, Dataset | IterableDataset]:
    """All splits of the dataset. Raises UserError if it cannot be opened."""
    path, name = dataset_path(script_args), script_args.dataset_name
    if not path.exists() and (name.startswith(("/", ".", "~")) or path.suffix in SUFFIXES):
        raise UserError(f"--dataset_name: file or folder not found: {name}")
    if script_args.dataset_config and path.is_file():
        raise UserError(
            f"--dataset_config: {script_args.display_name} is one file, so it has no configs: leave out "
            f"--dataset_config {script_args.dataset_config}"
        )
    with hub_errors("dataset", script_args.display_name):
        if path.is_file():
            getLogger("huggingface_hub.repocard").setLevel(ERROR)  # a README.md next to the file does not describe it
            return load_dataset(str(path.parent), data_files=glob.escape(path.name), streaming=streaming)
        if not path.exists() and not HF_HUB_OFFLINE:
            HfApi().dataset_info(name)  # fails at once when it is not there or the Hub is unreachable
        return load_dataset(str(path) if path.exists() else name, script_args.dataset_config, streaming=streaming)


def open_first_rows(script_args: ScriptArguments) -> dict[str, Dataset | IterableDataset]:
    """The splits that a recipe uses; of data that is not streamed only the first rows, without downloading the rest."""
    used = (script_args.dataset_train_split, script_args.dataset_test_split)
    if any(map(is_slice, used)):  # a stream cannot be sliced
        chosen = choose_splits(script_args, open_splits(script_args, streaming=False))
        return {name: rows.take(FIRST_ROWS) for name, rows in zip(used, chosen, strict=True) if rows}
    splits = {name: rows for name, rows in open_splits(script_args, streaming=True).items() if name in used}
    if script_args.dataset_streaming:
        return splits
    return {name: Dataset.from_list(list(rows.take(FIRST_ROWS)), features=rows.features) for name, rows in splits.items()}


def count_training_rows(script_args: ScriptArguments) -> int | None:
    """Rows of the training split, None for a stream that does not say."""
    is_local = dataset_path(script_args).exists() and not script_args.dataset_streaming
    if is_local or is_slice(script_args.dataset_train_split):
        return len(choose_splits(script_args, open_splits(script_args, streaming=False))[0])
    rows = open_splits(script_args, streaming=True)[script_args.dataset_train_split]
    return getattr((rows.info.splits or {}).get(script_args.dataset_train_split), "num_examples", None)


def check_dataset(script_args: ScriptArguments) -> list[dict]:
    """Raises UserError unless every split that is used exists and has rows in a fitting format.

    Returns some converted rows of the training split; [] if nothing can be checked, offline.
    """
    for name in ("max_samples", "max_eval_samples"):
        if getattr(script_args, name) is not None and getattr(script_args, name) < 1:
            raise UserError(f"--{name} is {getattr(script_args, name)}, expected 1 or more")
    is_local = dataset_path(script_args).exists()
    if HF_HUB_OFFLINE and script_args.dataset_streaming and not is_local:
        return []  # only `datasets` can tell what its cache holds
    # Streaming downloads no more than it reads. Offline, only a dataset that is cached as a whole opens.
    splits = open_splits(script_args, streaming=is_local or not HF_HUB_OFFLINE)
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    found = f"{script_args.display_name} has the split{'s' if len(splits) > 1 else ''} {', '.join(splits)}"
    for name in splits_of(train):
        if name not in splits:
            raise UserError(f"--dataset_train_split: {found}, none called {name}: pass one of these")
    for name in splits_of(test):
        if name not in splits and "dataset_test_split" in script_args.given:
            raise UserError(f"--dataset_test_split: {found}, none called {name}: leave the flag out to hold some rows out")
    if test == train:
        raise UserError(f"--dataset_train_split and --dataset_test_split are both {train}: pass two different splits")
    if is_slice(train) or is_slice(test):
        check_slices(script_args, splits)
    for name in splits_of(test):
        if name in splits:
            find_format(script_args, splits[name])
    return [row for name in splits_of(train) for row in find_format(script_args, splits[name])[2]]


def check_slices(script_args: ScriptArguments, splits: dict[str, IterableDataset]) -> None:
    """Raises UserError for slices that cannot be read. `load` checks those of splits of unknown length again."""
    infos = {str(name): (rows.info.splits or {}).get(name) for name, rows in splits.items()}
    parts_of_splits(script_args, {name: getattr(info, "num_examples", None) or 10**9 for name, info in infos.items()})


def find_format(script_args: ScriptArguments, rows: Dataset | IterableDataset) -> tuple[str, list[str], list[dict]]:
    """The first of `dataset_formats` that the first rows can be converted to, their column names, and the converted rows."""
    with hub_errors("dataset", script_args.display_name):
        first = list(rows.take(ROWS_TO_CHECK))
    if not first:
        raise UserError(f"--dataset_name: {script_args.display_name} has no rows in {rows.split}")
    for format in script_args.dataset_formats:
        if converted := [new for row in first if (new := formats.convert(row, format, script_args.text_field))]:
            return format, list(first[0]), converted
    if script_args.dataset_formats:
        wanted = " or ".join(formats.DESCRIPTIONS[format] for format in script_args.dataset_formats)
        mismatch = formats.explain_mismatch(first, script_args.dataset_formats, script_args.text_field)
        raise UserError(f"--dataset_name: {script_args.display_name} {mismatch}; this recipe needs {wanted}")
    return "", [], first


def digest_local_files(script_args: ScriptArguments) -> str:
    """A checksum of the names, the sizes, and the first and last MiB of all local files; "" for a dataset of the Hub."""
    path = dataset_path(script_args)
    if not path.exists():
        return ""
    digest = xxhash.xxh3_64()
    for file in [path] if path.is_file() else _files_below(path):
        with hub_errors("dataset", script_args.display_name), file.open("rb", buffering=0) as content:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path.parent)} {size} ".encode())
            for start in sorted({0, max(0, size - DIGEST_BYTES)}):
                content.seek(start)
                digest.update(content.read(DIGEST_BYTES))
    return digest.hexdigest()


def print_ignored_files(script_args: ScriptArguments) -> None:
    """Prints which files of a folder are ignored: `datasets` reads the files of one format only."""
    path = dataset_path(script_args)
    if not path.is_dir():
        return
    with hub_errors("dataset", script_args.display_name):
        data_files = load_dataset_builder(str(path), script_args.dataset_config).config.data_files or {}
    read = {Path(name) for names in data_files.values() for name in names}
    kinds = {suffix for file in read for suffix in file.suffixes}
    ignored = {file.suffix for file in _files_below(path) if file.suffix in SUFFIXES and file not in read} - kinds
    if ignored:
        print_once(
            f"{script_args.display_name}: reading the {' and '.join(sorted(kinds))} files, ignoring all "
            f"{' and '.join(sorted(ignored))} files."
        )


def _files_below(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("[!.]*")) if file.is_file()]


def tokens_of_run(script_args: ScriptArguments, training_args: TrainingArguments, processes: int) -> int:
    """How many tokens a run reads."""
    rows = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * processes
    return script_args.max_tokens or training_args.max_steps * rows * (getattr(training_args, "max_length", None) or 1024)


def prepared_folder(script_args: ScriptArguments) -> Path:
    """Where --prepare keeps the files of a stream, in a folder for every number of files."""
    kind = repr([script_args.dataset_name, script_args.dataset_config, script_args.dataset_train_split])
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    return Path(HF_HOME, "streams", f"{script_args.dataset_name.replace('/', '--')[-80:]}-{digest}")


def use_prepared_files(script_args: ScriptArguments, training_args: TrainingArguments, processes: int) -> None:
    """Reads a stream from the files that --prepare has downloaded, if they are enough for this run."""
    if not script_args.dataset_streaming or Path(script_args.dataset_name).exists():
        return
    prepared = [(read_json(path), path.parent) for path in prepared_folder(script_args).glob(f"*/{PREPARED}")]
    for record, folder in sorted(prepared, key=lambda pair: pair[0]["files"]):
        if script_args.keeps_samples:
            is_enough = script_args.max_samples <= record.get("samples", 0)
        else:
            has_tokens = tokens_of_run(script_args, training_args, processes) <= record["tokens"]
            is_enough = has_tokens and record["packing"] == getattr(training_args, "packing", False)
        if is_enough or record["files"] == record["of"]:
            print_once(f"{script_args.dataset_name}: using {record['files']} of its {record['of']} files, from --prepare.")
            script_args.dataset_name = str(folder)
            return
    if HF_HUB_OFFLINE:
        amount = "too few" if prepared else "none"
        raise UserError(
            f"--dataset_name: {script_args.dataset_name} is a stream, {amount} of its files are on this machine, and the Hub "
            "cannot be reached: run ./launch.sh --prepare with the same flags on a machine with internet"
        )
