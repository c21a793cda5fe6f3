"""The one reader of a run, a rehearsal, a preview and a plan: from --dataset_name to splits of rows as the files have them.

`datasets` reads Parquet, Arrow, saved datasets and the Hub. JSON, CSV and text are read by `read_rows`. The JSON builder of
datasets 5.2 must know the columns beforehand to keep values that are not strings as they are, writes their numbers with ten
decimals (1e-12 becomes 0.0), and is slower; with the CSV builder a quotation mark that is not closed swallows rows; neither names
the line of an error.
"""

import bz2
import codecs
import contextlib
import csv
import glob
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, BinaryIO

from harness.data.stream_rows import open_parquet
from harness.hub import hub_errors
from harness.launched import UserError, print_once

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Json,
    Value,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import HfApi, metadata_load
from huggingface_hub.constants import HF_HUB_OFFLINE
from pyarrow import parquet
from yaml import YAMLError

Split = Dataset | IterableDataset
# Suffixes by the kind of a file. Files with other suffixes are recognized by their first bytes.
SUFFIXES = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv", ".tab"), "csv"),
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), "text"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ", ".zst": b"\x28\xb5\x2f\xfd"}
OTHER_KINDS = {
    b"PK\x03\x04": "a zip file or a spreadsheet: unpack it, or save it as CSV",
    b"%PDF": "a PDF: extract its text",
    b"SQLite": "a database: export it as CSV or JSON",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
}
NOT_DATA = re.compile(r"(?i)^(readme|license|licence|dataset_infos?|state|requirements|stream)\b.*|.*\.(py|sh|yaml|yml|lock)$")
# The split that a word in the name of a file or folder stands for.
SPLITS = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
SMALL = 100e6  # bytes of files that a check, a preview and a rehearsal read completely
HEAD = 2**16  # bytes that show what kind of file it is
CSV_SEPARATORS = (",", ";", "\t", "|")
LONGEST_VALUE = 2**31 - 1  # characters of a value of CSV
BLANKS = re.compile(r"\s*")
DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and Infinity are no JSON


def local_files(name: str | None) -> list[Path]:
    """The files that --dataset_name names: one, those below a folder, or several by commas, spaces or globs. [] for the Hub."""
    paths = _local_paths(name)
    return [file for path in paths for file in (_files_below(path) if path.is_dir() else [path])]


def _local_paths(name: str | None) -> list[Path]:
    """The paths that `--dataset_name` names: one, or several or globs, separated by commas or spaces; [] if one is missing."""
    if not name:
        return []
    for words in ([name], name.split(","), name.split()):  # a path can have commas and spaces in it
        found = [_matches(word.strip()) for word in words if word.strip()]
        if found and all(found):
            return list(dict.fromkeys(path for paths in found for path in paths))
    return []


def _matches(word: str) -> list[Path]:
    """The path that `word` is, or those that it matches as a glob."""
    path = Path(word).expanduser().absolute()
    root = Path(path.anchor)
    return [path] if path.exists() else sorted(root.glob(str(path.relative_to(root))))


def is_local(name: str | None) -> bool:
    return bool(_local_paths(name))


def file_versions(name: str | None) -> list[list]:
    """Of each local file its name, its size and its modification time in nanoseconds, by which a changed file is found.

    The name begins with that of the dataset's folder, so that relative and absolute paths give the same.
    """
    versions, root = [], Path(name or "").expanduser().absolute()
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
    """Raises UserError for the name of a file, folder or glob that is not there, and not that of a dataset of the Hub."""
    path = Path(name)
    is_path = name.startswith(("/", ".", "~")) or any(sign in name for sign in "*?[ ,") or name.count("/") > 1
    if not is_local(name) and (is_path or suffix_of(path) in SUFFIXES or path.suffix.lower() in COMPRESSED):
        raise UserError(f"--dataset_name: file or folder not found: {name}")


