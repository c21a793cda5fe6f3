"""From --dataset_name to splits of rows as the files have them, for a run, a rehearsal, a preview and a plan.

`datasets` reads Parquet, Arrow, saved datasets and the Hub; text_rows.py reads JSON, CSV and text.
"""

import glob
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from harness.compat.datasets import store_json_exactly
from harness.data.columns import features_of_files, schema_of
from harness.data.stream_rows import open_parquet
from harness.data.text_rows import COMPRESSED, SUFFIXES, kind_of_file, read_rows, suffix_of
from harness.hub import hub_errors
from harness.messages import UserError, print_once

import pyarrow.parquet
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Json,
    Value,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE

Split = Dataset | IterableDataset
NOT_DATA = re.compile(r"(?i)^(readme|license|licence|dataset_infos?|state|requirements)\b.*|.*\.(py|sh|yaml|yml|lock)$")
# The split that a word in the name of a file or folder stands for, as in `datasets`.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "dev", "val"), "validation")
# Numbers in CSV: not 007, and with no more digits than an int64 or a float64 holds.
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,7})\.[0-9]{1,7}")
# The types of values in text files. A column has the last of those that its values have.
TYPES = {
    "null": Value("string"),
    "int64": Value("int64"),
    "float64": Value("float64"),
    "string": Value("string"),
    "json": Json(),
}
SMALL = 100e6  # bytes of files that a check, a preview and a rehearsal read completely


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
    return [path] if path.exists() else sorted(root.glob(str(path.relative_to(root))))


def is_local(name: str | None) -> bool:
    return bool(_local_paths(name))


def absolute_name(name: str) -> str:
    """What --dataset_name names, with an absolute path; the ID of a dataset of the Hub as it is."""
    return str(Path(name).expanduser().absolute()) if is_local(name) else name


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
    return bool(files) and sum(file.stat().st_size for file in files) <= SMALL


def check_exists(name: str) -> None:
    """Raises UserError for the name of a file, folder or glob that is not there, and not that of a dataset of the Hub.

    Also for a pipe or a device: a run reads its data several times.
    """
    for path in _local_paths(name):
        if not path.is_file() and not path.is_dir():
            raise UserError(
                f"--dataset_name: {path} is neither a file nor a folder (a pipe?): a run reads its data more than once, so write "
                "the data into a file"
            )
    path = Path(name)
    is_path = re.search(r"^[/.~]|[*?\[]|/.*/", name)
    if not is_local(name) and (is_path or suffix_of(path) in SUFFIXES or path.suffix.lower() == COMPRESSED):
        raise UserError(f"--dataset_name: file or folder not found: {name}")


@dataclass(frozen=True)
class TextFiles:
    """JSON, CSV and text files of a split. Iterating yields each row with its place in words."""

    files: tuple[str, ...]
    kind: str
    row_of: str  # of text files: see --text_rows

    def __iter__(self) -> Iterator[tuple[str, dict]]:
        for file in self.files:
            for line, row in read_rows(Path(file), self.kind, self.row_of):
                yield f"{file}, line {line}", row

    def versions(self) -> list[tuple]:
        """What the rows depend on."""
        found = [(self.kind, self.row_of)]
        for file in self.files:
            status = Path(file).stat()
            found.append((file, status.st_size, status.st_mtime_ns))
        return found

    def stream(self) -> IterableDataset:
        """The rows in a column `row`, and their places in a column `place`."""
        settings = {"files": list(self.files), "kind": self.kind, "row_of": self.row_of}
        return IterableDataset.from_generator(_placed_rows, gen_kwargs=settings)

    def as_dataset(self, streaming: bool) -> Split:
        """The rows as they are: columns that are texts in all rows are strings, others are JSON.

        In CSV, where every value is a text, a column of numbers only is numbers, as `datasets` reads it.
        """
        store_json_exactly()
        columns: dict[str, str] = {}
        for _, row in self:
            for name, value in row.items():
                columns[name] = max(columns.get(name, "null"), _type_of(value, self.kind), key=[*TYPES].index)
        features = Features({name: TYPES[kind] for name, kind in columns.items()})
        settings = {"files": list(self.files), "kind": self.kind, "row_of": self.row_of, "columns": columns}
        if streaming:
            return IterableDataset.from_generator(_raw_rows, features=features, gen_kwargs=settings)
        return make_once(lambda: _raw_rows(**settings), features, [self.versions()])


def _type_of(value: Any, kind: str) -> str:
    """The type of a value in a file of this kind."""
    if value is None:
        return "null"
    if not isinstance(value, str):
        return "json"
    if kind == "csv" and INTEGER.fullmatch(value):
        return "int64"
    return "float64" if kind == "csv" and DECIMAL.fullmatch(value) else "string"


