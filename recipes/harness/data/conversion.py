"""How the rows of a dataset become rows of a format, and what `load` needs to know of each row.

A row is read and converted once. `examine_row` returns the converted row with its FACTS: why it is skipped, a checksum, what kind
of conversation it is. Afterwards rows are only chosen by these facts.
"""

import functools
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.data import formats, images
from harness.data.reading import PLACE, ROW, DataSettings, PlacedRow, Rows, Source, absolute_name, file_versions, with_places
from harness.data.turns import END_OF_THINK, KEYS_OF_CALL, TEMPLATE_ARGUMENTS, is_nothing, without
from harness.hub import hub_errors
from harness.messages import RefusedRow, UserError, print_once

import xxhash
from datasets import Dataset, Features, Json, List, Value
from datasets.fingerprint import Hasher, generate_fingerprint

ROWS_TO_SEARCH = 10_000  # after the first ones, for the first usable one
REHEARSED_ROWS = 500  # of each split, for a rehearsal or plan
MAX_LETTERS = 150  # of a text, in a rehearsal
MAX_TOOL_LETTERS = 20  # of each text in the definition of a tool
TURNS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns of a converted row that have turns
# Keys of a turn of a converted row. Some chat templates read others.
KNOWN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "train")
# Columns next to those of the converted row: where the row is, why it is skipped ("" if it is not), a checksum, what its turns
# are, and which columns of the format it has. The last three are "" for a skipped row.
REASON = "_reason"
DIGEST = "_digest"
KIND = "_kind"
HAS = "_has"
FACTS = (PLACE, REASON, DIGEST, KIND, HAS)
LEFT_OUT = "left out by the recipe (`keep`)"
WITH_IMAGES = ", images"  # in the KIND of a conversation
BAD_ANSWER = ", bad answer"  # ends the KIND of a row of KTO data whose `label` is false


@dataclass(frozen=True)
class Conversion:
    """How the rows of a dataset become rows of a format."""

    name: str  # of the dataset, in messages
    columns: list[str] = field(repr=False)  # of its first rows
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
        return stored_features(self.format, self.text_field)

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
        """See `formats.convert`."""
        return formats.convert(row, self.format, self.text_field, self.column_map, self.structs, self.template_arguments)


def find_conversion(
    data: DataSettings,
    source: Source,
    features: Features,
    first: list[PlacedRow],
    following: Iterator[PlacedRow],
    keep: Callable[[dict], bool] | None,
) -> Conversion:
    """How rows are converted: to the first of the formats to which one of the first rows can be converted.

    `features`: of the files, which may not say them. Raises UserError if no row can be converted.
    """
    columns = list(dict.fromkeys(itertools.chain(features, *(row for _, row in first))))
    path = Path(absolute_name(source.name))
    folder = ""
    if path.is_absolute():
        folder = str(path if path.is_dir() else path.parent)
    conversion = Conversion(
        source.display_name,
        columns,
        "",
        data.text_field,
        {old: new for old, new in (data.column_map or {}).items() if old in columns},
        tuple(column for column, kind in features.items() if has_struct(kind)),
        folder,
        data.template_arguments,
        None,  # `keep` has no part in which format rows have
    )
    if not data.formats:
        return replace(conversion, keep=keep)
    for candidates in (first, following):  # if nothing can be used of the first rows, some of the following ones may be complete
        searched = list(itertools.islice(candidates, ROWS_TO_SEARCH))
        for format in data.formats:
            conversion = replace(conversion, format=format)
            if next(usable_rows(searched, conversion), None):
                print_ignored_columns([row for _, row in first], conversion)
                return replace(conversion, keep=keep)
    reasons = []
    for format in data.formats if first else ():
        reasons.append(f"row 1 as {format}: {examine_row(*first[0], replace(conversion, format=format))[REASON]}")
    wanted = " or ".join(formats.DESCRIPTIONS[format] for format in data.formats)
    renamed = ", ".join(formats.rename(dict.fromkeys(columns), conversion.column_map))
    unknown = "".join(f", but no {name} (--column_map)" for name in (data.column_map or {}).keys() - columns)
    raise UserError(
        f"--dataset_name: {source.display_name} has the columns {renamed or '(none)'}{unknown}: its first {len(first)} rows "
        f"cannot be used ({', '.join(reasons) or 'it is empty'}); this recipe needs {wanted}. If the columns have other names: "
        """--column_map '{"OLD": "NEW", "OLD": "NEW"}'"""
    )


