"""From --dataset_name to rows: converts what `reading.py` reads, counts what is skipped, and holds some rows out."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.data import formats, reading
from harness.data.script_arguments import (
    ScriptArguments,
    add_summaries,
    check_slices,
    choose_splits,
    count_rows_of_epoch,
    each_dataset,
    evaluation_split,
    hold_out,
    hold_out_of_stream,
    is_slice,
    mix,
    share,
    splits_of,
)
from harness.data.stream_rows import shuffle
from harness.folder import DATA, read_json, write_json
from harness.hub import hub_errors
from harness.launched import UserError, is_first_process, print_once

import xxhash
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Json,
    Value,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from huggingface_hub.constants import HF_HOME, HF_HUB_OFFLINE
from transformers import TrainingArguments

FIRST_ROWS, REHEARSED_ROWS = 400, 500  # of each split, for a preview, and for a rehearsal or plan
MAX_LETTERS, MAX_TOOL_LETTERS = 150, 20  # of a text, and of each text in the definition of a tool, in a rehearsal
ROWS_TO_CHECK, ROWS_TO_SEARCH = 20, 10_000  # of each split, before a run; among how many the first usable one is
# Next to the files of a stream that --prepare has downloaded: for how many tokens, and samples, they are enough.
PREPARED = "stream.json"
COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "instruction", "input", "output", "system", "history")
# `datasets` takes rows from its cache although the functions that made them have changed.
CODE = hashlib.sha256(b"".join(Path(file).read_bytes() for file in (formats.__file__, reading.__file__, __file__))).hexdigest()


@dataclass
class Conversion:
    """How the rows of a split become rows to train on."""

    settings: dict[str, Any]  # arguments of `formats.examine`
    columns: list[str]  # of the split
    features: Features | None  # of the converted rows
    ignored: list[str]  # columns that nothing is read from
    first: list[dict]  # some converted rows
    splits_answers: bool
    cuts_texts: bool

    @property
    def format(self) -> str:
        return self.settings["format"]


@dataclass
class Source:
    """A dataset while it is loaded."""

    script_args: ScriptArguments
    splits: dict[str, Any]
    is_complete: bool  # the splits have all their rows
    train: Dataset | IterableDataset
    test: Dataset | IterableDataset | None
    conversion: Conversion
    facts: dict[str, Any]  # of the rows of `train`, see `find_facts`
    eval_rows: list[dict]  # converted; without a split for evaluation [] until rows are held out
    held_out: int = 0  # how many of them are


def load(
    script_args: ScriptArguments, keep: Callable[[dict], bool] | None = None
) -> tuple[Dataset | IterableDataset, Dataset | DatasetDict]:
    """Loads the rows to train on and the rows to evaluate on.

    Args:
        script_args: the first of the three arguments that `parse` returns.
        keep: a function of a row; rows for which it returns False are dropped.

    Returns:
        `(train_dataset, eval_dataset)`, rows in the first format of `dataset_formats` that they can be converted to, see
        formats.py. Rows without a text or an answer are skipped; how many and why is printed, and written into `data.json`.

        The evaluation rows are the first `max_eval_samples` of the split for evaluation. Without such a split as many are
        held out of the training split; with all rows that equal them they are at most a tenth of it.

        Of several datasets (`dataset_weights`) the training rows are mixed by weight, see `mix`, and `eval_dataset` has
        the evaluation rows of each by its label, as a DatasetDict: `map` and `select_columns` work as those of one dataset.
    """
    sources = [open_source(one, keep) for one in each_dataset(script_args)]
    use_one_shape(sources, keep)
    held_out = {digest_of(row) for source in sources for row in hold_out_rows(source, keep)}
    for source in sources:
        remove_held_out(source, held_out)
    summaries = [summarize(source) for source in sources]
    for source, summary in zip(sources, summaries, strict=True):
        print_summary(source.script_args, summary, source.splits)
        if not list(source.train.take(1)):
            raise UserError(
                f"--dataset_name: no row of {source.script_args.display_name} is left to train on: all are without a text or "
                "answer, or equal to a row that is held out for evaluation"
            )
    rows = [training_rows(source) for source in sources]
    train, summary = rows[0], summaries[0]
    if script_args.mixture:
        train = mix(script_args, rows)
        count_rows_of_epoch(script_args, rows, summaries)
        summary = add_summaries(summaries)
    if script_args.output_dir and is_first_process():
        Path(script_args.output_dir).mkdir(parents=True, exist_ok=True)
        write_json(Path(script_args.output_dir, DATA), summary)
    if isinstance(train, IterableDataset):
        train = train.take(script_args.max_samples) if script_args.max_samples else train
    if isinstance(train, IterableDataset) and script_args.keeps_samples:
        features = sources[0].conversion.features
        kept = itertools.islice(train, script_args.first_rows or None)
        train = Dataset.from_list([formats.complete(row, features) for row in kept], features=features)
        print_once(f"{script_args.display_name}: {len(train):,} rows of the stream are kept in memory, for every epoch the same.")
    evaluated = {source.script_args.label: evaluation_rows(source) for source in sources}
    return train, DatasetDict(evaluated) if script_args.mixture else evaluated[""]


def open_source(script_args: ScriptArguments, keep: Callable[[dict], bool] | None) -> Source:
    """Opens a dataset, and finds out how its rows are converted and which of them are skipped.

    Also reads the evaluation rows, if there is a split for them. `keep`: see `load`.
    """
    name = script_args.display_name
    splits, is_complete = open_for_load(script_args)
    train, test = choose_splits(script_args, splits)
    conversion = find_conversion(script_args, train)
    complete_row = formats.rename(dict.fromkeys(conversion.columns, True), conversion.settings["column_map"])
    if conversion.format in formats.PREFERENCE_FORMATS and formats.is_preference(complete_row):
        print_once(f"{name} is preference data: `chosen` is trained on, `rejected` is ignored.")
        conversion.ignored = [column for column in conversion.ignored if column != "rejected"]
    if conversion.ignored:
        print_once(f"{name}: ignored columns: {', '.join(conversion.ignored)}.")
    rows_of_stream = None if reading.is_small(script_args.dataset_name) else FIRST_ROWS
    facts = find_facts(train, conversion, keep, rows_of_stream)
    source = Source(script_args, splits, is_complete, train, test, conversion, facts, eval_rows=[])
    set_eval_rows(source, keep)
    if test is not None and not source.eval_rows:
        condition = " that the recipe keeps (`keep`)" if keep else ""
        raise UserError(
            f"--dataset_test_split: no row of {name} in this split{condition} has a text or answer: pass another split"
        )
    return source


def most_eval_rows(script_args: ScriptArguments) -> int:
    """How many rows a run evaluates on at most; a rehearsal holds out as many, and evaluates on fewer."""
    return script_args.eval_rows_of_run or script_args.max_eval_samples


def set_eval_rows(source: Source, keep: Callable[[dict], bool] | None) -> None:
    """Sets `source.eval_rows` if the dataset has a split for evaluation."""
    if source.test is not None:
        count = most_eval_rows(source.script_args)
        source.eval_rows = usable_rows(source.test, source.conversion.settings, keep, count)


def use_one_shape(sources: list[Source], keep: Callable[[dict], bool] | None) -> None:
    """Makes all rows of all datasets have the same columns: `messages`, where some have it and others prompt and completion.

    Raises UserError for datasets of different formats, such as texts and conversations.
    """
    check_same_format([(source.conversion.format, source.script_args.display_name) for source in sources])
    shapes = {shape for source in sources for shape in (*source.facts["shape"], *map(shape_of, source.eval_rows))}
    if len(shapes - {""}) > 1:
        for source in sources:
            source.conversion.settings["as_messages"] = True
            source.conversion.features = features_for(source.script_args, source.conversion)
            set_eval_rows(source, keep)
    if not sources[0].conversion.format:  # rows stay as they are
        for source in sources:
            if source.train.features != sources[0].train.features:
                names = [source.script_args.display_name for source in (sources[0], source)]
                raise UserError(f"--dataset_name: {' and '.join(names)} have other columns: a run needs datasets of one kind")
    elif len(sources) > 1:
        features = Features({})
        for source in sources:
            features.update(source.conversion.features)
        for source in sources:
            source.conversion.features = features


def hold_out_rows(source: Source, keep: Callable[[dict], bool] | None) -> list[dict]:
    """Without a split for evaluation, chooses the rows that are held out of the training split; returns them, converted.

    Afterwards a stream has only rows that can be used; of data in memory `facts` says which.
    """
    name, settings, count = source.script_args.display_name, source.conversion.settings, most_eval_rows(source.script_args)
    if isinstance(source.train, IterableDataset):
        source.train = source.train.filter(_is_usable, fn_kwargs={"settings": settings, "keep": keep})
    if source.test is not None:
        return []
    if isinstance(source.train, Dataset):
        usable = [index for index, reason in enumerate(source.facts["reason"]) if not reason]
        chosen = [source.train[index] for index in hold_out(usable, source.facts["digest"], count, name)]
    else:
        chosen = hold_out_of_stream(source.train, count, name, source.facts["complete"])
    source.eval_rows, source.held_out = [formats.convert(row, **settings) for row in chosen], len(chosen)
    return source.eval_rows


def remove_held_out(source: Source, held_out: set[str]) -> None:
    """Leaves the rows to train on in `train`. `held_out`: checksums of the rows that are held out of all datasets."""
    reasons = [
        reason or (DUPLICATE if digest in held_out else "")
        for reason, digest in zip(source.facts["reason"], source.facts["digest"], strict=True)
    ]
    source.facts["reason"] = reasons
    if isinstance(source.train, Dataset) and reasons.count(DUPLICATE) < source.held_out:
        raise RuntimeError(f"{source.script_args.display_name}: the held-out rows were not found among the rows to train on")
    if isinstance(source.train, Dataset):
        source.train = source.train.select([index for index, reason in enumerate(reasons) if not reason])
    elif held_out:
        settings = {"settings": source.conversion.settings, "held_out": held_out}
        source.train = source.train.filter(_is_not_held_out, fn_kwargs=settings)


def training_rows(source: Source) -> Dataset | IterableDataset:
    """The converted rows to train on; those of a stream shuffled. `load` limits the rows of a stream."""
    script_args, rows = source.script_args, source.train
    if isinstance(rows, Dataset):
        is_of_mixture = bool(script_args.label)
        if script_args.max_samples and not is_of_mixture:  # `mix` limits the rows of all datasets together
            rows = rows.take(script_args.max_samples)
        if script_args.first_rows:  # of a preview, a rehearsal or a plan
            rows = rows.take(script_args.first_rows)
    rows = convert_all(rows, source.conversion)
    return shuffle(rows, script_args.seed) if isinstance(rows, IterableDataset) else rows


def evaluation_rows(source: Source) -> Dataset:
    """The converted rows to evaluate on."""
    script_args, rows = source.script_args, source.eval_rows
    if script_args.first_rows and isinstance(source.train, Dataset):
        rows = rows[: script_args.first_rows]
    finished = [part for row in rows[: script_args.max_eval_samples] for part in finish(row, source.conversion)]
    return Dataset.from_list(finished, features=source.conversion.features)


def convert_all(rows: Dataset | IterableDataset, conversion: Conversion) -> Dataset | IterableDataset:
    """Rows in the format of `conversion`."""
    if not conversion.format and not conversion.settings["column_map"]:
        return rows
    is_stream = isinstance(rows, IterableDataset)  # which does not decode what a function returns
    settings = {"conversion": dataclasses.replace(conversion, first=[], ignored=[]), "encodes": not is_stream, "code": CODE}
    options = {"remove_columns": conversion.columns, "features": conversion.features}
    if conversion.splits_answers:
        return rows.map(_convert_and_split, batched=True, batch_size=1, fn_kwargs=settings, **options)
    return rows.map(_convert, fn_kwargs=settings, **options)


def _convert(row: dict, conversion: Conversion, encodes: bool, code: str) -> dict:
    return finish(formats.convert(row, **conversion.settings), conversion, encodes)[0]


def _convert_and_split(batch: dict[str, list], conversion: Conversion, encodes: bool, code: str) -> dict[str, list]:
    """`batch` has one row."""
    row = formats.convert({name: values[0] for name, values in batch.items()}, **conversion.settings)
    rows = finish(row, conversion, encodes)
    return {name: [part[name] for part in rows] for name in rows[0]}


def finish(row: dict, conversion: Conversion, encodes: bool = True) -> list[dict]:
    """A converted row, or one for every answer, cut in a rehearsal, with all columns of the features."""
    rows = formats.split_answers(row) if conversion.splits_answers else [row]
    if conversion.cuts_texts:
        rows = [cut_row(part) for part in rows]
    return [formats.complete(part, conversion.features, encodes) for part in rows]


def cut_row(row: dict) -> dict:
    """A converted row with shorter texts, so that the short sequences of a rehearsal hold an answer too. JSON stays JSON."""
    tools = {"tools": cut_texts(row["tools"], MAX_TOOL_LETTERS)} if row.get("tools") else {}
    return {name: cut_texts(value, MAX_LETTERS) for name, value in row.items() if name != "tools"} | tools


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
    pieces = re.split(r"(</?think>)", value)
    return "".join(piece if index % 2 else piece[:letters] for index, piece in enumerate(pieces))


def digest_of(row: dict) -> str:
    """A checksum of a converted row, the same for turns in one column or in two."""
    turns = [turn for name in ("messages", "prompt", "completion") for turn in row.get(name) or [] if isinstance(turn, dict)]
    if turns:
        others = {name: value for name, value in row.items() if name not in ("messages", "prompt", "completion")}
        row = others | {"turns": [{key: value for key, value in turn.items() if key != "train"} for turn in turns]}
    return xxhash.xxh3_64_hexdigest(json.dumps(row, ensure_ascii=False, sort_keys=True, default=str).encode())


def _is_usable(row: dict, settings: dict[str, Any], keep: Callable[[dict], bool] | None) -> bool:
    if formats.convert(row, **settings) is None:
        return False
    return keep is None or bool(keep(formats.rename(row, settings["column_map"])))


def _is_not_held_out(row: dict, settings: dict[str, Any], held_out: set[str]) -> bool:
    return digest_of(formats.convert(row, **settings)) not in held_out


def usable_rows(
    rows: Dataset | IterableDataset, settings: dict[str, Any], keep: Callable[[dict], bool] | None, count: int
) -> list[dict]:
    """The first `count` rows that can be evaluated on, converted."""
    usable = (row for row in itertools.islice(rows, ROWS_TO_SEARCH + count) if _is_usable(row, settings, keep))
    return [formats.convert(row, **settings) for row in itertools.islice(usable, count)]


FACTS = ("reason", "digest", "kind", "shape")
LEFT_OUT, DUPLICATE = "left out by the recipe (`keep`)", "equal to a row that is held out"


def find_facts(
    rows: Dataset | IterableDataset, conversion: Conversion, keep: Callable[[dict], bool] | None, limit: int | None = None
) -> dict[str, Any]:
    """What every row is: why it is skipped ("" if it is not), a checksum, what its turns are, where they are; lists by name.

    Of a stream it looks at the first `limit` rows only; "complete" says whether these are all.
    """
    settings = {"settings": conversion.settings, "code": CODE}
    if isinstance(rows, Dataset):
        columns = Features({name: Value("string") for name in FACTS})
        facts = rows.map(_facts_of, fn_kwargs=settings, remove_columns=rows.column_names, features=columns)
        found = {name: facts[name][:] for name in columns}
        first = rows if keep else []
    else:
        first = list(itertools.islice(rows, None if limit is None else limit + 1))
        facts = [_facts_of(row, **settings) for row in first[:limit]]
        found = {name: [fact[name] for fact in facts] for name in FACTS}
    if keep is not None:
        for index, row in enumerate(itertools.islice(first, len(found["reason"]))):
            if not found["reason"][index] and not keep(formats.rename(row, conversion.settings["column_map"])):
                found["reason"][index] = LEFT_OUT
    return found | {"complete": isinstance(rows, Dataset) or len(first) == len(found["reason"]) > 0}


def _facts_of(row: dict, settings: dict[str, Any], code: str) -> dict[str, str]:
    """The FACTS of a row: why it is skipped ("" if it is not), its checksum, and what kind of conversation it is."""
    converted, reason = formats.examine(row, **settings)
    return {
        "reason": reason,
        "digest": digest_of(converted) if converted is not None else "",
        "kind": formats.kind_of_conversation(converted) if converted is not None else "",
        "shape": shape_of(converted) if converted is not None else "",
    }


def shape_of(row: dict) -> str:
    """The column of a converted row that has its answers, if these are turns; "" if not."""
    return next((name for name in ("messages", "completion") if isinstance(row.get(name), list)), "")


def summarize(source: Source) -> dict[str, Any]:
    """The content of data.json: what was read, skipped and found."""
    facts, held_out = source.facts, source.held_out
    reasons = Counter(reason for reason in facts["reason"] if reason)
    if facts["complete"]:  # the held-out rows themselves are not skipped
        reasons[DUPLICATE] = max(0, reasons[DUPLICATE] - held_out)
    turns = Counter(word for kind in facts["kind"] for word in kind.split(",")[0].split())
    skipped = {reason: number for reason, number in reasons.most_common() if number}
    rows = len(facts["reason"])
    first_skipped: dict[str, int] = {}
    for number, reason in enumerate(facts["reason"], 1):
        if reason in skipped and reason != DUPLICATE:  # the first of those may be the held-out row itself
            first_skipped.setdefault(reason, number)
    return {
        "name": source.script_args.display_name,
        "label": source.script_args.label,
        "rows": rows,
        "is_complete": source.is_complete and facts["complete"],  # False: these are the first rows only
        "skipped_rows": sum(skipped.values()),
        "skipped": skipped,
        "first_skipped": first_skipped,  # by reason, the number of the row in the training split, from 1
        "held_out": held_out,
        "trained_rows": rows - sum(skipped.values()) - held_out,
        "format": source.conversion.format,
        "ignored_columns": source.conversion.ignored,
        "turns": dict(turns.most_common()),
        "with_tools": sum(kind.endswith(", tools") for kind in facts["kind"]),
    }


def print_summary(script_args: ScriptArguments, summary: dict[str, Any], splits: dict[str, Any]) -> None:
    """Prints the skipped rows with the reasons, and how many are held out of the training split."""
    name = script_args.display_name
    if summary["skipped"]:
        first = {reason: f" (the first is row {number:,})" for reason, number in summary["first_skipped"].items()}
        reasons = ", ".join(f"{number:,} {reason}{first.get(reason, '')}" for reason, number in summary["skipped"].items())
        read = f"{summary['rows']:,} rows" if summary["is_complete"] else f"the first {summary['rows']:,} rows"
        print_once(f"{name}: {summary['skipped_rows']:,} of {read} skipped: {reasons}.")
    if summary["held_out"]:
        split = script_args.dataset_train_split
        others = [] if is_slice(split) else [other for other in splits if other != split]
        found = f" (other splits: {', '.join(others)})" if others else ""
        print_once(
            f"{name} has no split {script_args.dataset_test_split}{found}: {summary['held_out']} rows of {split} are held out "
            "for evaluation and never trained on."
        )


def open_dataset(script_args: ScriptArguments, streaming: bool) -> dict[str, Dataset | IterableDataset]:
    """All splits of the dataset. Raises UserError if it cannot be opened."""
    return reading.open_splits(script_args.dataset_name, script_args.dataset_config, streaming, script_args.text_rows)


def open_for_load(script_args: ScriptArguments) -> tuple[dict[str, Dataset | IterableDataset], bool]:
    """The splits or slices for `load` by name, and whether they have all their rows.

    All rows are opened for a run, of small files, and of a stream. Of other data a preview, a rehearsal and a plan read only the
    first rows of the two splits that they use. Without slices they download no more than these rows.
    """
    if not script_args.first_rows or reading.is_small(script_args.dataset_name):
        return open_dataset(script_args, script_args.dataset_streaming), True
    if is_slice(script_args.dataset_train_split) or is_slice(script_args.dataset_test_split):  # a stream cannot be sliced
        chosen = choose_splits(script_args, open_dataset(script_args, streaming=False))
        names = (script_args.dataset_train_split, script_args.dataset_test_split)
        return {name: rows.take(script_args.first_rows) for name, rows in zip(names, chosen, strict=True) if rows}, False
    splits = open_dataset(script_args, streaming=True)
    names = (script_args.dataset_train_split, evaluation_split(script_args, splits))
    streams = {name: rows for name, rows in splits.items() if name in names}
    if script_args.dataset_streaming:
        return streams, True
    first = {}
    for name, rows in streams.items():
        first[name] = Dataset.from_list(list(rows.take(script_args.first_rows)), features=rows.features)
    return first, False


def count_training_rows(script_args: ScriptArguments) -> int | None:
    """Rows of the training split, of a mixture those of an epoch; None for a stream that does not say."""
    if script_args.mixture:
        sizes = [count_training_rows(one) for one in each_dataset(script_args)]
        return sum(share(script_args, sizes)) if all(sizes) and not script_args.dataset_streaming else None
    is_in_memory = reading.is_local(script_args.dataset_name) and not script_args.dataset_streaming
    if is_in_memory or is_slice(script_args.dataset_train_split):
        return len(choose_splits(script_args, open_dataset(script_args, streaming=False))[0])
    rows = open_dataset(script_args, streaming=True)[script_args.dataset_train_split]
    return getattr((rows.info.splits or {}).get(script_args.dataset_train_split), "num_examples", None)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hides the progress bars of `datasets`: an error of a check is one line."""
    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()


