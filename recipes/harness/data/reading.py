"""Which datasets and splits a run reads, and their rows as the files have them; the rows and tokens of a step.

`datasets` reads Parquet, Arrow, saved datasets and the Hub. JSON, CSV and text are read here: the JSON builder of datasets 5.2
reads texts such as 2024-01-02T00:00:00Z as dates, and fails if a column, a key or another type is first seen after 10 MB, as
`train` in one message. Its CSV builder drops quotation marks that are not doubled, and has to be told the separator and that NA
is a word.
"""

import csv
import functools
import glob
import gzip
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.data.stream_rows import features_of_files, open_parquet
from harness.hub import hub_errors
from harness.messages import UserError, plural, print_once

import pyarrow.parquet
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_dataset_builder, load_from_disk
from datasets.features.features import require_decoding
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE

# Adam changes a weight by about the learning rate in a step: in ten steps of 2e-5 by 2e-4, 1 % of a usual weight.
FEW_STEPS = 10
NOT_DATA = re.compile(r"(?i)^(readme|license|licence|dataset_infos?|state|requirements)\b.*|.*\.(py|sh|yaml|yml|lock)$")
# The split that a word in the name of a file or folder stands for, as in `datasets`.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "dev", "val"), "validation")
EVALUATION_SPLITS = ("test", "validation", "valid", "dev", "val", "eval", "evaluation")  # in this order, without a flag
PLACE = "_place"  # columns of rows of text files
ROW = "_row"
SMALL = 100e6  # bytes of files that a check, a preview and a rehearsal read completely
# The kind of a file by its suffix.
SUFFIXES = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv", ".tab"), "csv"),
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), "text"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = ".gz"
CSV_SEPARATORS = (",", ";", "\t", "|")
LONGEST_VALUE = 2**31 - 1  # characters of a value of CSV
BETWEEN = re.compile(r"[\s,]*")  # values of a list
DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and Infinity are no JSON


@dataclass(frozen=True)
class Source:
    """One dataset of a run."""

    name: str  # what is read: a Hub ID, a folder, a file or a glob
    config: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    text_rows: str | None = None  # see --text_rows
    display_name: str = ""  # in messages; a rehearsal reads another `name`
    weight: float = 1.0  # its share of the training rows
    # Of a preview, a rehearsal or a plan:
    first_rows: int = 0  # load only so many rows of each split; 0: all
    cuts_texts: bool = False  # texts are cut after they were read
    eval_rows_of_run: int = 0  # how many rows the run evaluates on, if this is more: as many are held out


@dataclass(frozen=True)
class DataSettings:
    """The datasets of a run, and what decides which of their rows it trains on and in which form."""

    sources: tuple[Source, ...]  # (): the recipe has rows of its own
    formats: tuple[str, ...] = ()  # of formats.py, that the recipe can train on, the best first; (): rows stay as they are
    streaming: bool = False
    max_samples: int | None = None
    max_eval_samples: int = 256
    column_map: dict[str, str] | None = None
    template_arguments: dict[str, Any] | None = None  # what the chat template gets besides the turns
    split_conversations: bool = False
    text_field: str = "text"
    seed: int = 0
    output_dir: str = ""  # where `load` writes data.json; "": nowhere
    keeps_samples: bool = False  # the max_samples rows of a stream are read once, for all epochs
    template_date: str = ""  # what a chat template that prints the date makes of a conversation today, "" of another template
    has_text_arguments: bool = False  # the chat template expects the arguments of tool calls as JSON
    drops_marks: str = ""  # why turns that are marked not to count in the loss would count, "" if they do not
    needs_test_split: bool = False  # --dataset_test_split was given, so it must exist
    is_read_in_order: bool = False  # the trainer's class does not shuffle, as KTO's: `load` shuffles the rows once

    @property
    def is_mixture(self) -> bool:
        return len(self.sources) > 1

    @property
    def display_name(self) -> str | None:
        """All datasets in words, such as "0.7 a + 0.3 b"; None without one."""
        if not self.is_mixture:
            if self.sources:
                return self.sources[0].display_name
            return None
        return " + ".join(f"{source.weight:.3g} {source.display_name}" for source in self.sources)

    def with_each(self, **changes: Any) -> "DataSettings":
        """The settings with changed values of every source."""
        return replace(self, sources=tuple(replace(source, **changes) for source in self.sources))