def has_struct(kind: Any) -> bool:
    """Whether a feature is an Arrow struct, or a list of them."""
    return isinstance(kind, dict) or (hasattr(kind, "feature") and has_struct(kind.feature))


def print_ignored_columns(rows: list[dict], conversion: Conversion) -> None:
    """Prints which columns change nothing in the converted first rows: one with another name is not trained on."""
    ignored = []
    rows = [row for row in rows if is_without_effect("", row, conversion)]  # without those that cannot be converted
    for column in conversion.columns:
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
        examined = examine_row(place, row, conversion)
        if not examined[REASON]:
            yield converted_of(examined) if conversion.format else row


def examine_rows(rows: Rows, conversion: Conversion, source: Source, limit: int) -> Dataset:
    """The examined rows: of the first `limit` rows, in memory; if it is 0, of all rows, in the cache of `datasets`.

    The first process that asks makes them; all others wait, and read them there.
    """

    def of_files() -> Iterator[PlacedRow]:
        return with_places(rows, source.display_name, source.train_split)

    def examined() -> Iterator[dict]:
        for place, row in of_files():
            yield examine_row(place, row, conversion)

    if limit:
        return Dataset.from_list(list(itertools.islice(examined(), limit)), features=conversion.features)
    key = [source.config, source.text_rows, source.train_split, replace(conversion, keep=None), Hasher.hash(conversion.keep)]
    key += [conversion.features, checksum_of_code(), *file_versions(source.name)]
    if isinstance(rows, Dataset):
        key.append(generate_fingerprint(rows))
    if conversion.format == "images":
        key += versions_of_images(of_files(), conversion, ends_at_bytes=isinstance(rows, Dataset))
    logging.getLogger("datasets.builder").setLevel(logging.ERROR)
    fingerprint = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    with hub_errors("dataset", source.display_name):
        return Dataset.from_generator(examined, features=conversion.features, fingerprint=fingerprint)