@without_progress_bars()
def check_dataset(script_args: ScriptArguments) -> list[dict]:
    """Raises UserError unless every split that is used exists and has rows in a fitting format, the same in all datasets.

    Returns some converted rows of the training splits, of small files one with every kind of turns; [] if nothing can be checked,
    offline.
    """
    for name in ("max_samples", "max_eval_samples"):
        if getattr(script_args, name) is not None and getattr(script_args, name) < 1:
            raise UserError(f"--{name} is {getattr(script_args, name)}, expected 1 or more")
    check_column_map(script_args)
    rows, found, unmapped = [], [], set(script_args.column_map or {})
    for one in each_dataset(script_args):
        conversions, some = check_splits(one)
        rows += some
        found += [(conversion.format, one.display_name) for conversion in conversions]
        unmapped -= {old for conversion in conversions for old in conversion.settings["column_map"] or {}}
    if unmapped and found:
        raise UserError(f"--column_map: no dataset has a column {sorted(unmapped)[0]}")
    check_same_format(found)
    return rows


def check_same_format(found: list[tuple[str, str]]) -> None:
    """Raises UserError unless all datasets have the same format. `found`: formats and names."""
    by_format = dict(found)
    if len(by_format) > 1:
        kinds = ", ".join(f"{name} has {formats.DESCRIPTIONS[format]}" for format, name in by_format.items())
        raise UserError(f"--dataset_name: {kinds}: a run needs datasets of one kind")


