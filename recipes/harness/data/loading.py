"""`load`: from --dataset_name to the rows to train on and to evaluate on.

Every row is read and converted once, to a row with FACTS (see conversion.py); then rows are chosen by these facts. Of data in
memory the first process does it, and the others read the result from the cache of `datasets`.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.data import formats, reading, turns
from harness.data.conversion import (
    BAD_ANSWER,
    DIGEST,
    FACTS,
    HAS,
    KIND,
    PLACE,
    REASON,
    Conversion,
    FirstRows,
    PlacedRow,
    Shape,
    check_images_can_be_used,
    converted_of,
    digest_of,
    examine,
    features_of_examined,
    find_conversion,
    images_of,
    shape_of,
    usable_rows,
    versions_of_images,
)
from harness.data.held_out import hold_out, hold_out_of_stream
from harness.data.images import OF_IMAGE
from harness.data.mixture import mix, share
from harness.data.reading import TextFiles, make_once
from harness.data.settings import DataSettings, Source, evaluation_split
from harness.data.stream_rows import shuffle
from harness.data.summary import DUPLICATE, add_summaries, print_splits, print_summary, summarize
from harness.folder import DATA, has_trained, read_json, write_json
from harness.hub import hub_errors
from harness.messages import UserError, is_first_process, print_once

from datasets import Dataset, Features, IterableDataset, interleave_datasets
from datasets.features.features import require_decoding
from datasets.fingerprint import Hasher, generate_fingerprint

PREVIEWED_ROWS = 400  # of each split, for a preview
REHEARSED_ROWS = 500  # likewise, for a rehearsal or plan
MOST_KINDS = 200  # of conversations, of which one each is checked
MOST_SKIPPED = 10_000  # rows of a split for evaluation that are read besides those that are evaluated on
UNUSABLE = "rows_with_unusable_images"  # in data.json
# Columns that not all rows of a format have, and the columns of a file that they come from.
OPTIONAL = {"tools": {*turns.TOOLS}, formats.TEMPLATE_ARGUMENTS: {formats.TEMPLATE_ARGUMENTS}}
Rows = Dataset | IterableDataset | TextFiles  # of a split


@dataclass(frozen=True)
class Opened:
    """A dataset that is opened: how its rows are converted, and what was found out about them."""

    source: Source
    splits: list[str]  # all there are
    test_split: str  # to evaluate on, whether there is one or not
    conversion: Conversion
    first: FirstRows
    rows: Dataset | IterableDataset  # of the training split: examined; of a recipe without formats as they are
    facts: dict[str, list[str]]  # of all rows in memory, of the first ones of a stream
    is_complete: bool  # `facts` has all rows that there are
    later_columns: str  # that rows of a stream can have, although the first ones do not
    eval_rows: list[dict] | None  # converted; None if there is no split for evaluation

    @property
    def name(self) -> str:
        return self.source.display_name


def load(data: DataSettings, keep: Callable[[dict], bool] | None = None) -> tuple[Dataset | IterableDataset, Dataset]:
    """Loads the rows to train on and the rows to evaluate on.

    Args:
        data: which rows are read.
        keep: a function of a row; rows for which it returns False are dropped.

    Returns:
        `(train_dataset, eval_dataset)`, rows in the first format of `dataset_formats` that they can be converted to, see
        formats.py. Rows without a text or an answer are skipped; how many and why is printed, and written into `data.json`.

        The evaluation rows are the first `max_eval_samples` of the split for evaluation. Without such a split as many are
        held out of the training split; with all rows that equal them they are at most a tenth of it.

        Of several datasets (`dataset_weights`) the training rows are mixed by weight, see `mix`, and `eval_dataset` has
        the evaluation rows of all.
    """
    if not data.sources:
        raise UserError("--dataset_name is missing: pass a Hub ID, a folder or a file")
    opened = [open_source(data, source, keep) for source in data.sources]
    if missing := set(data.column_map or {}).difference(*(one.first.columns for one in opened)):
        raise UserError(f"--column_map: no dataset has a column {min(missing)}")
    check_same_kind(opened)
    check_has_images(opened)
    if data.check_conversations and is_first_process():
        examples = []
        for one in opened:
            has_all = isinstance(one.rows, Dataset) and one.conversion.format
            examples += one_of_every_kind(one.rows) if has_all else one.first.converted
        data.check_conversations(examples)
    held_out = [choose_held_out(data, one) for one in opened]
    digests = set()
    for _, of_rows in held_out:
        digests.update(of_rows)
    has: set[str] = set()
    for one in opened:
        has.update(one.facts[HAS], [one.later_columns], *(one.eval_rows or []))
    shape = shape_of(has, opened[0].conversion.stored, data)

    rows = []
    summaries = []
    for one, (chosen, _) in zip(opened, held_out, strict=True):
        facts = mark_held_out(one.facts, digests)
        summaries.append(summary := summarize_source(one, facts, len(chosen)))
        print_summary(summary, one.source.train_split, one.test_split, one.splits)
        rows.append(training_rows(data, one, facts, digests, shape))
    train = rows[0]
    summary = summaries[0]
    if data.is_mixture:
        train = mix(data, rows)
        for source in data.sources:
            print_once(f"{source.display_name}: {source.weight:.1%} of the rows.")
        summary = add_summaries(summaries)
    evaluated = []
    for one, (chosen, _) in zip(opened, held_out, strict=True):
        eval_rows = chosen if one.eval_rows is None else one.eval_rows
        evaluated.append(evaluation_rows(data, one, eval_rows, shape))
    in_turn = evaluated[0]
    if data.is_mixture:
        in_turn = interleave_datasets(evaluated, stopping_strategy="all_exhausted_without_replacement")
    summary["loaded_eval_rows"] = len(in_turn)
    if isinstance(train, Dataset):
        summary["loaded_rows"] = len(train)
    if data.output_dir and is_first_process():
        folder = Path(data.output_dir)
        if "images" in data.formats:
            summary[UNUSABLE] = rows_with_unusable_images(opened)
            # Else a resumed run would have another order of rows, and evaluate on rows that it has trained on.
            if has_trained(folder) and read_json(folder / DATA).get(UNUSABLE, summary[UNUSABLE]) != summary[UNUSABLE]:
                raise UserError(
                    "--dataset_name: other rows than at the start of the run cannot be used because of an image: restore the "
                    "image files as they were, or choose another --output_dir"
                )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / DATA, summary)
    if isinstance(train, IterableDataset):
        train = limit_stream(data, train)
    elif data.is_read_in_order:
        train = train.shuffle(seed=data.seed)
    return of_date(train, data), of_date(in_turn, data)


def rows_with_unusable_images(opened: list[Opened]) -> list[str]:
    """For each dataset a checksum of which rows are skipped because of an image."""
    checksums = []
    for one in opened:
        rows = [index for index, reason in enumerate(one.facts[REASON]) if reason.startswith(OF_IMAGE)]
        checksums.append(digest_of({"rows": rows}))
    return checksums


def open_source(data: DataSettings, source: Source, keep: Callable[[dict], bool] | None) -> Opened:
    """Opens a dataset, and examines its rows, of a stream the first ones. `keep`: see `load`."""
    is_whole = not source.first_rows or reading.is_small(source.name)
    # Of large data a preview, a rehearsal and a plan read the first rows only. They download no more than these.
    limit = 0 if is_whole else source.first_rows
    splits = open_dataset(source, streaming=data.streaming or limit > 0)
    if data.formats:
        splits = {split: without_decoding(rows, "images" in data.formats) for split, rows in splits.items()}
    test = evaluation_split(source, splits, data.needs_test_split)
    raw = splits[source.train_split]
    conversion, first = find_conversion(data, source, placed(raw, source, source.train_split), features_of(raw))
    first = replace(first, ignored=print_columns(source, conversion, first))
    conversion = replace(conversion, keep=keep)
    if not conversion.format:  # rows stay as they are, except that columns get other names
        splits = {split: rename_columns(rows, conversion, data.streaming) for split, rows in splits.items()}
        conversion = replace(conversion, column_map=None)
    if data.streaming:
        rows = examine_stream(splits[source.train_split], conversion, source, first)
        test_rows = splits.get(test)
        facts, is_complete = facts_of_stream(rows, conversion, source, None if reading.is_small(source.name) else PREVIEWED_ROWS)
    else:
        rows, test_rows, facts = examine_in_memory(splits, test, conversion, source, limit)
        is_complete = not limit
    counts = {source.train_split: len(facts[REASON]) if is_complete else number_of_rows(raw, source.train_split)}
    if test_rows is not None:
        counts[test] = number_of_rows(test_rows if is_complete else splits[test], test)
    print_splits(source, counts)
    if any(kind.endswith(BAD_ANSWER) for kind in facts[KIND]):
        raise UserError(
            f"--dataset_name: {source.display_name} has rows whose `label` is false, bad answers for a KTO recipe "
            "(`trl.KTOTrainer`): to train on the good ones, pass a dataset without these rows, or leave them out with `keep` of "
            "the recipe's `load`"
        )
    eval_rows = None
    if test_rows is not None:
        count = source.eval_rows_of_run or data.max_eval_samples
        searched = itertools.islice(placed(test_rows, source, test), MOST_SKIPPED + count)
        eval_rows = [row for _, row in itertools.islice(usable_rows(searched, conversion), count)]
        if not eval_rows:
            condition = " that the recipe keeps (`keep`)" if keep else ""
            raise UserError(
                f"--dataset_test_split: no row of {source.display_name} in this split{condition} has a text or answer: pass "
                "another split"
            )
    features = features_of(raw)
    later = ""
    if isinstance(rows, IterableDataset) and not is_complete:
        for name, columns in OPTIONAL.items():
            if name in conversion.stored and (features is None or columns & features.keys()):
                later += f"{name} "
    return Opened(source, list(splits), test, conversion, first, rows, facts, is_complete, later, eval_rows)


def open_dataset(source: Source, streaming: bool) -> dict[str, Rows]:
    """All splits of a dataset. Raises UserError if it cannot be opened."""
    return reading.open_splits(source.name, source.config, streaming, source.text_rows)


def without_decoding(rows: Rows, keeps_nested: bool) -> Rows:
    """Rows whose images, audio and videos stay as they are: a recipe for texts needs none, and they can be URLs to request.

    `keeps_nested`: also in lists and objects, which `datasets` copies to change how they are read.
    """
    for name, feature in (features_of(rows) or {}).items():
        if not require_decoding(feature) or "Json(" in repr(feature):
            continue
        if isinstance(rows, IterableDataset):
            return rows.decode(False)
        if keeps_nested or hasattr(feature, "decode"):
            rows = rows.cast_column(name, rows.to_iterable_dataset().decode(False).features[name])
        else:
            rows = rows.remove_columns(name)
    return rows


def one_of_every_kind(examined: Dataset) -> list[PlacedRow]:
    """A conversation with each order of turns that there is: calls, thoughts, tools, several answers …; and with each part."""
    first_of_kind: dict[str, int] = {}
    first_of_part: dict[str, int] = {}  # a role, calls, untrained, the name of a key …
    for index, kind in enumerate(examined[KIND][:]):
        if kind and kind not in first_of_kind:
            for part in re.split(r"[+, ]+", kind):
                first_of_part.setdefault(part, index)
            if len(first_of_kind) < MOST_KINDS:
                first_of_kind[kind] = index
    chosen = {*first_of_kind.values(), *first_of_part.values()}
    return [(row[PLACE], converted_of(row)) for row in examined.select(sorted(chosen))]


def features_of(rows: Rows) -> Features | None:
    return None if isinstance(rows, TextFiles) else rows.features


def placed(rows: Rows, source: Source, split: str) -> Iterator[PlacedRow]:
    """Rows with their places in words: a line of a file, or the number of a row of a split."""
    if isinstance(rows, TextFiles):
        yield from rows
        return
    with hub_errors("dataset", source.display_name):
        for number, row in enumerate(rows, 1):
            yield f"{source.display_name}, row {number} of {split}", row


def number_of_rows(rows: Any, split: str) -> int | None:
    """The rows of a split, None if it does not say."""
    if isinstance(rows, Dataset):
        return len(rows)
    info = (rows.info.splits or {}).get(split) if isinstance(rows, IterableDataset) else None
    return getattr(info, "num_examples", None)


def rename_columns(rows: Rows, conversion: Conversion, streaming: bool) -> Dataset | IterableDataset:
    """The rows of a recipe without formats, with the names of --column_map."""
    rows = rows.as_dataset(streaming) if isinstance(rows, TextFiles) else rows
    new_names = conversion.column_map or {}
    replaced = [name for name in rows.column_names or [] if name in new_names.values() and name not in new_names]
    return rows.remove_columns(replaced).rename_columns(new_names) if new_names else rows


def print_columns(source: Source, conversion: Conversion, first: FirstRows) -> list[str]:
    """Prints and returns which columns are ignored; of preference data, another message says it of `rejected`."""
    complete_row = formats.rename(dict.fromkeys(first.columns, True), conversion.column_map)
    ignored = list(first.ignored)
    if conversion.format in formats.PREFERENCE_FORMATS and formats.is_preference(complete_row):
        print_once(f"{source.display_name} is preference data: `chosen` is trained on, `rejected` is ignored.")
        if "rejected" in ignored:
            ignored.remove("rejected")
    if ignored:
        print_once(f"{source.display_name}: ignored columns: {', '.join(ignored)}.")
    return ignored


def examine_in_memory(
    splits: dict[str, Rows], test: str, conversion: Conversion, source: Source, limit: int
) -> tuple[Dataset, Dataset | None, dict[str, list[str]]]:
    """The rows of the training split, those of the split for evaluation (None if there is none), and the facts of the former.

    The rows are examined; those of a recipe without formats stay as they are. `limit`: read only the first rows; 0: all.
    """

    def read(split: str) -> Dataset:
        rows = splits[split]
        if isinstance(rows, TextFiles):
            return examine_all(rows, conversion, source, split, limit)
        if isinstance(rows, IterableDataset):
            with hub_errors("dataset", source.display_name):
                return Dataset.from_list(list(rows.take(limit)), features=rows.features)
        return rows.take(limit) if limit else rows

    train = source.train_split
    chosen = read(train)
    chosen_test = read(test) if test in splits else None
    examined = chosen if REASON in chosen.column_names else examine_all(chosen, conversion, source, train, limit)
    facts = {name: examined[name][:] for name in FACTS if name != PLACE}
    return examined if conversion.format else chosen, chosen_test, facts


def examine_all(rows: Dataset | TextFiles, conversion: Conversion, source: Source, split: str, limit: int = 0) -> Dataset:
    """The examined rows. All of them are kept in the cache, `limit` of them in memory."""

    def examined() -> Iterator[dict]:
        for place, row in placed(rows, source, split):
            yield examine(place, row, conversion)

    features = features_of_examined(conversion)
    if limit:
        return Dataset.from_list(list(itertools.islice(examined(), limit)), features=features)
    version = rows.versions() if isinstance(rows, TextFiles) else [generate_fingerprint(rows)]
    if conversion.format == "images":
        _, first = next(images_of(placed(rows, source, split), conversion), ("", {}))
        if isinstance(rows, TextFiles) or first.get("bytes") is None:  # else all have the bytes, which would be read once more
            version += versions_of_images(placed(rows, source, split), conversion)
    keep = Hasher.hash(conversion.keep)  # as `Dataset.filter` does
    with hub_errors("dataset", source.display_name):
        return make_once(examined, features, [version, source.display_name, split, replace(conversion, keep=None), keep])


def examine_stream(
    rows: IterableDataset | TextFiles, conversion: Conversion, source: Source, first: FirstRows
) -> IterableDataset:
    """The rows of a stream, examined; those of a recipe without formats as they are."""
    if not conversion.format:
        return rows
    if isinstance(rows, TextFiles):
        settings = {"conversion": conversion}
        return rows.stream().map(_examine_placed, fn_kwargs=settings, remove_columns=["place", "row"])
    settings = {"conversion": conversion, "name": source.display_name}
    return rows.map(_examine_example, fn_kwargs=settings, remove_columns=first.columns)


def _examine_placed(example: dict, conversion: Conversion) -> dict:
    return examine(example["place"], example["row"], conversion)


def _examine_example(example: dict, conversion: Conversion, name: str) -> dict:
    """`name`: of the dataset."""
    return examine(f"{name}, a row that begins with {str(dict(example))[:100]}", example, conversion)


def facts_of_stream(
    rows: IterableDataset, conversion: Conversion, source: Source, limit: int | None
) -> tuple[dict[str, list[str]], bool]:
    """The facts of the first `limit` rows, and whether these are all."""
    with hub_errors("dataset", source.display_name):
        first = list(itertools.islice(rows, None if limit is None else limit + 1))
    facts: dict[str, list[str]] = defaultdict(list)
    for row in first[:limit]:
        examined = row if REASON in row else examine(source.display_name, row, conversion)
        for name in FACTS:
            facts[name].append(examined[name])
    return facts, len(first) == len(facts[REASON]) > 0


def check_same_kind(opened: list[Opened]) -> None:
    """Raises UserError unless all datasets have the same format, or for a recipe without formats the same columns."""
    check_same_format([(one.conversion.format, one.name) for one in opened])
    for one in opened:
        if not one.conversion.format and one.rows.features != opened[0].rows.features:
            raise UserError(
                f"--dataset_name: {opened[0].name} and {one.name} have different columns: all datasets of a run need the same "
                "columns"
            )


def check_has_images(opened: list[Opened]) -> None:
    """Raises UserError if a recipe for images would train on texts only, because no row has an image where one is read from.

    Prints a warning if only the first rows are known, and none of them has one.
    """
    for one in opened:
        if one.conversion.format != "images" or any(formats.WITH_IMAGES in kind for kind in one.facts[KIND]):
            return
    columns = []
    for one in opened:
        check_images_can_be_used(one.name, one.facts[REASON])
        columns.append(f"{one.name} has the columns {', '.join(one.first.columns)}")
    if not all(one.is_complete for one in opened):
        print_once("warning: none of the first rows has an image.")
        return
    raise UserError(
        f"--dataset_name: no row that can be used has an image: {'; '.join(columns)}. Images are read from a column images or "
        "image, and from parts of the type image. If a column has another name: "
        """--column_map '{"COLUMN": "images"}'. To train on texts, use another recipe"""
    )


def check_same_format(found: list[tuple[str, str]]) -> None:
    """Raises UserError unless all datasets have the same format. `found`: formats and names."""
    for format, name in found:
        if format != found[0][0]:
            kinds = f"{found[0][1]} has the format {found[0][0]}, {name} has {format}"
            raise UserError(f"--dataset_name: {kinds}: a run needs datasets of one kind")


def choose_held_out(data: DataSettings, one: Opened) -> tuple[list[dict], list[str]]:
    """Without a split for evaluation, the rows that are held out of the training split, converted, and their checksums."""
    if one.eval_rows is not None:
        return [], []
    count = one.source.eval_rows_of_run or data.max_eval_samples
    if isinstance(one.rows, Dataset):
        rows = list(one.rows.select(hold_out(indices_of_usable(one.facts), one.facts[DIGEST], count, one.name)))
    else:
        rows = hold_out_of_stream(usable_stream(one), count, one.name, one.is_complete)
    converted = []
    digests = []
    for row in rows:
        converted.append(converted_of(row) if one.conversion.format else row)
        digests.append(digest_of_loaded(row))
    return converted, digests


def indices_of_usable(facts: dict[str, list[str]]) -> list[int]:
    return [index for index, reason in enumerate(facts[REASON]) if not reason]


def digest_of_loaded(row: dict) -> str:
    """The checksum of an examined row, or of one that stays as it is."""
    return row[DIGEST] if DIGEST in row else digest_of(row)


def usable_stream(one: Opened) -> IterableDataset:
    """The rows of a stream that are not skipped."""
    if one.conversion.format:
        return one.rows.filter(_is_usable)
    return one.rows.filter(one.conversion.keep) if one.conversion.keep else one.rows


def _is_usable(row: dict) -> bool:
    return not row[REASON]


def _is_not_held_out(row: dict, held_out: set[str]) -> bool:
    return digest_of_loaded(row) not in held_out


def summarize_source(one: Opened, facts: dict[str, list[str]], held_out: int) -> dict[str, Any]:
    """The content of data.json for a dataset."""
    return {
        "name": one.name,
        "is_complete": one.is_complete,  # False: these are the first rows only
        "format": one.conversion.format,
        "ignored_columns": one.first.ignored,
        **summarize(facts, isinstance(one.rows, Dataset) or one.is_complete, held_out),
    }


def training_rows(
    data: DataSettings, one: Opened, facts: dict[str, list[str]], held_out: set[str], shape: Shape
) -> Dataset | IterableDataset:
    """The rows to train on; those of a stream shuffled. `held_out`: checksums of the rows that are held out of all datasets."""
    source = one.source
    rows = one.rows
    if isinstance(rows, Dataset):
        indices = indices_of_usable(facts)
        if data.max_samples and not data.is_mixture:  # `mix` limits the rows of all datasets together
            indices = indices[: data.max_samples]
        if source.first_rows:  # a preview, a rehearsal and a plan load the first ones
            indices = indices[: source.first_rows]
        rows = rows.select(indices)
    else:
        rows = usable_stream(one)
        rows = rows.filter(_is_not_held_out, fn_kwargs={"held_out": held_out}) if held_out else rows
    if not list(rows.take(1)):
        raise UserError(
            f"--dataset_name: no row of {one.name} is left to train on: all are without a text or answer, left out by `keep` of "
            "the recipe, or equal to a row that is held out for evaluation"
        )
    if one.conversion.format:
        rows = finish(rows, one, shape)
    return shuffle(rows, data.seed) if isinstance(rows, IterableDataset) else rows


def of_date(rows: Dataset | IterableDataset, data: DataSettings) -> Dataset | IterableDataset:
    """The same rows. If the chat template prints the date, the tokens of another day in the cache are not those of these rows."""
    if not data.template_date or isinstance(rows, IterableDataset):
        return rows
    return rows.select(range(len(rows)), new_fingerprint=Hasher.hash([generate_fingerprint(rows), data.template_date]))


def finish(rows: Dataset | IterableDataset, one: Opened, shape: Shape) -> Dataset | IterableDataset:
    """Examined rows in the shape of the training rows."""
    source = one.source
    if isinstance(rows, IterableDataset):
        stored = [*features_of_examined(one.conversion)]
        settings = {"shape": shape, "cuts_texts": source.cuts_texts}
        options = {"fn_kwargs": settings, "remove_columns": stored, "features": shape.features}
        return rows.map(_finish_batch, batched=True, batch_size=1, **options)
    if shape.drops_marks and any("+untrained" in kind for kind in one.facts[KIND]):
        raise UserError(shape.drops_marks)
    joins_completions = "messages" in shape.features and any("completion" in has.split() for has in one.facts[HAS])
    if not (source.cuts_texts or shape.splits_answers or shape.has_text_arguments or joins_completions):
        return rows.select_columns(list(shape.features))

    def finished() -> Iterator[dict]:
        for row in rows:
            yield from shape.finish(converted_of(row), source.cuts_texts)

    return make_once(finished, shape.features, [generate_fingerprint(rows), shape, source.cuts_texts])


def _finish_batch(batch: dict[str, list], shape: Shape, cuts_texts: bool) -> dict[str, list]:
    """`batch` has one row."""
    examined = {name: values[0] for name, values in batch.items()}
    finished: dict[str, list] = {name: [] for name in shape.features}
    for row in shape.finish(converted_of(examined), cuts_texts):
        for name in shape.features:
            finished[name].append(row[name])
    return finished


def limit_stream(data: DataSettings, stream: IterableDataset) -> Dataset | IterableDataset:
    """The first `max_samples` rows; with epochs they are kept in memory."""
    stream = stream.take(data.max_samples) if data.max_samples else stream
    if not data.keeps_samples:
        return stream
    kept = list(itertools.islice(stream, data.sources[0].first_rows or None))
    if stream.features:
        kept = [formats.complete(row, stream.features) for row in kept]
    rows = Dataset.from_list(kept, features=stream.features)
    print_once(f"{data.display_name}: {len(rows):,} rows of the stream are kept in memory, for every epoch the same.")
    return rows


def evaluation_rows(data: DataSettings, one: Opened, rows: list[dict], shape: Shape) -> Dataset:
    """The rows to evaluate on, of converted ones. A preview, a rehearsal and a plan of data in memory load the first ones."""
    rows = rows[: data.max_eval_samples]
    if one.source.first_rows and isinstance(one.rows, Dataset):
        rows = rows[: one.source.first_rows]
    if not one.conversion.format:
        return Dataset.from_list(rows, features=one.rows.features)
    finished = []
    for row in rows:
        finished += shape.finish(row, one.source.cuts_texts)
    return Dataset.from_list(finished, features=shape.features)


def mark_held_out(facts: dict[str, list[str]], digests: set[str]) -> dict[str, list[str]]:
    """The facts with a reason for the rows that are held out, or equal to one of these."""
    reasons = list(facts[REASON])
    for index, digest in enumerate(facts[DIGEST]):
        if digest in digests and not reasons[index]:
            reasons[index] = DUPLICATE
    return facts | {REASON: reasons}


def count_training_rows(data: DataSettings) -> int | None:
    """Rows of the training split, of a mixture those of an epoch; None for a stream that does not say."""
    sizes = [_count_rows(source, data.streaming) for source in data.sources]
    if data.is_mixture:
        return sum(share(data, sizes)) if all(sizes) and not data.streaming else None
    return sizes[0]


def _count_rows(source: Source, streaming: bool) -> int | None:
    is_in_memory = reading.is_local(source.name) and not streaming
    rows = open_dataset(source, streaming=not is_in_memory)[source.train_split]
    return sum(1 for _ in rows) if isinstance(rows, TextFiles) and not streaming else number_of_rows(rows, source.train_split)