def _placed_rows(files: list[str], kind: str, row_of: str) -> Iterator[dict]:
    for place, row in TextFiles(tuple(files), kind, row_of):
        yield {"place": place, "row": row}


def _raw_rows(files: list[str], kind: str, row_of: str, columns: dict[str, str]) -> Iterator[dict]:
    """Rows with all columns. `columns`: their types."""
    for _, row in TextFiles(tuple(files), kind, row_of):
        yield {name: _as_type(row.get(name), of_column) for name, of_column in columns.items()}


def _as_type(value: Any, kind: str) -> str | int | float | None:
    if value is None or kind == "string":
        return value
    if kind == "json":
        return json.dumps(value, ensure_ascii=False)
    return int(value) if kind == "int64" else float(value)


def make_once(rows: Callable[[], Iterator[dict]], features: Features, key: list) -> Dataset:
    """A dataset of `rows()`, made by the first process that asks; all others wait, and read it from the cache of `datasets`.

    `key`: what the rows depend on besides the code. Any change in this folder converts all rows again: simpler than to know which
    modules can change a row, and none is forgotten.
    """
    getLogger("datasets.builder").setLevel(ERROR)
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    fingerprint = hashlib.sha256(repr([key, features]).encode() + code).hexdigest()[:32]
    return Dataset.from_generator(rows, features=features, fingerprint=fingerprint)


def open_splits(name: str, config: str | None, streaming: bool, text_rows: str | None = None) -> dict[str, Split | TextFiles]:
    """All splits of a dataset: in memory or as streams, those of JSON, CSV and text as files that are still to be read.

    `text_rows`: what a row of a text file is: "line" or "document". None: a document in Markdown files and where
    there are several text files, else a line. Raises UserError if the dataset cannot be opened.
    """
    check_exists(name)
    paths = _local_paths(name)
    if paths and (saved := _open_saved(paths[0], streaming)):
        return saved
    if paths:
        return _open_files(name, config, streaming, text_rows)
    with hub_errors("dataset", name):
        if not HF_HUB_OFFLINE:
            HfApi().dataset_info(name)  # fails at once when it is not there or the Hub is unreachable
        elif streaming:  # from files in the cache of the Hub; `datasets` would only find what it has converted
            return _open_files(snapshot_download(name, repo_type="dataset"), config, streaming, text_rows)
        if streaming:
            builder = load_dataset_builder(name, config)
            files = builder.config.data_files or {}
            if files and all(file.endswith(".parquet") for file in itertools.chain(*files.values())):
                return {str(split): open_parquet(list(of_split), split, builder.info) for split, of_split in files.items()}
        return load_dataset(name, config, streaming=streaming)