def check_splits(script_args: ScriptArguments) -> tuple[list[Conversion], list[dict]]:
    """See `check_dataset`; of one dataset. Returns how the training splits are converted, and some converted rows."""
    is_local = reading.is_local(script_args.dataset_name)
    if HF_HUB_OFFLINE and script_args.dataset_streaming and not is_local:
        return [], []  # only `datasets` can tell what its cache holds
    # Streaming downloads no more than it reads. Offline, only a dataset that is cached as a whole opens.
    is_small = reading.is_small(script_args.dataset_name)
    splits = open_dataset(script_args, streaming=not is_small and (is_local or not HF_HUB_OFFLINE))
    train, test = script_args.dataset_train_split, evaluation_split(script_args, splits)
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
            find_conversion(script_args, splits[name])
    conversions, rows = [], []
    for name in splits_of(train):
        conversion = find_conversion(script_args, splits[name])
        conversions.append(conversion)
        rows += conversion.first
        if is_small and conversion.format == "messages":
            rows += one_of_every_kind(splits[name], conversion)
    return conversions, rows


def one_of_every_kind(rows: Dataset, conversion: Conversion) -> list[dict]:
    """Converted rows that have all kinds of turns that there are: calls, thoughts, tools, several answers …"""
    seen, indices = set(), []
    for index, kind in enumerate(find_facts(rows, conversion, None)["kind"]):
        words = kind.replace(",", "").split()
        key = (frozenset(words), sum(word.startswith("assistant") for word in words) > 1)
        if words and key not in seen and len(indices) < 100:
            seen.add(key)
            indices.append(index)
    return [formats.convert(rows[index], **conversion.settings) for index in indices]


