"""The rows of one JSON, CSV or text file, also compressed, each with the number of its line; errors name the line.

The JSON builder of datasets 5.2 reads texts such as 2024-01-02T00:00:00Z as dates, and fails if a column, a key or another type
is first seen after 10 MB, as `train` in one message. Its CSV builder drops quotation marks that are not doubled, and has to be
told the separator and that NA is a word.
"""

import csv
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
CSV_SEPARATORS = (",", ";", "\t", "|")
LONGEST_VALUE = 2**31 - 1  # characters of a value of CSV
BETWEEN = re.compile(r"[\s,]*")  # values of a list
DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and Infinity are no JSON


def suffix_of(path: Path) -> str:
    """The suffix in small letters, without that of a compression."""
    return Path(path.name.lower().removesuffix(COMPRESSED)).suffix


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers."""
    opens = open
    if path.suffix.lower() == COMPRESSED:
        opens = gzip.open
    with opens(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        yield from enumerate(file, 1)


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
