"""How the rows of a dataset become rows of a format, and what `load` needs to know of each row.

A row is read and converted once. `examine` returns the converted row with its FACTS: why it is skipped, a checksum, what kind of
conversation it is. Afterwards rows are only chosen by these facts.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.data import formats, images
from harness.data.reading import PLACE, ROW, absolute_name
from harness.data.settings import DataSettings, Source
from harness.data.turns import is_nothing, without
from harness.hub import hub_errors
from harness.messages import RefusedRow, UserError, print_once

import xxhash
from datasets import Dataset, Features, IterableDataset, Value

ROWS_TO_CHECK = 20  # the first ones, which show the format
ROWS_TO_SEARCH = 10_000  # after these, for the first usable one
REHEARSED_ROWS = 500  # of each split, for a rehearsal or plan
MAX_LETTERS = 150  # of a text, in a rehearsal
MAX_TOOL_LETTERS = 20  # of each text in the definition of a tool
# Columns next to those of the converted row: where the row is, why it is skipped ("" if it is not), a checksum, what its turns
# are, and which columns of the format it has. The last three are "" for a skipped row.
REASON = "_reason"
DIGEST = "_digest"
KIND = "_kind"
HAS = "_has"
FACTS = (PLACE, REASON, DIGEST, KIND, HAS)
LEFT_OUT = "left out by the recipe (`keep`)"
BAD_ANSWER = ", bad answer"  # ends the KIND of a row of KTO data whose `label` is false
Rows = Dataset | IterableDataset  # of a split, as its files have them
PlacedRow = tuple[str, dict]  # where a row is, in words, and the row


@dataclass(frozen=True)
class Conversion:
    """How the rows of a dataset become rows of a format."""

    name: str  # of the dataset, in messages
    format: str  # "": they stay as they are
    text_field: str
    column_map: dict[str, str]
    structs: tuple[str, ...]  # columns that are Arrow structs, whose rows have null for every key that another row has
    folder: str  # of the dataset, to which paths of images are relative if its rows are of no text file; "" for the Hub
    template_arguments: dict[str, Any] | None  # --chat_template_kwargs
    keep: Callable[[dict], bool] | None  # of `load`: a function of a row; False: the row is skipped

    @property
    def stored(self) -> Features:
        """The columns of the format; a row that lacks one has null."""
        return formats.stored_features(self.format, self.text_field)

    @property
    def features(self) -> Features:
        """The columns of an examined row."""
        return Features(self.stored | {name: Value("string") for name in FACTS})

    def folder_of(self, place: str) -> str:
        """To which the paths of images in a row are relative: the folder of the text file that has the row."""
        file, in_file, _ = place.rpartition(", line ")
        if in_file:
            return str(Path(file).absolute().parent)
        return self.folder

    def convert(self, row: dict) -> tuple[dict | None, str]:
        """See `formats.examine`."""
        return formats.examine(row, self.format, self.text_field, self.column_map, self.structs, self.template_arguments)


@dataclass(frozen=True)
class Opened:
    """A dataset that is opened: how its rows are converted, and what was found out about them."""

    source: Source
    conversion: Conversion
    columns: list[str]
    examined: Dataset  # all rows, with FACTS; only the first ones of a stream, or of large data in a preview
    is_complete: bool  # `examined` has all rows
    examples: list[PlacedRow]  # of each kind of conversation
    rows: Dataset | IterableDataset  # to train on: of `examined`; those of a stream that are not skipped
    test_split: str
    eval_rows: list[dict]  # converted
    held_out: frozenset[str]  # the checksums of `eval_rows`, if they are of the training split


def placed(rows: Rows, name: str, split: str) -> Iterator[PlacedRow]:
    """Rows with their places in words: a line of a file, or the number of a row of a split."""
    with hub_errors("dataset", name):
        for number, row in enumerate(rows, 1):
            if ROW in row:
                yield row[PLACE], row[ROW]
            else:
                yield f"{name}, row {number} of {split}", row


def examine(place: str, row: dict, conversion: Conversion) -> dict:
    """The columns of the format, null for a skipped row, and the FACTS.

    Raises UserError with the place of a row that cannot be converted.
    """
    facts = dict.fromkeys(FACTS, "") | {PLACE: place}
    try:
        converted, facts[REASON] = conversion.convert(row)
        if converted and conversion.format == "images":
            for image in converted["images"]:
                facts[REASON] = facts[REASON] or images.find_file(image, conversion.folder_of(place))
        row = formats.rename(row, conversion.column_map)
        if converted is not None and conversion.keep and not conversion.keep(row):
            facts[REASON] = LEFT_OUT
        if facts[REASON]:
            return formats.complete({}, conversion.stored) | facts
        facts[DIGEST] = digest_of(converted)
        if conversion.format:
            facts |= {KIND: formats.kind_of_conversation(converted), HAS: " ".join(converted)}
            if is_bad_answer(row, conversion):
                facts[KIND] += BAD_ANSWER
        return formats.complete(converted, conversion.stored) | facts
    except UserError:
        raise
    except Exception as error:  # whatever a row can hold, or `keep` does; else nothing would say which row it is
        reason = str(error) if isinstance(error, RefusedRow) else f"this row, or `keep`, fails: {type(error).__name__}: {error}"
        raise UserError(f"{place}: {reason}") from error


def examine_of_stream(row: dict, conversion: Conversion) -> dict:
    """See `examine`; of a stream, whose rows have no number."""
    if ROW in row:
        return examine(row[PLACE], row[ROW], conversion)
    return examine(f"{conversion.name}, a row that begins with {str(dict(row))[:100]}", row, conversion)


def versions_of_images(rows: Iterable[PlacedRow], conversion: Conversion, ends_at_bytes: bool) -> Iterator[tuple | None]:
    """By which changed, new and deleted image files of rows are found, although the rows have not changed.

    `ends_at_bytes`: if an image is no file, none is, and all would be read once more.
    """
    for place, row in rows:
        try:
            converted, _ = conversion.convert(row)
        except Exception:  # `examine` says what is wrong and where
            continue
        for image in (converted or {}).get("images", []):
            if image["bytes"] is None:
                yield images.version_of(image, conversion.folder_of(place))
            elif ends_at_bytes:
                return


def is_bad_answer(row: dict, conversion: Conversion) -> bool:
    """Whether a row has the columns of KTO, and its `label` is false; in CSV that is a text."""
    is_kto = conversion.format in formats.PREFERENCE_FORMATS and bool(row.get("prompt")) and bool(row.get("completion"))
    return is_kto and str(row.get("label")).lower() == "false"


def converted_of(examined: dict) -> dict:
    """The converted row of an examined one, with the columns that it has."""
    return {name: examined[name] for name in examined[HAS].split()}


def digest_of(row: dict) -> str:
    """A checksum of a converted row, the same for turns in one column or in two."""
    turns = formats.turns_of(row)
    if turns:
        row = without(row, *formats.TURNS) | {"turns": [without(turn, "train") for turn in turns]}
    return xxhash.xxh3_64_hexdigest(json.dumps(row, ensure_ascii=False, sort_keys=True, default=_checksum_of).encode())


def _checksum_of(value: Any) -> str:
    """Of the bytes of an image; any other value that JSON has no form for as a text."""
    if hasattr(value, "tobytes"):  # a decoded one, whose text has an address
        value = value.tobytes()
    if isinstance(value, bytes):
        return xxhash.xxh3_64_hexdigest(value)
    return str(value)


@dataclass(frozen=True)
class Shape:
    """The columns of the rows to train on, the same for all datasets of a run, and how converted rows get them."""

    features: Features
    splits_answers: bool
    joins_completions: bool  # some rows have messages, others a prompt and a completion
    has_text_arguments: bool  # see DataSettings
    drops_marks: str  # likewise
    cuts_texts: bool = False  # see Source

    @property
    def only_selects_columns(self) -> bool:
        return not (self.splits_answers or self.joins_completions or self.has_text_arguments or self.cuts_texts)

    def finish(self, row: dict) -> list[dict]:
        """A converted row, or one for every answer, in this shape; cut for a rehearsal.

        Raises UserError for marks without an effect in a row of a stream, which no check before the run has seen.
        """
        if self.joins_completions and "completion" in row:
            row = formats.as_messages(row)
        if self.has_text_arguments:
            row = formats.with_text_arguments(row)
        if self.cuts_texts:
            row = cut_texts_of_row(row)
        rows = formats.split_answers(row) if self.splits_answers else [row]
        if self.drops_marks and any(map(formats.has_untrained_turn, rows)):
            raise UserError(self.drops_marks)
        return [formats.complete(part, self.features) for part in rows]


def finish_batch(batch: dict[str, list], shape: Shape) -> dict[str, list]:
    """Examined rows in the shape of the training rows."""
    finished: dict[str, list] = {name: [] for name in shape.features}
    for values in zip(*batch.values(), strict=True):
        for row in shape.finish(converted_of(dict(zip(batch, values, strict=True)))):
            for name in shape.features:
                finished[name].append(row[name])
    return finished


def cut_texts_of_row(row: dict) -> dict:
    """A converted row with shorter texts, so that the short sequences of a rehearsal hold an answer too. JSON stays JSON."""
    row = dict(row)
    for name, value in row.items():
        if name != "images":
            row[name] = cut_texts(value, MAX_TOOL_LETTERS if name == "tools" else MAX_LETTERS)
    return row


def cut_texts(value: Any, letters: int) -> Any:
    """`value` with every string in it cut to `letters` letters; strings of JSON stay JSON, and <think> tags stay whole."""
    if isinstance(value, dict):
        return {name: cut_texts(part, letters) for name, part in value.items()}
    if isinstance(value, list):
        return [cut_texts(part, letters) for part in value]
    if not isinstance(value, str) or len(value) <= letters:
        return value
    if value.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(cut_texts(json.loads(value), letters), ensure_ascii=False)
        except json.JSONDecodeError:
            pass
    pieces = re.split(rf"(</?think>|{images.IMAGE})", value)
    return "".join(piece if index % 2 else piece[:letters] for index, piece in enumerate(pieces))


def find_conversion(
    data: DataSettings, source: Source, rows: Rows, keep: Callable[[dict], bool] | None
) -> tuple[Conversion, list[str]]:
    """How rows are converted: to the first of the formats to which one of the first rows can be converted; and their columns.

    Raises UserError if no row can be converted.
    """
    found = placed(rows, source.display_name, source.train_split)
    first = list(itertools.islice(found, ROWS_TO_CHECK))
    features = rows.features or {}
    names = dict.fromkeys(features)
    for _, row in first:
        names |= dict.fromkeys(row)
    columns = list(names)
    column_map = {old: new for old, new in (data.column_map or {}).items() if old in columns}
    structs = tuple(column for column, kind in features.items() if has_struct(kind))
    path = Path(absolute_name(source.name))
    folder = ""
    if path.is_absolute():
        folder = str(path if path.is_dir() else path.parent)
    conversion = Conversion(
        source.display_name,
        "",
        data.text_field,
        column_map,
        structs,
        folder,
        data.template_arguments,
        None,  # `keep` has no part in which format rows have
    )
    if not data.formats:
        return replace(conversion, keep=keep), columns
    for candidates in (first, found):  # if nothing can be used of the first rows, some of the following ones may be complete
        searched = list(itertools.islice(candidates, ROWS_TO_SEARCH))
        for format in data.formats:
            conversion = replace(conversion, format=format)
            if next(usable_rows(searched, conversion), None):
                print_ignored_columns(columns, [row for _, row in first], conversion)
                return replace(conversion, keep=keep), columns
    reasons: dict[str, None] = {} if first else {"it is empty": None}  # in order
    for format in data.formats:
        for place, row in first:
            reasons[f"{format}: {examine(place, row, replace(conversion, format=format))[REASON]}"] = None
    wanted = " or ".join(formats.DESCRIPTIONS[format] for format in data.formats)
    renamed = ", ".join(formats.rename(dict.fromkeys(columns), column_map))
    raise UserError(
        f"--dataset_name: {source.display_name} has the columns {renamed or '(none)'}: its first rows cannot be used "
        f"({', '.join(reasons)}); "
        f"this recipe needs {wanted}. If the columns have other names: --column_map "
        """'{"OLD": "NEW", "OLD": "NEW"}'"""
    )


def print_ignored_columns(columns: list[str], rows: list[dict], conversion: Conversion) -> None:
    """Prints which columns change nothing in the converted first rows: one with another name is not trained on."""
    ignored = []
    rows = [row for row in rows if is_without_effect("", row, conversion)]  # without those that cannot be converted
    for column in columns:
        has_values = any(not is_nothing(row.get(column)) for row in rows)
        if has_values and all(is_without_effect(column, row, conversion) for row in rows):
            ignored.append(column)
    if ignored:
        print_once(f"{conversion.name}: ignored columns: {', '.join(ignored)}.")


def is_without_effect(column: str, row: dict, conversion: Conversion) -> bool:
    try:
        return conversion.convert(row) == conversion.convert(without(row, column))
    except RefusedRow:  # such as a row without its images
        return False


def usable_rows(rows: Iterable[PlacedRow], conversion: Conversion) -> Iterator[dict]:
    """The rows that can be used, converted; of a format "" as they are."""
    for place, row in rows:
        examined = examine(place, row, conversion)
        if not examined[REASON]:
            yield converted_of(examined) if conversion.format else row


def has_struct(kind: Any) -> bool:
    """Whether a feature is an Arrow struct, or a list of them."""
    return isinstance(kind, dict) or (hasattr(kind, "feature") and has_struct(kind.feature))