def length_of_rows(training_args: Any) -> int | None:
    """The most tokens that a row has; None if the recipe has no max_length, or sets none: then rows keep their length."""
    return getattr(training_args, "max_length", None)


def is_packed(training_args: Any) -> bool:
    """Whether rows are packed, which only some trainers of TRL do."""
    return getattr(training_args, "packing", False)


def rows_of_step(training_args: Any, processes: int) -> int:
    """The rows of an optimizer step on all processes together."""
    return training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * processes


def too_few_steps(steps: int) -> str:
    """A sentence about a run that is too short to learn anything, "" for a longer one."""
    if steps >= FEW_STEPS:
        return ""
    return (
        f"{plural(steps, 'optimizer step')} {'is' if steps == 1 else 'are'} too few to learn anything: a larger "
        "--num_train_epochs, a smaller --global_batch_size or more rows give more"
    )


Rows = Dataset | IterableDataset  # of a split, as its files have them
PlacedRow = tuple[str, dict]  # where a row is, in words, and the row


def local_files(name: str | None) -> list[Path]:
    """The files that --dataset_name names: one, those below a folder, or those that a glob matches. [] for the Hub."""
    files = []
    for path in _local_paths(name):
        files += _files_below(path) if path.is_dir() else [path]
    return files


def _local_paths(name: str | None) -> list[Path]:
    """The path that `--dataset_name` is, or those that it matches as a glob; [] for a dataset of the Hub."""
    if not name:
        return []
    path = Path(name).expanduser().absolute()
    root = Path(path.anchor)
    if path.exists():
        return [path]
    return sorted(root.glob(str(path.relative_to(root))))


def is_local(name: str | None) -> bool:
    return bool(_local_paths(name))


def absolute_name(name: str) -> str:
    """What --dataset_name names, with an absolute path; the ID of a dataset of the Hub as it is."""
    if is_local(name):
        return str(Path(name).expanduser().absolute())
    return name


def file_versions(name: str | None) -> list[list]:
    """Of each local file its name, its size and its modification time in nanoseconds, by which a changed file is found.

    The name begins with that of the dataset's folder, so that relative and absolute paths give the same.
    """
    versions = []
    root = Path(name or "").expanduser().absolute()
    for file in local_files(name):
        status = file.stat()
        shown = file.relative_to(root.parent) if root.exists() else file.name
        versions.append([str(shown), status.st_size, status.st_mtime_ns])
    return versions


def is_small(name: str | None) -> bool:
    """Whether the files are on this machine and have so few bytes that every row can be looked at before a run."""
    files = local_files(name)
    size = sum(file.stat().st_size for file in files)
    return bool(files) and size <= SMALL


def open_splits(
    name: str, config: str | None, streaming: bool, text_rows: str | None = None, keeps_lines: bool = True
) -> dict[str, Rows]:
    """All splits of a dataset: in memory or as streams. Raises UserError if the dataset cannot be opened.

    `text_rows`: what a row of a text file is: "line" or "document". None: a document in Markdown files and where
    there are several text files, else a line. `keeps_lines`: JSON, CSV and text files are streams of rows in a column ROW as they
    are in the file, with the file and line in a column PLACE; else they are read by `datasets`.
    """
    paths = _local_paths(name)
    if not paths and (re.search(r"^[/.~]|[*?\[]|/.*/", name) or suffix_of(Path(name)) in SUFFIXES):
        raise UserError(f"--dataset_name: file or folder not found: {name}")
    if paths and (saved := _open_saved(paths[0], streaming)):
        return saved
    if paths:
        return _open_files(name, config, streaming, text_rows, keeps_lines)
    with hub_errors("dataset", name):
        if not HF_HUB_OFFLINE:
            HfApi().dataset_info(name)  # fails at once when it is not there or the Hub is unreachable
        elif streaming:  # from files in the cache of the Hub; `datasets` would only find what it has converted
            return _open_files(snapshot_download(name, repo_type="dataset"), config, streaming, text_rows, keeps_lines)
        if streaming:
            builder = load_dataset_builder(name, config)
            files = builder.config.data_files or {}
            if files and all(file.endswith(".parquet") for file in itertools.chain(*files.values())):
                return {str(split): open_parquet(list(of_split), split, builder.info) for split, of_split in files.items()}
        return load_dataset(name, config, streaming=streaming)