def check_column_map(script_args: ScriptArguments) -> None:
    """Raises UserError unless --column_map has names of columns as keys and values."""
    mapping = script_args.column_map
    known = (*COLUMNS, *formats.TOOLS, formats.TEMPLATE_ARGUMENTS, script_args.text_field)
    if mapping is None:
        return
    if not isinstance(mapping, dict) or not all(isinstance(new, str) for new in mapping.values()):
        raise UserError(f"--column_map is {mapping!r}, expected names of columns and their new names")
    for new in mapping.values():
        if new not in known and script_args.dataset_formats:
            raise UserError(f"--column_map: {new} is none of the columns that are read: {', '.join(known)}")


def find_conversion(script_args: ScriptArguments, rows: Dataset | IterableDataset) -> Conversion:
    """How rows are converted: to the first of `dataset_formats` into which one of the first rows can be converted.

    Raises UserError if no row can be converted.
    """
    name, accepted = script_args.display_name, script_args.dataset_formats
    with hub_errors("dataset", name):
        first = list(rows.take(ROWS_TO_CHECK))
    if not first:
        raise UserError(f"dataset {name}: it is empty: no rows in {rows.split or script_args.dataset_train_split}")
    columns = rows.column_names or list(first[0])
    settings = {
        "format": "",
        "text_field": script_args.text_field,
        "column_map": find_column_map(script_args, columns),
        "structs": tuple(column for column, kind in (rows.features or {}).items() if has_struct(kind)),
        "as_messages": False,
    }
    if not accepted:
        return Conversion(
            settings=settings, columns=columns, features=None, ignored=[], first=first, splits_answers=False, cuts_texts=False
        )
    # If nothing can be used of the first rows, some of the following ones may be complete.
    for start, end in ((0, ROWS_TO_CHECK), (ROWS_TO_CHECK, ROWS_TO_SEARCH)):
        with hub_errors("dataset", name):
            candidates = first if start == 0 else list(itertools.islice(rows, start, end))
        for format in accepted:
            settings["format"] = format
            usable = (new for row in candidates if (new := formats.convert(row, **settings)))
            converted = list(itertools.islice(usable, ROWS_TO_CHECK))
            if converted:
                if script_args.split_conversations and format != "messages":
                    raise UserError(f"--split_conversations is for conversations, but {name} has none: leave out the flag")
                conversion = Conversion(
                    settings=settings,
                    columns=columns,
                    features=None,
                    ignored=find_ignored_columns(candidates[:ROWS_TO_CHECK], columns, settings),
                    first=converted,
                    splits_answers=script_args.split_conversations,
                    cuts_texts=script_args.cuts_texts,
                )
                conversion.features = features_for(script_args, conversion)
                return conversion
    raise UserError(explain_no_format(script_args, first))