def suffix_of(path: Path) -> str:
    """The suffix in small letters, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in COMPRESSED else (suffixes or [""])[-1]


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
        status = [Path(file).stat() for file in self.files]
        return [self.kind, self.row_of, *((f, s.st_size, s.st_mtime_ns) for f, s in zip(self.files, status, strict=True))]

    def stream(self) -> IterableDataset:
        """The rows in a column `row`, and their places in a column `place`."""
        settings = {"files": list(self.files), "kind": self.kind, "row_of": self.row_of}
        return IterableDataset.from_generator(_placed_rows, gen_kwargs=settings)

    def as_dataset(self, streaming: bool) -> Split:
        """The rows as they are: columns that are texts in all rows are strings, others are JSON."""
        columns: dict[str, bool] = {}  # is each a text?
        for _, row in self:
            for name, value in row.items():
                columns[name] = columns.get(name, True) and isinstance(value, str | None)
        features = Features({name: Value("string") if is_text else Json() for name, is_text in columns.items()})
        settings = {"files": list(self.files), "kind": self.kind, "row_of": self.row_of, "columns": columns}
        if streaming:
            return IterableDataset.from_generator(_raw_rows, features=features, gen_kwargs=settings)
        return make_once(lambda: _raw_rows(**settings), features, [self.versions()])


def _placed_rows(files: list[str], kind: str, row_of: str) -> Iterator[dict]:
    yield from ({"place": place, "row": row} for place, row in TextFiles(tuple(files), kind, row_of))


def _raw_rows(files: list[str], kind: str, row_of: str, columns: dict[str, bool]) -> Iterator[dict]:
    """Rows with all columns; values of columns that are not texts are JSON."""
    for _, row in TextFiles(tuple(files), kind, row_of):
        yield {name: row.get(name) if is_text else _to_json(row.get(name)) for name, is_text in columns.items()}


def _to_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def make_once(rows: Callable[[], Iterator[dict]], features: Features, key: list) -> Dataset:
    """A dataset of `rows()`, made by the first process that asks; all others wait, and read it from the cache of `datasets`.

    `key`: what the rows depend on besides the code.
    """
    getLogger("datasets.builder").setLevel(ERROR)
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    fingerprint = hashlib.sha256(repr([key, features]).encode() + code).hexdigest()[:32]
    return Dataset.from_generator(rows, features=features, fingerprint=fingerprint)


def open_splits(name: str, config: str | None, streaming: bool, text_rows: str | None = None) -> dict[str, Split | TextFiles]:
    """All splits of a dataset: in memory or as streams, those of JSON, CSV and text as files that are still to be read.

    `text_rows`: what a row of a text file is: "line", "paragraph" or "document". None: a document in Markdown files and where
    there are several text files, else a line. Raises UserError if the dataset cannot be opened.
    """
    check_exists(name)
    paths = _local_paths(name)
    if config and paths and not (len(paths) == 1 and paths[0].is_dir()):
        raise UserError(f"--dataset_config: {name} is one file, so it has no configs: leave out --dataset_config {config}")
    if paths and (saved := _open_saved(paths[0], streaming)):
        return saved
    if paths:
        return _open_files(name, config, streaming, text_rows)
    if text_rows:
        raise UserError("--text_rows is for text files on this machine: leave out the flag")
    with hub_errors("dataset", name):
        if not HF_HUB_OFFLINE:
            HfApi().dataset_info(name)  # fails at once when it is not there or the Hub is unreachable
        if streaming:
            builder = load_dataset_builder(name, config)
            files = builder.config.data_files or {}
            if files and all(file.endswith(".parquet") for of_split in files.values() for file in of_split):
                return {str(split): open_parquet(list(of_split), split, builder.info) for split, of_split in files.items()}
        return load_dataset(name, config, streaming=streaming)


def _configured_files(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """Files by split of a config that the README.md of `folder` names, as on the Hub; {} if it names none.

    `load_dataset` would return the rows of an earlier folder with the same name and README.md.
    """
    readme = folder / "README.md"
    bad = UserError(
        f"--dataset_name: the configs in the header of {readme} are not as on the Hub: a list with config_name and data_files, "
        "which are paths, or a list with split and path: correct or delete them"
    )
    try:
        header = (metadata_load(readme) if readme.is_file() else None) or {}
    except (YAMLError, ValueError, RecursionError):  # the header of something else
        header = {}
    try:
        configs = MetadataConfigs.from_dataset_card_data(header)
        default = configs.get_default_config_name()
    except (ValueError, TypeError, AttributeError) as error:
        raise bad from error
    if not configs:
        if config not in (None, "default"):  # as `datasets` names the only one
            raise UserError(f"--dataset_config: {folder} has no configs in a README.md: leave out --dataset_config {config}")
        return {}
    name = config or default
    if name not in configs:
        problem = f"none called {name}" if name else "so one must be chosen"
        raise UserError(
            f"--dataset_config: {folder} has the configs {', '.join(map(str, configs))}, {problem}: pass one of these"
        )
    files = {}
    try:
        base = Path(configs[name].get("data_dir") or "")
        for split, patterns in sanitize_patterns(configs[name].get("data_files") or "**/*").items():
            if any(base.joinpath(pattern).is_absolute() for pattern in patterns):
                raise bad
            found = [file for pattern in patterns for file in sorted((folder / base).glob(pattern)) if file.is_file()]
            files[split] = list(dict.fromkeys(found))
            if not found:
                raise UserError(f"--dataset_name: {readme} names {patterns}, which is not there")
    except (ValueError, TypeError) as error:
        raise bad from error
    return files


def _open_saved(folder: Path, streaming: bool) -> dict[str, Split] | None:
    """The splits of a folder that `save_to_disk` has written, None for another folder."""
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    with hub_errors("dataset", str(folder)):
        saved = load_from_disk(str(folder))
    splits = dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}
    if streaming:
        splits = {split: rows.to_iterable_dataset(num_shards=max(1, min(8, len(rows)))) for split, rows in splits.items()}
    return splits


def _open_files(name: str, config: str | None, streaming: bool, text_rows: str | None) -> dict[str, Split | TextFiles]:
    """The rows of each split of local files. `text_rows`: see --text_rows; only Parquet and Arrow files have a config."""
    by_split, kind, _, _ = choose_files(name, config)
    if text_rows and kind != "text":
        raise UserError(f"--text_rows is for text files, but {name} is read as {kind}: leave out the flag")
    if kind not in ("parquet", "arrow"):
        row_of = text_rows or usual_row(by_split)
        splits = {split: TextFiles(tuple(map(str, paths)), kind, row_of) for split, paths in by_split.items()}
        splits = {split: files for split, files in splits.items() if next(iter(files), None)}
        if not splits:
            raise UserError(f"dataset {name}: it is empty")
        return splits
    with hub_errors("dataset", name):
        return {split: _open_tables(paths, kind, streaming) for split, paths in by_split.items()}


def usual_row(by_split: dict[str, list[Path]]) -> str:
    """What a row of text files is without the flag."""
    files = [file for group in by_split.values() for file in group]
    return "document" if len(files) > 1 or suffix_of(files[0]) != ".txt" else "line"


def choose_files(name: str, config: str | None = None) -> tuple[dict[str, list[Path]], str, list[Path], list[Path]]:
    """The files to read by split, their kind, the ignored files of other kinds, and those that are named after no split.

    A folder is read in one format. In a folder with configs only their files count.
    """
    paths = _local_paths(name)
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    if folder and (configured := _configured_files(folder, config)):
        return configured, kind_of_file(next(iter(configured.values()))[0]), [], []
    named = [path for path in paths if path.is_file()]
    kinds = {}
    for path in local_files(name):
        if path in named:
            kinds[path] = kind_of_file(path)
        elif not NOT_DATA.match(path.name):
            with contextlib.suppress(UserError):
                kinds[path] = kind_of_file(path)
    counts = Counter(kinds.values())
    if not counts:
        found = ", ".join(sorted({path.suffix or path.name for path in local_files(name)})) or "nothing"
        raise UserError(f"--dataset_name: {name} has no files in JSON, CSV, Parquet, Arrow or text, only: {found}")
    if len(counts) > 1 and named:
        raise UserError(f"--dataset_name: {name} names files of several formats ({', '.join(counts)}): pass those of one")
    kind = max(("parquet", "arrow", "json", "csv", "text"), key=lambda kind: (kind != "text" and counts[kind] > 0, counts[kind]))
    files = [path for path in kinds if kinds[path] == kind]
    splits: dict[str, list[Path]] = {}
    for file in files if len(files) > 1 or folder else []:
        splits.setdefault(_split_of(file.relative_to(folder) if folder else Path(file.name)), []).append(file)
    unnamed = splits.pop("", [])
    if unnamed and "train" not in splits:
        splits, unnamed = {"train": unnamed, **splits}, []
    return splits or {"train": files}, kind, [path for path in kinds if kinds[path] != kind], unnamed


def is_text(name: str) -> bool:
    """Whether a dataset consists of text files on this machine. Raises UserError if it cannot be read."""
    check_exists(name)
    return bool(_local_paths(name)) and choose_files(name, None)[1] == "text"


def print_how_files_are_read(name: str, config: str | None, text_rows: str | None) -> None:
    """Prints what a reader of the files should know: ignored files, a separator that is not a comma, what a row of text is."""
    paths = _local_paths(name)
    if not paths or any((paths[0] / saved).is_file() for saved in ("dataset_dict.json", "state.json")):
        return
    splits, kind, ignored, unnamed = choose_files(name, config)
    files = [file for group in splits.values() for file in group]
    if ignored:
        suffixes, others = ({suffix_of(file) or file.name for file in group} for group in (files, ignored))
        print_once(
            f"{name}: reading the {' and '.join(sorted(suffixes))} files, ignoring all "
            f"{' and '.join(sorted(others - suffixes))} files."
        )
    if unnamed:
        print_once(f"{name}: ignoring {', '.join(file.name for file in unnamed[:5])}: the other files are named after splits.")
    separators = {_separator_of(file) for file in files} - {","} if kind == "csv" else set()
    if separators:
        print_once(f"{name}: columns are separated by {' or '.join(map(repr, sorted(separators)))}.")
    if kind == "text" and not text_rows:
        row = "file" if usual_row(splits) == "document" else "line"
        print_once(f"{name}: every {row} is a row (--text_rows line, paragraph or document).")


def _split_of(path: Path) -> str:
    """The split that a file or its folder is named after, for example of my_test.jsonl and validation/1.csv; "" without one."""
    if sharded := re.match(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}", path.name):
        return sharded[1]
    for part in reversed(path.parts):
        words = re.split(f"[{NON_WORDS_CHARS}]+", part.lower())
        if found := next((SPLITS[word] for word in words if word in SPLITS), None):
            return found
    return ""


def _files_below(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("[!.]*")) if file.is_file()]


def _open_tables(files: list[Path], kind: str, streaming: bool) -> Split:
    """Parquet or Arrow files; those with other columns become rows in which these are null."""
    if streaming and kind == "parquet":
        return open_parquet([str(file) for file in files])
    shapes: dict[tuple, list[Path]] = {}
    for file in files:
        shapes.setdefault(tuple(parquet.read_schema(file).names) if kind == "parquet" else (), []).append(file)
    groups = [
        load_dataset(kind, data_files={"train": [glob.escape(str(file)) for file in group]}, split="train", streaming=streaming)
        for group in shapes.values()
    ]
    return groups[0] if len(groups) == 1 else concatenate_datasets(groups)


def kind_of_file(path: Path) -> str:
    """json, csv, text, parquet or arrow, by the suffix or the content. Raises UserError for a file that is none of these."""
    with _open(path) as file:
        head = file.read(HEAD)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1") or suffix_of(path) == ".arrow":
        return "arrow"
    for start, what in OTHER_KINDS.items():
        if head.startswith(start):
            raise UserError(f"--dataset_name: {path} is {what}")
    if kind := SUFFIXES.get(suffix_of(path)):
        return kind
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace").lstrip()
    if text.startswith(("{", "[")):
        return "json"
    if "\0" in text:
        raise UserError(f"--dataset_name: {path} is not a text file: expected JSON, CSV, Parquet or text")
    lines = [line for line in text.split("\n")[:5] if line.strip()]
    counts = {line.count(separator) for separator in ("\t", ";", ",") for line in lines[:2] if separator in lines[0]}
    names = re.split(r"[,;\t|]", lines[0].lower()) if lines else []
    known = {"text", "prompt", "completion", "messages", "instruction", "output", "question", "answer"}
    return "csv" if counts and known & {name.strip('" \r') for name in names} else "text"


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed. Raises UserError for a damaged file, or a compression whose package is missing."""
    with path.open("rb") as file:
        start = file.read(6)
    suffix = next((suffix for suffix, magic in COMPRESSED.items() if start.startswith(magic)), "")
    if suffix == ".zst" and importlib.util.find_spec("zstandard") is None:
        raise UserError(f"--dataset_name: {path} needs a package: {sys.executable} -m pip install zstandard")
    if suffix == ".zst":
        import zstandard

        try:
            with zstandard.open(path, "rb") as file:
                yield io.BufferedReader(file)  # its own reader has no lines
        except zstandard.ZstdError as error:
            raise UserError(f"--dataset_name: {path} is damaged or incomplete: {error}") from error
        return
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix, open)
    try:
        with opened(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if not suffix:
            raise
        raise UserError(f"--dataset_name: {path} is damaged or incomplete: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers. Raises UserError if it is not UTF-8."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line[:4]:
                    raise UserError(
                        f"{path}, line 1: the file is UTF-16, expected UTF-8: save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
                    )
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8 (Latin-1 or Windows-1252?): save the "
                    "file as UTF-8"
                ) from error


def read_rows(path: Path, kind: str, row_of: str = "line") -> Iterator[tuple[int, dict]]:
    """The rows of a JSON, CSV or text file, each with the number of its line. Raises UserError with the line of an error."""
    readers: dict[str, Callable[[], Iterator[tuple[int, dict]]]] = {
        "json": lambda: _read_json(path),
        "csv": lambda: _read_csv(path),
        "text": lambda: _read_text(path, row_of),
    }
    yield from readers[kind]()


def _read_json(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a JSON file, each with the number of its line.

    The file has one object per line, objects over several lines, a list of objects, or an object with such a list.
    """
    lines = ((number, line.strip()) for number, line in read_lines(path) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    try:
        is_one_per_line = isinstance(DECODER.raw_decode(first[1])[0], dict | str)
    except (json.JSONDecodeError, RecursionError):
        is_one_per_line = False
    texts = itertools.chain([first], lines) if is_one_per_line else [(1, "".join(line for _, line in read_lines(path)))]
    for line, text in texts:
        position = 0
        while (position := BLANKS.match(text, position).end()) < len(text):
            number = line + text.count("\n", 0, position)
            value, position = _parse(path, text, line, position)
            for part in _rows_in(value):
                yield number, _row_of_json(part, path, number)


def _rows_in(value: Any) -> list:
    """The rows of a list, or of an object that has nothing but a list of them: {"data": [{…}, …]}."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, rows),) = value.items()
        if name in ("data", "rows", "train", "examples") and isinstance(rows, list) and all(isinstance(r, dict) for r in rows):
            return rows
    return value if isinstance(value, list) else [value]


def _parse(path: Path, text: str, line: int = 1, position: int = 0) -> tuple[Any, int]:
    """The JSON value at `position` and where it ends. `line`: the number of the first line of `text`."""
    try:
        return DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        shown = text.split("\n")[error.lineno - 1].strip()
        shown = shown if len(shown) <= 80 else f"{shown[:77]}…"
        raise UserError(
            f"{path}, line {line + error.lineno - 1}: JSON parse error: {error.msg} at character {error.colno}: {shown}"
        ) from error
    except RecursionError as error:
        raise UserError(f"{path}, line {line}: the brackets are nested too deeply for a row") from error


def _row_of_json(value: Any, path: Path, line: int) -> dict:
    """A row, from a JSON object or a string, which is its text. Raises UserError for anything else."""
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise UserError(f'{path}, line {line}: found {json.dumps(value)[:60]}, expected an object like {{"text": "…"}}')
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}, line {line}: half of a character (\\ud800 to \\udfff), which is no text: delete it") from error
    return value


def _separator_of(path: Path) -> str:
    """What separates the columns of a CSV file: the sign that its header has most often outside of quotes."""
    header = re.sub(r'"[^"]*"', "", next(iter(read_lines(path)), (1, ""))[1])
    return max(CSV_SEPARATORS, key=header.count)


def _read_csv(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a CSV file, with the numbers of their lines. Every value is a text, also NA, None and 007."""
    separator = _separator_of(path)
    row: list[str] = []  # the lines of the current row; at the end of the file ""

    def lines() -> Iterator[str]:
        for _, line in read_lines(path):
            row.append(line)
            yield line
        row.append("")

    csv.field_size_limit(LONGEST_VALUE)  # of all readers in this process: the module has no other way
    reader = csv.reader(lines(), delimiter=separator)
    header: list[str] = []
    began = 1
    try:
        for values in reader:
            if '"' in "".join(row):
                values = _quoted_values(path, row, began, separator)
            row.clear()
            began = reader.line_num + 1
            if not values:
                continue
            if not header:
                header = [name.strip() for name in values]
                if twice := next((name for name in header if name and header.count(name) > 1), ""):
                    raise UserError(f"{path}, line {reader.line_num}: two columns are called {twice}: rename one of them")
                continue
            if len(values) > len(header):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(values)} values, but the header names {len(header)} columns "
                    f"({', '.join(header)}): quote values that contain the separator"
                )
            yield reader.line_num, dict(zip(header, values, strict=False))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from error


def _quoted_values(path: Path, lines: list[str], number: int, separator: str) -> list[str]:
    """The values of a row of CSV that has quotation marks. Raises UserError if one of them is not closed or not doubled.

    Python's lenient reader would drop some of the marks, and let a value that is not closed swallow rows.
    `number`: of the row's first line.
    """
    try:
        return next(csv.reader(lines, delimiter=separator, strict=True))
    except csv.Error as error:
        problem = error
    if separator == "\t" and len(lines) == 1:  # many TSV files quote nothing
        return lines[0].rstrip("\r\n").split(separator)
    without_spaces = re.sub(rf'" +(?={re.escape(separator)}|\r?$)', '"', "".join(lines))  # behind a quoted value
    try:
        return next(csv.reader(io.StringIO(without_spaces, newline="\n"), delimiter=separator, strict=True))
    except csv.Error:
        raise UserError(
            f"{path}, line {number}: not readable as CSV: {problem} (is a quotation mark of this row not closed, or not doubled?)"
        ) from problem


def _read_text(path: Path, row_of: str) -> Iterator[tuple[int, dict]]:
    """The rows of a text file, with the number of the line where each begins. `row_of`: line, paragraph or document."""
    lines = ((number, line.rstrip("\r\n")) for number, line in read_lines(path))
    if row_of == "line":
        yield from ((number, {"text": line}) for number, line in lines)
        return
    text = "\n".join(line for _, line in lines)
    if row_of == "document":
        yield 1, {"text": text}
        return
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip():
            yield line, {"text": paragraph}
        line += paragraph.count("\n")
