"""The rows of one JSON, CSV or text file, also compressed, each with the number of its line; errors name the line.

The JSON builder of datasets 5.2 reads texts such as 2024-01-02T00:00:00Z as dates, and fails if a column, a key or another type
is first seen after 10 MB, as `train` in one message. Its CSV builder drops quotation marks that are not doubled, and has to be
told the separator and that NA is a word.
"""

import codecs
import contextlib
import csv
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from harness.messages import UserError

# The kind of a file by its suffix.
SUFFIXES = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv", ".tab"), "csv"),
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), "text"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = ".gz"
GZIP = b"\x1f\x8b"
CSV_SEPARATORS = (",", ";", "\t", "|")
LONGEST_VALUE = 2**31 - 1  # characters of a value of CSV
BLANKS = re.compile(r"\s*")
DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and Infinity are no JSON


def suffix_of(path: Path) -> str:
    """The suffix in small letters, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == COMPRESSED else (suffixes or [""])[-1]


def kind_of_file(path: Path) -> str:
    """json, csv, text, parquet or arrow, by the suffix. Raises UserError for a file that is none of these."""
    if kind := SUFFIXES.get(suffix_of(path)):
        return kind
    raise UserError(f"--dataset_name: {path}: expected a file {', '.join(SUFFIXES)} (also {COMPRESSED}): convert or rename it")


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, those of gzip decompressed. Raises UserError for a damaged one."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == GZIP
    try:
        with gzip.open(path, "rb") if is_compressed else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        if not is_compressed:
            raise
        raise UserError(f"--dataset_name: {path} is damaged or incomplete: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers. Raises UserError if it is not UTF-8."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8: save the file as UTF-8"
                ) from error


def read_rows(path: Path, kind: str, row_of: str = "line") -> Iterator[tuple[int, dict]]:
    """The rows of a JSON, CSV or text file, each with the number of its line. Raises UserError with the line of an error."""
    if kind == "json":
        return _read_json(path)
    if kind == "csv":
        return _read_csv(path)
    return _read_text(path, row_of)


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
    except json.JSONDecodeError:
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
        problem = error.msg.removesuffix(" at")
        shown = text.split("\n")[error.lineno - 1].strip()[:80]
        raise UserError(
            f"{path}, line {line + error.lineno - 1}: JSON parse error: {problem} at character {error.colno}: {shown}"
        ) from error


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


def separator_of(path: Path) -> str:
    """What separates the columns of a CSV file: the sign that its header has most often outside of quotes."""
    header = re.sub(r'"[^"]*"', "", next(iter(read_lines(path)), (1, ""))[1])
    return max(CSV_SEPARATORS, key=header.count)


def _read_csv(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a CSV file, with the numbers of their lines. Every value is a text, also NA, None and 007.

    Python's lenient reader would drop quotation marks that are not doubled, and let a value that is not closed swallow rows.
    """
    separator = separator_of(path)
    row: list[str] = []  # the lines of the current row

    def lines() -> Iterator[str]:
        for _, line in read_lines(path):
            row.append(line)
            yield line

    csv.field_size_limit(LONGEST_VALUE)  # of all readers in this process: the module has no other way
    reader = csv.reader(lines(), delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        row.clear()
        began = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            if separator != "\t" or len(row) > 1:
                raise UserError(
                    f"{path}, line {began}: not readable as CSV: {error} (is a quotation mark of this row not closed, or not "
                    "doubled?)"
                ) from error
            values = row[0].rstrip("\r\n").split(separator)  # many TSV files quote nothing
        if values is None:
            return
        if values and not header:
            header = [name.strip() for name in values]
            for name in header:
                if name and header.count(name) > 1:
                    raise UserError(f"{path}, line {reader.line_num}: two columns are called {name}: rename one of them")
        elif values:
            if len(values) > len(header):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(values)} values, but the header names {len(header)} columns "
                    f"({', '.join(header)}): quote values that contain the separator"
                )
            yield reader.line_num, dict(zip(header, values, strict=False))


def _read_text(path: Path, row_of: str) -> Iterator[tuple[int, dict]]:
    """The rows of a text file, with the number of the line where each begins. `row_of`: line or document."""
    if row_of == "document":
        yield 1, {"text": "\n".join(line.rstrip("\r\n") for _, line in read_lines(path))}
        return
    for number, line in read_lines(path):
        yield number, {"text": line.rstrip("\r\n")}