def _configured_files(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """Files by split of a config that the README.md of `folder` names, as on the Hub; {} if it names none.

    `load_dataset` would return the rows of an earlier folder with the same name and README.md.
    """
    readme = folder / "README.md"
    if not readme.is_file() or not re.match(rb"---\n(?:.*\n)??configs:", readme.read_bytes(), re.DOTALL):
        if config not in (None, "default"):  # as `datasets` names the only one
            raise UserError(f"--dataset_config: {folder} has no configs in a README.md: leave out --dataset_config {config}")
        return {}
    with hub_errors("dataset", str(folder)):
        named = load_dataset_builder(str(folder), config).config.data_files or {}
    files: dict[str, list[Path]] = {}
    for split, of_split in named.items():
        files[str(split)] = [Path(os.path.normpath(file)) for file in of_split]
        # Files of other folders are not meant, and would be trained on.
        if not all(file.is_relative_to(folder) for file in files[str(split)]):
            raise UserError(f"--dataset_name: the configs in {readme} name files outside of {folder}: correct or delete them")
    return files


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` has written a folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _open_saved(folder: Path, streaming: bool) -> dict[str, Split] | None:
    """The splits of a folder that `save_to_disk` has written, None for another folder."""
    if not _is_saved(folder):
        return None
    with hub_errors("dataset", str(folder)):
        saved = load_from_disk(str(folder))
    splits = dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}
    if streaming:
        splits = {split: rows.to_iterable_dataset(num_shards=max(1, min(8, len(rows)))) for split, rows in splits.items()}
    return splits


def _open_files(name: str, config: str | None, streaming: bool, text_rows: str | None) -> dict[str, Split | TextFiles]:
    """The rows of each split of local files. `text_rows`: see --text_rows; only Parquet and Arrow files have a config."""
    by_split, kind, _ = choose_files(name, config)
    if kind not in ("parquet", "arrow"):
        row_of = text_rows or usual_row(by_split)
        splits = {}
        for split, paths in by_split.items():
            files = TextFiles(tuple(map(str, paths)), kind, row_of)
            if next(iter(files), None):
                splits[split] = files
        if not splits:
            raise UserError(f"dataset {name}: it is empty")
        return splits
    with hub_errors("dataset", name):
        return {split: _open_tables(paths, kind, streaming) for split, paths in by_split.items()}


def usual_row(by_split: dict[str, list[Path]]) -> str:
    """What a row of text files is without the flag."""
    files = list(itertools.chain(*by_split.values()))
    return "document" if len(files) > 1 or suffix_of(files[0]) != ".txt" else "line"


def choose_files(name: str, config: str | None = None) -> tuple[dict[str, list[Path]], str, list[Path]]:
    """The files to read by split, their kind, and the ignored files: those of other kinds, and those named after no split.

    A folder is read in one format. In a folder with configs only their files count.
    """
    paths = _local_paths(name)
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    if folder and (configured := _configured_files(folder, config)):
        return configured, kind_of_file(next(iter(configured.values()))[0]), []
    if config and not folder:
        raise UserError(f"--dataset_config: {name} is no folder, so it has no configs: leave out --dataset_config {config}")
    named = [path for path in paths if path.is_file()]
    kinds = {}  # "": of no format that is read, also a file of another compression
    for path in local_files(name):
        if path in named:
            kinds[path] = kind_of_file(path)
        elif not NOT_DATA.match(path.name):
            kinds[path] = SUFFIXES.get(suffix_of(path), "")
    counts = Counter(kinds.values())
    del counts[""]
    if not counts:
        found = ", ".join(sorted({path.suffix or path.name for path in local_files(name)})) or "nothing"
        raise UserError(f"--dataset_name: {name} has no files in JSON, CSV, Parquet, Arrow or text, only: {found}")
    if len(counts) > 1 and named:
        raise UserError(f"--dataset_name: {name} names files of several formats ({', '.join(counts)}): pass those of one")
    kind = max(("parquet", "arrow", "json", "csv", "text"), key=lambda kind: (kind != "text" and counts[kind] > 0, counts[kind]))
    splits: dict[str, list[Path]] = {}
    ignored = []
    for path in kinds:
        if kinds[path] == kind:
            is_only_one = not folder and counts[kind] == 1
            split = "" if is_only_one else _split_of(path.relative_to(folder or path.parent))
            splits.setdefault(split, []).append(path)
        else:
            ignored.append(path)
    unnamed = splits.pop("", [])
    if "train" in splits:
        return splits, kind, ignored + unnamed
    return {"train": unnamed} | splits if unnamed else splits, kind, ignored


def _has_files(name: str) -> bool:
    """Whether a dataset is files on this machine; not on the Hub, nor written by `save_to_disk`."""
    paths = _local_paths(name)
    return bool(paths) and not _is_saved(paths[0])


def files_of_splits(name: str, config: str | None) -> dict[str, list[Path]]:
    """The files of each split; {} for the Hub and for a folder of `save_to_disk`."""
    return choose_files(name, config)[0] if _has_files(name) else {}


def print_ignored_files(name: str, config: str | None) -> None:
    """Prints which files of a folder are not read."""
    check_exists(name)
    ignored = choose_files(name, config)[2] if _has_files(name) else []
    if ignored:
        others = f" and {len(ignored) - 5} others" if len(ignored) > 5 else ""
        names = ", ".join(file.name for file in ignored[:5])
        print_once(
            f"{name}: ignoring {names}{others}: of another format or compression, or not named after a split as other files are."
        )


def _split_of(path: Path) -> str:
    """The split that a file or its folder is named after, for example of my_test.jsonl and validation/1.csv; "" without one."""
    if sharded := re.match(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}", path.name):
        return sharded[1]
    for part in reversed(path.parts):
        for word in re.split("[-._ 0-9]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def _files_below(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders, without hidden ones, as `datasets` finds them: .git, __MACOSX and the like."""
    files = []
    for file in sorted(folder.rglob("*")):
        *folders, name = file.relative_to(folder).parts
        is_hidden = name.startswith(".") or any(part.startswith((".", "__")) for part in folders)
        if file.is_file() and not is_hidden:
            files.append(file)
    return files


def _open_tables(files: list[Path], kind: str, streaming: bool) -> Split:
    """Parquet or Arrow files; those without a column that others have become rows in which it is null.

    Parquet files without rows are skipped, unless all are: `datasets` fails at them.
    """
    if kind == "parquet":
        files = [file for file in files if pyarrow.parquet.read_metadata(file).num_rows] or files
    names = list(map(str, files))
    if streaming and kind == "parquet":
        return open_parquet(names)
    features = features_of_files(files[0].parent.name, [schema_of(name, kind) for name in names])
    return load_dataset(
        kind, data_files={"train": list(map(glob.escape, names))}, split="train", streaming=streaming, features=features
    )