def find_column_map(script_args: ScriptArguments, columns: list[str]) -> dict[str, str] | None:
    """--column_map for a dataset with these columns. Raises UserError if the dataset lacks one of them."""
    column_map = script_args.column_map
    if column_map and script_args.label:  # each dataset of a mixture has some of these columns
        return {old: new for old, new in column_map.items() if old in columns} or None
    for old in column_map or {}:
        if old not in columns:
            raise UserError(f"--column_map: {script_args.display_name} has no column {old}, it has {', '.join(columns)}")
    return column_map


def explain_no_format(script_args: ScriptArguments, first: list[dict]) -> str:
    """The error message for a dataset whose first rows have none of the formats of the recipe."""
    accepted, text_field = script_args.dataset_formats, script_args.text_field
    wanted = " or ".join(formats.DESCRIPTIONS[format] for format in accepted)
    mismatch = formats.explain_mismatch(first, accepted, text_field, script_args.column_map)
    advice = ""
    if not script_args.column_map and (mapping := formats.suggest_column_map(first, accepted, text_field)):
        advice = f", or the flag --column_map '{json.dumps(mapping)}'"
    return f"--dataset_name: {script_args.display_name} {mismatch}; this recipe needs {wanted}{advice}"


def features_for(script_args: ScriptArguments, conversion: Conversion) -> Features | None:
    """The features of converted rows."""
    mapped = script_args.column_map or {}
    columns = [mapped.get(column, column) for column in conversion.columns]
    first = {"messages": None} if conversion.settings["as_messages"] or conversion.splits_answers else conversion.first[0]
    return formats.stored_features(conversion.format, columns, first, script_args.text_field)