def open_dataset(data: DataSettings, source: Source, streaming: bool) -> dict[str, Rows]:
    """All splits of a dataset. Raises UserError if it cannot be opened.

    For a recipe with formats, images, audio and videos stay as they are: they can be URLs to request.
    """
    splits = open_splits(source.name, source.config, streaming, source.text_rows, keeps_lines=bool(data.formats))
    if not data.formats:
        return splits
    return {split: without_decoding(rows, "images" in data.formats) for split, rows in splits.items()}


def without_decoding(rows: Rows, keeps_nested: bool) -> Rows:
    """`keeps_nested`: also images in lists and objects, which `datasets` copies to change how they are read."""
    for name, feature in (rows.features or {}).items():
        if not require_decoding(feature) or "Json(" in repr(feature):
            continue
        if isinstance(rows, IterableDataset):
            return rows.decode(False)
        if keeps_nested or hasattr(feature, "decode"):
            rows = rows.cast_column(name, rows.to_iterable_dataset().decode(False).features[name])
        else:
            rows = rows.remove_columns(name)
    return rows


def evaluation_split(source: Source, splits: Collection[str], is_given: bool) -> str:
    """The name of the split to evaluate on, which need not be there: of the flag or recipe, else one that is usually called so.

    `is_given`: by the flag. Raises UserError unless the splits of the flags exist and are two.
    """
    train = source.train_split
    test = source.test_split
    if test not in splits and not is_given:
        test = next((split for split in EVALUATION_SPLITS if split in splits and split != train), test)
    if train not in splits or test == train or (is_given and test not in splits):
        raise UserError(
            f"--dataset_train_split {train}, --dataset_test_split {test}: {source.display_name} has the splits "
            f"{', '.join(splits)}: pass two of them; without --dataset_test_split some rows are held out"
        )
    return test


def with_places(rows: Rows, name: str, split: str) -> Iterator[PlacedRow]:
    """Rows with their places in words: a line of a file, or the number of a row of a split."""
    with hub_errors("dataset", name):
        for number, row in enumerate(rows, 1):
            if ROW in row:
                yield row[PLACE], row[ROW]
            else:
                yield f"{name}, row {number} of {split}", row