def checksum_of_code() -> str:
    """Any change in this folder converts all rows again: simpler than to know which modules can change a row."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(code).hexdigest()


def examine_row(place: str, row: dict, conversion: Conversion) -> dict:
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
            return complete({}, conversion.stored) | facts
        facts[DIGEST] = digest_of(converted)
        if conversion.format:
            facts |= {KIND: kind_of_conversation(converted), HAS: " ".join(converted)}
            if is_bad_answer(row, conversion):
                facts[KIND] += BAD_ANSWER
        return complete(converted, conversion.stored) | facts
    except UserError:
        raise
    except Exception as error:  # whatever a row can hold, or `keep` does; else nothing would say which row it is
        reason = str(error) if isinstance(error, RefusedRow) else f"this row, or `keep`, fails: {type(error).__name__}: {error}"
        raise UserError(f"{place}: {reason}") from error


def examine_row_of_stream(row: dict, conversion: Conversion) -> dict:
    """See `examine_row`; of a stream, whose rows have no number."""
    if ROW in row:
        return examine_row(row[PLACE], row[ROW], conversion)
    return examine_row(f"{conversion.name}, a row that begins with {str(dict(row))[:100]}", row, conversion)


def versions_of_images(rows: Iterable[PlacedRow], conversion: Conversion, ends_at_bytes: bool) -> Iterator[tuple | None]:
    """By which changed, new and deleted image files of rows are found, although the rows have not changed.

    `ends_at_bytes`: if an image is no file, none is, and all would be read once more.
    """
    for place, row in rows:
        try:
            converted, _ = conversion.convert(row)
        except Exception:  # `examine_row` says what is wrong and where
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


def digest_of(row: dict) -> str:
    """A checksum of a converted row, the same for turns in one column or in two."""
    turns = turns_of(row)
    if turns:
        row = without(row, *TURNS) | {"turns": [without(turn, "train") for turn in turns]}
    return xxhash.xxh3_64_hexdigest(json.dumps(row, ensure_ascii=False, sort_keys=True, default=_checksum_of).encode())


def _checksum_of(value: Any) -> str:
    """Of the bytes of an image; any other value that JSON has no form for as a text."""
    if hasattr(value, "tobytes"):  # a decoded one, whose text has an address
        value = value.tobytes()
    if isinstance(value, bytes):
        return xxhash.xxh3_64_hexdigest(value)
    return str(value)


def kind_of_conversation(row: dict) -> str:
    """What the turns of a converted row have: "user assistant+calls tool assistant+thought, tools, images"; "" without turns.

    Also the names of keys that only some chat templates read: "user+key:name".
    """
    words = []
    for turn in turns_of(row):
        word = turn["role"]
        if "tool_calls" in turn:
            word += "+calls"
        if "reasoning_content" in turn or END_OF_THINK in turn["content"]:
            word += "+thought"
        if not turn.get("train", True):
            word += "+untrained"
        words.append("+key:".join([word, *other_keys(turn)]))
    kind = " ".join(words)
    if row.get("tools"):
        kind += ", tools"
    if row.get("images"):
        kind += WITH_IMAGES
    return kind


def other_keys(turn: dict) -> list[str]:
    """The keys of a turn of a converted row, and of its calls, that have a value and that only some chat templates read."""
    keys: dict[str, None] = {}  # in order
    for key, value in turn.items():
        if key not in KNOWN_KEYS and not is_nothing(value):
            keys[key] = None
    for call in turn.get("tool_calls", []):
        for key, value in call.items():
            if key not in KEYS_OF_CALL and not is_nothing(value):
                keys[f"tool_calls.{key}"] = None
    return list(keys)


def turns_of(row: dict) -> list[dict]:
    """All turns of a converted row; [] of a row of texts."""
    return [turn for column in TURNS if isinstance(row.get(column), list) for turn in row[column]]


def split_answers(row: dict) -> list[dict]:
    """One row for every answer of a conversation that counts in the loss; the turns before it are its context."""
    turns = turns_of(row)
    first = 1  # a first message never counts
    if "messages" not in row:
        first = len(row["prompt"])
    rows = []
    for index in range(first, len(turns)):
        if turns[index]["role"] == "assistant" and turns[index].get("train", True):
            part = without(row, *TURNS) | {"messages": [*formats.as_context(turns[:index]), turns[index]]}
            if "images" in row:  # those of later turns are not in this row
                part["images"] = row["images"][: images.count_marks(part["messages"])]
            rows.append(part)
    return rows


@functools.cache
def stored_features(format: str, text_field: str) -> Features:
    """The columns of converted rows. Turns are JSON, because Arrow would give every turn the keys of all others as null."""
    columns = {
        "": (),
        "text": (text_field,),
        "prompt_completion": ("prompt", "completion"),
        "instruction": ("instruction", "input", "output"),
        "question_answer": ("question", "answer"),
        "messages": ("messages", "prompt", "completion", "tools"),
        "images": ("messages", "tools"),
        "preference": ("prompt", "chosen", "rejected", "tools"),
    }[format]
    if format not in formats.CONVERSATIONS:
        return Features(dict.fromkeys(columns, Value("string")))
    of_images = {"images": images.FEATURE} if format == "images" else {}
    return Features(dict.fromkeys(columns, List(Json())) | of_images | {TEMPLATE_ARGUMENTS: Json()})


def complete(row: dict, features: Features) -> dict:
    """`row` with all columns of `features`. TRL passes `chat_template_kwargs` on, so it must not be null."""
    return {name: row.get(name, {} if name == TEMPLATE_ARGUMENTS else None) for name in features}


def converted_of(examined: dict) -> dict:
    """The converted row of an examined one, with the columns that it has."""
    return {name: examined[name] for name in examined[HAS].split()}


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