def has_struct(kind: Any) -> bool:
    """Whether a feature is an Arrow struct, or a list of them."""
    if isinstance(kind, Json | Value):
        return False
    return isinstance(kind, dict) or has_struct(getattr(kind, "feature", kind[0] if isinstance(kind, list) else Value("null")))


def find_ignored_columns(rows: list[dict], columns: list[str], settings: dict[str, Any]) -> list[str]:
    """The columns that hold something and change nothing in the converted rows."""
    ignored = []
    for column in columns:
        filled = [row for row in rows if row.get(column) not in (None, "", [], {})]
        others = [{name: value for name, value in row.items() if name != column} for row in filled]
        changes = (
            formats.examine(row, **settings) != formats.examine(other, **settings)
            for row, other in zip(filled, others, strict=True)
        )
        if filled and not any(changes):
            ignored.append(column)
    return ignored


def tokens_of_run(script_args: ScriptArguments, training_args: TrainingArguments, processes: int) -> int:
    """How many tokens a run reads of a dataset."""
    rows = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * processes
    tokens = script_args.max_tokens or training_args.max_steps * rows * (getattr(training_args, "max_length", None) or 1024)
    return math.ceil(tokens * script_args.weight)


def prepared_folder(script_args: ScriptArguments) -> Path:
    """Where --prepare keeps the files of a stream, in a folder for every number of files."""
    kind = repr([script_args.dataset_name, script_args.dataset_config, script_args.dataset_train_split])
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    return Path(HF_HOME, "streams", f"{script_args.dataset_name.replace('/', '--')[-80:]}-{digest}")


def use_prepared_files(script_args: ScriptArguments, training_args: TrainingArguments, processes: int) -> None:
    """Reads a stream from the files that --prepare has downloaded, if they are enough for this run."""
    if not script_args.dataset_streaming or reading.is_local(script_args.dataset_name):
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