def _configured_files(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """Files by split of a config that the README.md of `folder` names, as on the Hub; {} if it names none.

    `load_dataset` would return the rows of an earlier folder with the same name and README.md.
    """
    readme = folder / "README.md"
    if not readme.is_file() or not re.match(rb"---\n(?:.*\n)??configs:", readme.read_bytes(), re.DOTALL):
        return {}
    with hub_errors("dataset", str(folder)):
        named = load_dataset_builder(str(folder), config).config.data_files or {}
    files: dict[str, list[Path]] = {}
    for split, of_split in named.items():
        paths = files[str(split)] = []
        for file in of_split:
            path = Path(os.path.normpath(file))
            if not path.is_relative_to(folder):  # it is not meant, and would be trained on
                raise UserError(f"--dataset_name: the configs in {readme} name files outside of {folder}: correct or delete them")
            paths.append(path)
    return files


def _open_saved(folder: Path, streaming: bool) -> dict[str, Rows] | None:
    """The splits of a folder that `save_to_disk` has written, None for another folder."""
    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return None
    with hub_errors("dataset", str(folder)):
        saved = load_from_disk(str(folder))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if streaming:
        return {split: rows.to_iterable_dataset(num_shards=max(1, min(8, len(rows)))) for split, rows in splits.items()}
    return dict(splits)


def _open_files(name: str, config: str | None, streaming: bool, text_rows: str | None, keeps_lines: bool) -> dict[str, Rows]:
    """The rows of each split of local files. See `open_splits`."""
    by_split, kind = choose_files(name, config)
    with hub_errors("dataset", name):
        if kind in ("parquet", "arrow"):
            return {split: _open_tables(paths, kind, streaming) for split, paths in by_split.items()}
    first, *others = itertools.chain(*by_split.values())
    row_of = text_rows or ("document" if others or suffix_of(first) != ".txt" else "line")
    names = {split: list(map(str, paths)) for split, paths in by_split.items()}
    if keeps_lines:
        settings = {"kind": kind, "row_of": row_of}
        return {
            split: IterableDataset.from_generator(_placed_rows, gen_kwargs={"files": files, **settings})
            for split, files in names.items()
        }
    options = {}
    if kind == "text":
        options["sample_by"] = row_of
    if kind == "csv":
        options["sep"] = separator_of(first)
    escaped = {split: list(map(glob.escape, files)) for split, files in names.items()}
    with hub_errors("dataset", name):
        return load_dataset(kind, data_files=escaped, streaming=streaming, **options)


def _placed_rows(files: list[str], kind: str, row_of: str) -> Iterator[dict]:
    for file in files:
        for line, row in read_rows(Path(file), kind, row_of):
            yield {PLACE: f"{file}, line {line}", ROW: row}


def choose_files(name: str, config: str | None) -> tuple[dict[str, list[Path]], str]:
    """The files to read by split, and their kind. Prints which files of a folder are not read.

    A folder is read in one format. In a folder with configs only their files count.
    """
    paths = _local_paths(name)
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    if folder and (configured := _configured_files(folder, config)):
        return configured, kind_of(next(iter(configured.values()))[0]) or "text"
    if config not in (None, "default"):  # all would be read
        raise UserError(f"--dataset_config: {name} has no configs in a README.md: leave it out")
    files = [path for path in local_files(name) if path in paths or not NOT_DATA.match(path.name)]
    counts = Counter(filter(None, map(kind_of, files)))
    if not counts:
        raise UserError(f"--dataset_name: {name}: no files found that end with {', '.join(SUFFIXES)}, also {COMPRESSED}")
    kind = max(counts, key=lambda kind: (kind != "text", counts[kind]))
    by_split: dict[str, list[Path]] = {}
    unnamed = []
    for path in files:
        if kind_of(path) == kind:
            split = _split_of(path.relative_to(folder or path.parent))
            if split and (folder or counts[kind] > 1):
                by_split.setdefault(split, []).append(path)
            else:
                unnamed.append(path)
    if unnamed and "train" not in by_split:
        by_split = {"train": unnamed} | by_split
    read = {*itertools.chain(*by_split.values())}
    _print_ignored(name, tuple(path.name for path in files if path not in read))
    return by_split, kind


@functools.cache  # once per process: --preview counts the rows of large files later
def _print_ignored(name: str, ignored: tuple[str, ...]) -> None:
    """Prints which files are not read, as compressed ones: else a run trains on less than its user thinks."""
    if ignored:
        shown = ", ".join(ignored[:5]) + (", …" if len(ignored) > 5 else "")
        print_once(f"{name}: ignoring {shown}: of another format or compression, or not named after a split as other files are.")


def _split_of(path: Path) -> str | None:
    """The split that a file or its folder is named after, for example of my_test.jsonl and validation/1.csv; None without one."""
    sharded = re.match(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}", path.name)
    if sharded:
        return sharded[1]
    for part in reversed(path.parts):
        for word in re.split("[-._ 0-9]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return None


def _files_below(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders, without hidden ones, as `datasets` finds them: .git, __MACOSX and the like."""
    files = []
    for file in sorted(folder.rglob("*")):
        *folders, name = file.relative_to(folder).parts
        is_hidden = name.startswith(".") or any(part.startswith((".", "__")) for part in folders)
        if file.is_file() and not is_hidden:
            files.append(file)
    return files


def _open_tables(files: list[Path], kind: str, streaming: bool) -> Rows:
    """Parquet or Arrow files; those of Parquet without a column that others have become rows in which it is null.

    Parquet files without rows are skipped, unless all are: `datasets` fails at them.
    """
    if kind == "parquet":
        files = [file for file in files if pyarrow.parquet.read_metadata(file).num_rows] or files
    names = list(map(str, files))
    if streaming and kind == "parquet":
        return open_parquet(names)
    features = features_of_files(map(pyarrow.parquet.read_schema, names)) if kind == "parquet" else None
    return load_dataset(
        kind, data_files={"train": list(map(glob.escape, names))}, split="train", streaming=streaming, features=features
    )


def suffix_of(path: Path) -> str:
    """The suffix in small letters, without that of a compression."""
    return Path(path.name.lower().removesuffix(COMPRESSED)).suffix


def kind_of(path: Path) -> str:
    """The kind of a file; "" for one that is not read, also because of its compression."""
    return SUFFIXES.get(suffix_of(path), "")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers. Raises UserError if it is not UTF-8."""
    opens = gzip.open if path.suffix.lower() == COMPRESSED else open
    try:
        with opens(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield from enumerate(file, 1)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: save it in this encoding, or convert it with iconv") from error


def read_rows(path: Path, kind: str, row_of: str = "line") -> Iterator[tuple[int, dict]]:
    """The rows of a JSON, CSV or text file, each with the number of its line. Raises UserError with the line of an error."""
    if kind == "json":
        return _read_json(path)
    if kind == "csv":
        return _read_csv(path)
    return _read_text(path, row_of)


def _read_json(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a JSON file, each with the number of its line: an object in each line, or a list of objects."""
    number = 1
    position = 0
    try:
        if next((line for _, line in read_lines(path) if line.strip()), "").lstrip().startswith("["):
            text = "".join(line for _, line in read_lines(path))
            end = BETWEEN.match(text, text.index("[") + 1).end()
            while text[end : end + 1] != "]":
                number += text.count("\n", position, end)
                position = end
                value, end = DECODER.raw_decode(text, position)
                yield number, _row_of_json(value, path, number)
                end = BETWEEN.match(text, end).end()
            return
        for number, line in read_lines(path):
            if line.strip():
                yield number, _row_of_json(DECODER.decode(line), path, number)
    except json.JSONDecodeError as error:
        number += error.doc.count("\n", position, error.pos)
        shown = error.doc[error.pos : error.pos + 80].strip()
        raise UserError(f"{path}, line {number}: JSON parse error: {error.msg} (character {error.colno}): {shown}") from error


def _row_of_json(value: Any, path: Path, line: int) -> dict:
    """A row, from a JSON object or a string, which is its text. Raises UserError for anything else."""
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise UserError(f'{path}, line {line}: found {json.dumps(value)[:60]}, expected an object like {{"text": "…"}}')
    return value


def separator_of(path: Path) -> str:
    """What separates the columns of a CSV file: the sign that its header has most often outside of quotes."""
    header = re.sub(r'"[^"]*"', "", next(iter(read_lines(path)), (1, ""))[1])
    return max(CSV_SEPARATORS, key=header.count)


def _read_csv(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a CSV file, with the numbers of their lines. Every value is a text, also NA, None and 007.

    Python's lenient reader would drop quotation marks that are not doubled, and let a value that is not closed swallow rows; and
    what follows a separator that is not quoted would be dropped.
    """
    csv.field_size_limit(LONGEST_VALUE)  # of all readers in this process: the module has no other way
    reader = csv.reader((line for _, line in read_lines(path)), delimiter=separator_of(path), strict=True)
    header: list[str] = []
    try:
        for values in reader:
            if not header:
                header = list(map(str.strip, values))
                if len(header) > len(set(header)):  # the last one would be used
                    raise csv.Error(f"two columns have one name ({', '.join(header)})")
            elif len(values) > len(header):
                raise csv.Error(f"{len(values)} values, but the header names {len(header)} columns ({', '.join(header)})")
            elif values:
                yield reader.line_num, dict(zip(header, values, strict=False))
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num}: not readable as CSV: {error}: quote values that contain the separator, and double "
            "the quotation marks in them"
        ) from error


def _read_text(path: Path, row_of: str) -> Iterator[tuple[int, dict]]:
    """The rows of a text file, with the number of the line where each begins. `row_of`: line or document."""
    if row_of == "document":
        yield 1, {"text": "\n".join(line.rstrip("\r\n") for _, line in read_lines(path))}
        return
    for number, line in read_lines(path):
        yield number, {"text": line.rstrip("\r\n")}
