"""How the rows of a dataset become rows of a format: which format its first rows have, and what becomes of each row.

A row is read and converted once. `examine` returns the converted row with what `load` needs to know of it, its FACTS: why it is
skipped, a checksum, what kind of conversation it is. Afterwards rows are only chosen by these facts.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.data import formats, images
from harness.data.reading import absolute_name
from harness.data.settings import DataSettings, Source
from harness.data.turns import RefusedRow, is_nothing, without
from harness.messages import UserError

import xxhash
from datasets import Features, Value

ROWS_TO_CHECK = 20  # of each split, before a run
ROWS_TO_SEARCH = 10_000  # after these, for the first usable one
MAX_LETTERS = 150  # of a text, in a rehearsal
MAX_TOOL_LETTERS = 20  # of each text in the definition of a tool
# Columns next to those of the converted row: where the row is, why it is skipped ("" if it is not), a checksum, what its turns
# are, and which columns of the format it has. The last three are "" for a skipped row.
PLACE, REASON, DIGEST, KIND, HAS = FACTS = ("_place", "_reason", "_digest", "_kind", "_has")
LEFT_OUT = "left out by the recipe (`keep`)"
BAD_ANSWER = ", bad answer"  # ends the KIND of a row of KTO data whose `label` is false
PlacedRow = tuple[str, dict]  # where a row is, in words, and the row as its file has it


@dataclass(frozen=True)
class Conversion:
    """How the rows of a dataset become rows of a format."""

    format: str  # "": they stay as they are
    text_field: str
    column_map: dict[str, str] | None
    structs: tuple[str, ...]  # columns that are Arrow structs, whose rows have null for every key that another row has
    folder: str = ""  # of the dataset, to which paths of images are relative if its rows are of no text file; "" for the Hub
    template_arguments: dict[str, Any] | None = None  # --chat_template_kwargs
    keep: Callable[[dict], bool] | None = None  # of `load`: a function of a row; False: the row is skipped

    @property
    def stored(self) -> Features:
        """The columns of the format; a row that lacks one has null."""
        return formats.stored_features(self.format, self.text_field)

    def folder_of(self, place: str) -> str:
        """To which the paths of images in a row are relative: the folder of the text file that has the row."""
        file, in_file, _ = place.rpartition(", line ")
        return str(Path(file).absolute().parent) if in_file else self.folder

    def convert(self, row: dict) -> tuple[dict | None, str]:
        """See `formats.examine`."""
        return formats.examine(row, self.format, self.text_field, self.column_map, self.structs, self.template_arguments)


def features_of_examined(conversion: Conversion) -> Features:
    return Features(conversion.stored | {name: Value("string") for name in FACTS})


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
    except RefusedRow as error:
        raise UserError(f"{place}: {error}") from error
    except Exception as error:  # whatever a row can hold, or `keep` of the recipe does
        advice = "correct or delete it" + (", or correct `keep` of the recipe" if conversion.keep else "")
        raise UserError(
            f"{place}: this row cannot be converted ({type(error).__name__}: {str(error)[:200]}): {advice}"
        ) from error


def versions_of_images(rows: Iterable[PlacedRow], conversion: Conversion) -> list[tuple | None]:
    """By which changed, new and deleted image files of rows are found, although the rows have not changed."""
    return [images.version_of(image, conversion.folder_of(place)) for place, image in images_of(rows, conversion)]


def images_of(rows: Iterable[PlacedRow], conversion: Conversion) -> Iterator[tuple[str, dict]]:
    """The images of rows, with the places of these rows."""
    for place, row in rows:
        try:
            converted, _ = conversion.convert(row)
        except Exception:  # `examine` says what is wrong and where
            continue
        for image in (converted or {}).get("images", []):
            yield place, image


def is_bad_answer(row: dict, conversion: Conversion) -> bool:
    """Whether a row has the columns of KTO, and its `label` is false; in CSV that is a text."""
    is_kto = conversion.format in formats.PREFERENCE_FORMATS and bool(row.get("prompt")) and bool(row.get("completion"))
    return is_kto and str(row.get("label")).lower() == "false"


def converted_of(examined: dict) -> dict:
    """The converted row of an examined one, with the columns that it has."""
    return {name: examined[name] for name in examined[HAS].split()}


def digest_of(row: dict) -> str:
    """A checksum of a converted row, the same for turns in one column or in two."""
    if turns := formats.turns_of(row):
        row = without(row, *formats.TURNS) | {"turns": [without(turn, "train") for turn in turns]}
    return xxhash.xxh3_64_hexdigest(json.dumps(row, ensure_ascii=False, sort_keys=True, default=_checksum_of).encode())


def _checksum_of(value: Any) -> str:
    """Of the bytes of an image; any other value that JSON has no form for as a text."""
    return xxhash.xxh3_64_hexdigest(value) if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class Shape:
    """The columns of the rows to train on, the same for all datasets of a run."""

    features: Features
    splits_answers: bool
    has_text_arguments: bool = False  # see DataSettings
    drops_marks: str = ""  # likewise

    def finish(self, row: dict, cuts_texts: bool) -> list[dict]:
        """A converted row, or one for every answer, in this shape; cut for a rehearsal."""
        if "messages" in self.features and "completion" in row:
            row = formats.as_messages(row)
        if self.has_text_arguments:
            row = formats.with_text_arguments(row)
        if cuts_texts:
            row = cut_texts_of_row(row)
        rows = formats.split_answers(row) if self.splits_answers else [row]
        if self.drops_marks and any(map(formats.has_untrained_turn, rows)):
            raise UserError(self.drops_marks)
        return [formats.complete(part, self.features) for part in rows]


def shape_of(has: set[str], stored: Features, data: DataSettings) -> Shape:
    """The shape of rows: `messages` if some have these and others a completion.

    `has`: values of the fact HAS; `stored`: the columns of the format.
    """
    splits_answers = data.split_conversations
    found = {*" ".join(has).split()}
    if splits_answers or {"messages", "completion"} <= found:
        found = found - {"prompt", "completion"} | {"messages"}
    features = Features({name: kind for name, kind in stored.items() if name in found})
    return Shape(features, splits_answers, data.has_text_arguments, data.drops_marks)


def cut_texts_of_row(row: dict) -> dict:
    """A converted row with shorter texts, so that the short sequences of a rehearsal hold an answer too. JSON stays JSON."""
    texts = without(row, "images")
    return row | {name: cut_texts(value, MAX_TOOL_LETTERS if name == "tools" else MAX_LETTERS) for name, value in texts.items()}


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


@dataclass(frozen=True)
class FirstRows:
    """What the first rows of a dataset show."""

    columns: list[str]
    ignored: list[str]  # columns that nothing is read from
    converted: list[PlacedRow]


def find_conversion(
    data: DataSettings, source: Source, rows: Iterable[PlacedRow], features: Features | None
) -> tuple[Conversion, FirstRows]:
    """How rows are converted: to the first of the formats to which one of the first rows can be converted.

    Raises UserError if no row can be converted. `features`: of `rows`, if they have some.
    """
    rows = iter(rows)
    first = list(itertools.islice(rows, ROWS_TO_CHECK))
    if not first:
        raise UserError(f"dataset {source.display_name}: it is empty: no rows in {source.train_split}")
    path = Path(absolute_name(source.name))
    folder = str(path if path.is_dir() else path.parent) if path.is_absolute() else ""
    names = dict.fromkeys(features or ())
    for _, row in first:
        names |= dict.fromkeys(row)
    columns = list(names)
    column_map = {old: new for old, new in (data.column_map or {}).items() if old in columns} or None
    structs = tuple(column for column, kind in (features or {}).items() if has_struct(kind))
    if not data.formats:
        return Conversion("", data.text_field, column_map, structs), FirstRows(columns, [], first)
    # If nothing can be used of the first rows, some of the following ones may be complete.
    candidates = first
    while candidates:
        for format in data.formats:
            conversion = Conversion(format, data.text_field, column_map, structs, folder, data.template_arguments)
            if found := list(itertools.islice(usable_rows(candidates, conversion), ROWS_TO_CHECK)):
                check_flags_of_conversations(data, source, format)
                some = [row for _, row in candidates[:ROWS_TO_CHECK]]
                ignored = [column for column in columns if is_ignored(column, some, conversion)]
                return conversion, FirstRows(columns, ignored, found)
        candidates = list(itertools.islice(rows, ROWS_TO_SEARCH)) if candidates is first else []
    reasons = [row[REASON] if REASON in row else examine(place, row, conversion)[REASON] for place, row in first]
    check_images_can_be_used(source.display_name, reasons)
    raise UserError(explain_no_format(data, source, [row for _, row in first]))


def check_images_can_be_used(name: str, reasons: list[str]) -> None:
    """Raises UserError if rows of a dataset are skipped because of an image. `reasons`: of rows, "" for one that is not."""
    reason = next((reason for reason in reasons if reason.startswith(images.OF_IMAGE)), "")
    if reason:
        raise UserError(
            f"--dataset_name: {name}: no row with an image can be used; the first one is a row {reason}. Paths of images are "
            "relative to the file of the row"
        )


def usable_rows(rows: Iterable[PlacedRow], conversion: Conversion) -> Iterator[PlacedRow]:
    """The rows that can be used, converted; of a format "" as they are. Some may be examined already."""
    for place, row in rows:
        examined = row if REASON in row else examine(place, row, conversion)
        if not examined[REASON]:
            yield place, converted_of(examined) if conversion.format else row


def check_flags_of_conversations(data: DataSettings, source: Source, format: str) -> None:
    """Raises UserError if a flag that is for conversations is passed for rows that are none."""
    name = source.display_name
    if data.split_conversations and format not in ("messages", "images"):
        raise UserError(f"--split_conversations is for conversations, but {name} has none: leave out the flag")
    if data.template_arguments and format not in formats.CONVERSATIONS:
        raise UserError(f"--chat_template_kwargs is for conversations, but {name} has none: leave out the flag")


def explain_no_format(data: DataSettings, source: Source, first: list[dict]) -> str:
    """The error message for a dataset whose first rows have none of the formats of the recipe."""
    wanted = " or ".join(formats.DESCRIPTIONS[format] for format in data.formats)
    mismatch = formats.explain_mismatch(first, data.formats, data.text_field, data.column_map)
    names = '{"OLD": "NEW", "OLD": "NEW"}'
    return (
        f"--dataset_name: {source.display_name} {mismatch}; this recipe needs {wanted}. If the columns have other names: "
        f"--column_map '{names}'"
    )


def has_struct(kind: Any) -> bool:
    """Whether a feature is an Arrow struct, or a list of them."""
    return isinstance(kind, dict) or (hasattr(kind, "feature") and has_struct(kind.feature))


def is_ignored(column: str, rows: list[dict], conversion: Conversion) -> bool:
    """Whether a column holds something and changes nothing in the converted rows."""
    has_values = False
    for row in rows:
        if not is_nothing(row.get(column)):
            has_values = True
            try:
                if conversion.convert(row) != conversion.convert(without(row, column)):
                    return False
            except RefusedRow:  # without its images
                return False
    return has_values
