"""`load`: from --dataset_name to the rows to train on and to evaluate on. It alone opens data: read, convert, hold out, mix.

Every row is read and converted once, to a row with FACTS (see conversion.py); then rows are chosen by these facts. Of data in
memory the first process does it, and the others read the result from the cache of `datasets`.
"""

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import runs
from harness.compat.datasets import store_json_exactly
from harness.data import formats, reading
from harness.data.chat_templates import check_conversations, has_untrained_turn, with_text_arguments
from harness.data.conversion import (
    BAD_ANSWER,
    DIGEST,
    HAS,
    KIND,
    REASON,
    WITH_IMAGES,
    Conversion,
    checksum_of_code,
    complete,
    converted_of,
    cut_texts_of_row,
    digest_of,
    examine_row_of_stream,
    examine_rows,
    find_conversion,
    split_answers,
    usable_rows,
)
from harness.data.images import OF_IMAGE
from harness.data.reading import PLACE, DataSettings, PlacedRow, Rows, Source, with_places
from harness.data.stream_rows import mix_streams, shuffle
from harness.data.turns import TEMPLATE_ARGUMENTS
from harness.folder import DATA, has_trained, read_json, write_json
from harness.messages import UserError, is_first_process, print_once

import numpy as np
from datasets import Dataset, Features, IterableDataset, concatenate_datasets, interleave_datasets
from datasets.fingerprint import Hasher, generate_fingerprint
from transformers import TrainingArguments
from trl import ModelConfig

ROWS_TO_CHECK = 20  # the first ones, which show the format
PREVIEWED_ROWS = 400  # of each split, for a preview
MOST_KINDS = 200  # of conversations, of which one each is checked
MOST_SKIPPED = 10_000  # rows of a split for evaluation that are read besides those that are evaluated on
SHOWN_REASONS = 12
NUMBERS = ("rows", "skipped_rows", "held_out", "trained_rows")  # in data.json
UNUSABLE = "rows_with_unusable_images"  # in data.json
OPTIONAL = ("tools", TEMPLATE_ARGUMENTS)  # columns that later rows of a stream can have, although the first ones do not


@dataclass(frozen=True)
class Opened:
    """A dataset that is opened: how its rows are converted, and what was found out about them."""

    source: Source
    conversion: Conversion
    examined: Dataset  # all rows, with FACTS; only the first ones of a stream, or of large data in a preview
    is_complete: bool  # `examined` has all rows
    examples: list[PlacedRow]  # of each kind of conversation
    rows: Rows  # to train on: of `examined`; those of a stream that are not skipped
    test_split: str
    eval_rows: list[dict]  # converted
    digests: frozenset[str]  # the checksums of `eval_rows`, if they are of the training split: equal rows are not trained on


@dataclass(frozen=True)
class Shape:
    """The columns of the rows to train on, the same for all datasets of a run, and how converted rows get them."""

    features: Features
    splits_answers: bool
    joins_completions: bool  # some rows have messages, others a prompt and a completion
    has_text_arguments: bool  # see DataSettings
    drops_marks: str  # likewise
    cuts_texts: bool = False  # see Source


def load(script_args: Any, keep: Callable[[dict], bool] | None = None) -> tuple[Any, Any]:
    """Loads the rows that --dataset_name and the other flags choose, converted to a format of `parse`.

    Args:
        script_args: what `parse` has returned first.
        keep: a function of a row, with the columns of the dataset after --column_map. Rows for which it returns False are not
            used. Without it, all rows are.

    Returns:
        `(train_dataset, eval_dataset)`. Without a test split, rows are held out of the training split.
    """
    recipe = runs.started()
    _, training_args, model_args = recipe.arguments
    return load_rows(recipe.run.data, keep, training_args, model_args)


def load_rows(
    data: DataSettings,
    keep: Callable[[dict], bool] | None = None,
    training_args: TrainingArguments | None = None,
    model_args: ModelConfig | None = None,
) -> tuple[Rows, Dataset]:
    """See `load`. Rows have the first format of `dataset_formats` that they can be converted to, see formats.py.

    Rows without a text or an answer are skipped; how many and why is printed, and written into `data.json`.

    The evaluation rows are the first `max_eval_samples` of the split for evaluation. Without such a split as many are held out of
    the training split; with all rows that equal them they are at most a tenth of it.

    Of several datasets (`dataset_weights`) the training rows are mixed by weight, see `mix`, and `eval_dataset` has the
    evaluation rows of all. They have the format of the first.
    """
    if not data.sources:
        raise UserError("--dataset_name is missing: pass a Hub ID, a folder or a file")
    opened: list[Opened] = []
    for source in data.sources:
        opened.append(open_source(data, source, keep))
        data = replace(data, formats=tuple(filter(None, [opened[0].conversion.format])))
    check_opened(data, opened)
    if model_args and model_args.model_name_or_path and is_first_process():
        examples = list(itertools.chain.from_iterable(one.examples for one in opened))
        check_conversations(examples, training_args, model_args, data.split_conversations)

    digests = frozenset().union(*(one.digests for one in opened))
    shape = shape_of(opened, data)
    trained = []
    evaluated = []
    summaries = []
    for one in opened:
        of_source = replace(shape, cuts_texts=one.source.cuts_texts)
        trained.append(training_rows(data, one, digests, of_source))
        evaluated.append(evaluation_rows(data, one, of_source))
        summaries.append(summarize(one, digests))
    train = trained[0]
    test = evaluated[0]
    if data.is_mixture:
        train = mix(data, trained)
        test = interleave_datasets(evaluated, stopping_strategy="all_exhausted_without_replacement")
    if isinstance(train, IterableDataset):
        train = limit_stream(data, train)
    elif data.is_read_in_order:
        train = train.shuffle(seed=data.seed)
    if data.output_dir and is_first_process():
        record(data, opened, summaries, train, test)
    return of_date(train, data), of_date(test, data)


def open_source(data: DataSettings, source: Source, keep: Callable[[dict], bool] | None) -> Opened:
    """Opens a dataset, examines its rows, of a stream the first ones, and chooses those to evaluate on. `keep`: see `load`."""
    store_json_exactly()
    # Of large data a preview, a rehearsal and a plan read the first rows only. They download no more than these.
    limit = 0
    if (source.first_rows or data.streaming) and not reading.is_small(source.name):
        limit = source.first_rows or PREVIEWED_ROWS
    splits = reading.open_dataset(data, source, data.streaming or limit > 0)
    test = reading.evaluation_split(source, splits, data.needs_test_split)
    rows = splits[source.train_split]
    found = with_places(rows, source.display_name, source.train_split)
    examples = list(itertools.islice(found, ROWS_TO_CHECK))
    conversion = find_conversion(data, source, rows.features or {}, examples, found, keep)
    if not conversion.format and conversion.column_map:  # rows stay as they are, except that columns get other names
        splits = {split: rename_columns(of_split, conversion.column_map) for split, of_split in splits.items()}
        rows = splits[source.train_split]
        conversion = replace(conversion, column_map={})

    examined = examine_rows(rows, conversion, source, limit)
    is_complete = not limit or len(examined) < limit
    if conversion.format:
        examples = one_of_every_kind(examined)
    if data.streaming:
        rows = usable_stream(rows, conversion)
    elif conversion.format:
        rows = examined
    elif limit:
        rows = Dataset.from_list(list(rows.take(limit)), features=rows.features)

    count = source.eval_rows_of_run or data.max_eval_samples
    if test in splits:
        eval_rows = first_usable_rows(splits[test], test, source, conversion, count)
        digests = frozenset()
    else:
        if isinstance(rows, Dataset):
            held_out = list(rows.select(hold_out(examined, count)))
        else:
            held_out = hold_out_of_stream(rows, count, is_complete)
        eval_rows = list(map(converted_of, held_out)) if conversion.format else held_out
        digests = frozenset(map(digest_of_loaded, held_out))
    return Opened(source, conversion, examined, is_complete, examples, rows, test, eval_rows, digests)


def rename_columns(rows: Rows, column_map: dict[str, str]) -> Rows:
    """The rows of a recipe without formats, with the names of --column_map."""
    replaced = [name for name in rows.column_names or [] if name in column_map.values() and name not in column_map]
    return rows.remove_columns(replaced).rename_columns(column_map)


def one_of_every_kind(examined: Dataset) -> list[PlacedRow]:
    """A conversation with each order of turns that there is: calls, thoughts, tools, several answers …; and with each part."""
    seen: set[str] = set()
    chosen = []
    for index, kind in enumerate(examined[KIND][:]):
        if kind in seen or not kind:
            continue
        words = {kind} if len(chosen) < MOST_KINDS else set()
        words.update(re.split(r"[+, ]+", kind))  # a role, calls, untrained, the name of a key …
        if not words <= seen:
            chosen.append(index)
            seen |= words
    return [(row[PLACE], converted_of(row)) for row in examined.select(chosen)]


def usable_stream(rows: IterableDataset, conversion: Conversion) -> IterableDataset:
    """The rows of a stream that are not skipped: examined, or of a recipe without formats as they are."""
    if conversion.format:
        columns = rows.column_names or list(next(iter(rows)))
        rows = rows.map(examine_row_of_stream, fn_kwargs={"conversion": conversion}, remove_columns=columns)
        return rows.filter(operator.not_, input_columns=REASON)
    if conversion.keep:
        return rows.filter(conversion.keep)
    return rows


def first_usable_rows(rows: Rows, split: str, source: Source, conversion: Conversion, count: int) -> list[dict]:
    """The first rows of a split, converted. Raises UserError if there is none: before the model is loaded and trained."""
    searched = itertools.islice(with_places(rows, source.display_name, split), MOST_SKIPPED + count)
    found = list(itertools.islice(usable_rows(searched, conversion), count))
    if not found:
        raise UserError(f"--dataset_test_split: no row of {split} of {source.display_name} can be used: pass another split")
    return found


def hold_out(examined: Dataset, count: int) -> list[int]:
    """At most `count` rows to evaluate on, by index.

    Rows that equal a held-out one are not trained on either. With them, a tenth of the rows is held out at most.
    """
    equal: dict[str, list[int]] = {}
    for index, (reason, digest) in enumerate(zip(examined[REASON][:], examined[DIGEST][:], strict=True)):
        if not reason:
            equal.setdefault(digest, []).append(index)
    groups = list(equal.values())
    left = max(1, sum(map(len, groups)) // 10)
    chosen = []
    for number in np.random.default_rng(0).permutation(len(groups)):
        group = groups[number]
        if len(chosen) < count and len(group) <= left:
            chosen.append(group[0])
            left -= len(group)
    if not chosen and groups:
        chosen.append(min(groups, key=len)[0])
    return chosen


def hold_out_of_stream(rows: IterableDataset, count: int, is_small: bool) -> list[dict]:
    """The first rows of the last file, or of the last block of Parquet files.

    A stream of one file without blocks, or with too few rows there, gives a random tenth of its first `10 * count` rows. In no
    case they are more than a tenth of the rows. All `rows` can be used; `is_small`: they may be counted.
    """
    shards = rows.num_shards
    if shards > 1:
        # Blocks have one size, but for the last one, so a tenth of them is enough where counting rows means downloading them.
        known = 10 * count
        if is_small or shards < 10:
            known = len(list(rows.take(known)))
        wanted = min(count, max(1, known // 10))
        last = list(rows.shard(shards, shards - 1).take(wanted + 1))
        if len(last) > wanted:  # a part of the stream may have this file or block only
            return last[:wanted]
    first = list(rows.take(10 * count))
    order = np.random.default_rng(0).permutation(len(first))
    wanted = min(count, max(1, len(first) // 10))
    return [first[index] for index in order[:wanted]]


def digest_of_loaded(row: dict) -> str:
    """The checksum of an examined row, or of one that stays as it is."""
    return row[DIGEST] if DIGEST in row else digest_of(row)


def check_opened(data: DataSettings, opened: list[Opened]) -> None:
    """Raises UserError for columns, rows and images that would be trained on in another way than meant."""
    columns = {*itertools.chain.from_iterable(one.conversion.columns for one in opened)}
    for column in sorted(data.column_map or {}):  # a system prompt, for example
        if column not in columns:
            raise UserError(f"--column_map: no column {column} in {data.display_name}, which has {', '.join(sorted(columns))}")
    for one in opened:
        if not one.conversion.format and one.rows.features != opened[0].rows.features:
            raise UserError(
                "--dataset_name: the datasets have different columns, so rows would have nulls: all need the same ones"
            )
        if any(kind.endswith(BAD_ANSWER) for kind in one.examined[KIND][:]):  # they would be trained on as if they were good
            raise UserError(
                f"--dataset_name: {one.source.display_name} has rows whose `label` is false, bad answers for a KTO recipe "
                "(`trl.KTOTrainer`): leave them out with `keep` of the recipe's `load`, or pass a dataset without them"
            )
    if "images" in data.formats:
        check_has_images(opened)


def check_has_images(opened: list[Opened]) -> None:
    """Raises UserError if no row has an image: a recipe for images would train on texts only."""
    for one in opened:
        if any(WITH_IMAGES in kind for kind in one.examined[KIND][:]):
            return
    if not all(one.is_complete for one in opened):
        print_once("warning: none of the first rows has an image.")
        return
    reasons = itertools.chain.from_iterable(one.examined[REASON][:] for one in opened)
    cause = next((reason for reason in reasons if reason.startswith(OF_IMAGE)), "none has one")
    raise UserError(
        f"--dataset_name: no row that can be used has an image ({cause}). Images are read from a column images or image, and "
        """from parts of the type image. If a column has another name: --column_map '{"COLUMN": "images"}'"""
    )


def shape_of(opened: list[Opened], data: DataSettings) -> Shape:
    """The shape of the training rows: `messages` if some rows have these and others a completion."""
    stored = opened[0].conversion.stored
    found: set[str] = set()
    for one in opened:
        found.update(*one.eval_rows)
        for columns in set(one.examined[HAS][:]):
            found.update(columns.split())
        if not one.is_complete and isinstance(one.rows, IterableDataset):
            found.update(OPTIONAL)
    splits_answers = data.split_conversations and "messages" in stored
    joins_completions = {"messages", "completion"} <= found
    if splits_answers or joins_completions:
        found = found - {"prompt", "completion"} | {"messages"}
    features = Features({name: kind for name, kind in stored.items() if name in found})
    return Shape(
        features,
        splits_answers,
        joins_completions,
        data.has_text_arguments,
        data.drops_marks,
    )


def training_rows(data: DataSettings, one: Opened, digests: frozenset[str], shape: Shape) -> Rows:
    """The rows to train on; those of a stream shuffled. `digests`: of the rows that are held out of all datasets."""
    rows = one.rows
    if isinstance(rows, Dataset):
        facts = enumerate(zip(one.examined[REASON][:], one.examined[DIGEST][:], strict=True))
        indices = [index for index, (reason, digest) in facts if not reason and digest not in digests]
        if data.max_samples and not data.is_mixture:  # `mix` limits the rows of all datasets together
            indices = indices[: data.max_samples]
        rows = rows.select(indices[: one.source.first_rows or None])
    elif digests:
        rows = rows.filter(_is_not_held_out, fn_kwargs={"digests": digests})
    if not list(rows.take(1)):
        raise UserError(
            f"--dataset_name: no row of {one.source.display_name} is left to train on: {len(one.digests)} held out for "
            "evaluation, the others have no text or answer, are left out by `keep` of the recipe, or equal these: pass more rows"
        )
    if one.conversion.format:
        rows = shape_rows(rows, shape, one.conversion)
    if isinstance(rows, IterableDataset):
        return shuffle(rows, data.seed)
    return rows


def _is_not_held_out(row: dict, digests: frozenset[str]) -> bool:
    return digest_of_loaded(row) not in digests


def shape_rows(rows: Rows, shape: Shape, conversion: Conversion) -> Rows:
    """Examined rows in the shape of the training rows."""
    changes_rows = shape.splits_answers or shape.joins_completions or shape.has_text_arguments or shape.cuts_texts
    if isinstance(rows, Dataset) and not changes_rows:
        return rows.select_columns(list(shape.features))
    options = {"fn_kwargs": {"shape": shape}, "remove_columns": list(conversion.features), "features": shape.features}
    if isinstance(rows, IterableDataset):
        return rows.map(shape_batch, batched=True, batch_size=1, **options)
    fingerprint = Hasher.hash([generate_fingerprint(rows), shape, checksum_of_code()])
    return rows.map(shape_batch, batched=True, new_fingerprint=fingerprint, **options)


def shape_batch(batch: dict[str, list], shape: Shape) -> dict[str, list]:
    """Examined rows in the shape of the training rows."""
    shaped: dict[str, list] = {name: [] for name in shape.features}
    for values in zip(*batch.values(), strict=True):
        for row in shape_row(converted_of(dict(zip(batch, values, strict=True))), shape):
            for name in shape.features:
                shaped[name].append(row[name])
    return shaped


def shape_row(row: dict, shape: Shape) -> list[dict]:
    """A converted row, or one for every answer, in the shape of the training rows; cut for a rehearsal.

    Raises UserError for marks without an effect in a row of a stream, which no check before the run has seen.
    """
    if shape.joins_completions and "completion" in row:
        row = formats.as_messages(row)
    if shape.has_text_arguments:
        row = with_text_arguments(row)
    if shape.cuts_texts:
        row = cut_texts_of_row(row)
    rows = split_answers(row) if shape.splits_answers else [row]
    if shape.drops_marks and any(map(has_untrained_turn, rows)):
        raise UserError(shape.drops_marks)
    return [complete(part, shape.features) for part in rows]


def evaluation_rows(data: DataSettings, one: Opened, shape: Shape) -> Dataset:
    """The rows to evaluate on. A preview, a rehearsal and a plan of data in memory load the first ones."""
    rows = one.eval_rows[: data.max_eval_samples]
    if isinstance(one.rows, Dataset):
        rows = rows[: one.source.first_rows or None]
    if not one.conversion.format:
        return Dataset.from_list(rows, features=one.rows.features)
    return Dataset.from_list(list(itertools.chain.from_iterable(shape_row(row, shape) for row in rows)), features=shape.features)


def mix(data: DataSettings, datasets: list[Dataset] | list[IterableDataset]) -> Rows:
    """The rows of all datasets by weight, in an order that depends on the seed only.

    An epoch in memory ends as soon as one of the datasets has been read once. The others give as many rows as their weights say,
    the same ones in every epoch. With --max_samples an epoch has that many rows, and the rows of a small dataset are repeated.
    Streams have no epoch: each starts again when it ends.
    """
    if isinstance(datasets[0], IterableDataset):
        return mix_streams(datasets, [source.weight for source in data.sources], data.seed)
    sizes = list(map(len, datasets))
    generator = np.random.default_rng(data.seed)
    start = 0
    chosen = []
    for source, size, count in zip(data.sources, sizes, share(data, sizes), strict=True):
        if not count:
            raise UserError(
                f"--dataset_weights: no row of {source.display_name} in an epoch: pass a larger weight, or --max_samples"
            )
        while count > 0:
            order = generator.permutation(size)
            chosen.append(start + order[:count])
            count -= size
        start += size
    return concatenate_datasets(datasets).select(generator.permutation(np.concatenate(chosen)))


def share(data: DataSettings, sizes: list[int]) -> list[int]:
    """How many rows of datasets of these sizes an epoch has."""
    weights = [source.weight for source in data.sources]
    total = data.max_samples or min(map(operator.truediv, sizes, weights))
    shares = [total * weight for weight in weights]
    counts = list(map(math.floor, shares))
    by_rest = sorted(range(len(counts)), key=lambda index: counts[index] - shares[index])
    for index in by_rest[: round(total) - sum(counts)]:  # the largest rests are rounded up
        counts[index] += 1
    return counts


def limit_stream(data: DataSettings, stream: IterableDataset) -> Rows:
    """The first `max_samples` rows; with epochs they are kept in memory."""
    if data.max_samples:
        stream = stream.take(data.max_samples)
    if not data.keeps_samples:
        return stream
    kept = list(itertools.islice(stream, data.sources[0].first_rows or None))
    print_once(f"{data.display_name}: {len(kept):,} rows of the stream are kept in memory, for every epoch the same.")
    return Dataset.from_list(kept, features=stream.features)


def of_date(rows: Rows, data: DataSettings) -> Rows:
    """The same rows. If the chat template prints the date, the tokens of another day in the cache are not those of these rows."""
    if not data.template_date or isinstance(rows, IterableDataset):
        return rows
    return rows.select(range(len(rows)), new_fingerprint=Hasher.hash([generate_fingerprint(rows), data.template_date]))


def summarize(one: Opened, digests: frozenset[str]) -> dict[str, Any]:
    """What was read, skipped and found of a dataset; prints it. `digests`: of the rows that are held out of all datasets."""
    name = one.source.display_name
    reasons = one.examined[REASON][:]
    facts = zip(reasons, one.examined[DIGEST][:], strict=True)
    trained = sum(not reason and digest not in digests for reason, digest in facts)
    skipped = Counter(filter(None, reasons))
    shown = [
        f"{count:,} {reason} (the first is row {reasons.index(reason) + 1:,})"
        for reason, count in skipped.most_common(SHOWN_REASONS)  # each image that cannot be read is one
    ]
    held_out = len(one.eval_rows) if one.digests else 0
    read = f"{'' if one.is_complete else 'the first '}{len(reasons):,} rows"
    if skipped:
        print_once(f"{name}: {skipped.total():,} of {read} skipped: {', '.join(shown)}.")
    evaluation = f"split {one.test_split} is for evaluation"
    if held_out:
        evaluation = f"{held_out} are held out for evaluation and, with all rows that equal them, never trained on"
    print_once(f"{name}: {trained:,} of {read} are trained on; {evaluation}.")
    return {
        "name": name,
        "is_complete": one.is_complete,
        "format": one.conversion.format,
        "rows": len(reasons),
        "skipped_rows": skipped.total(),
        "held_out": held_out,
        "trained_rows": trained,
        "skipped": dict(skipped.most_common()),
    }


def record(
    data: DataSettings,
    opened: list[Opened],
    summaries: list[dict[str, Any]],
    train: Rows,
    test: Dataset,
) -> None:
    """Writes data.json. Raises UserError if other images are missing than when the run began.

    The order of the rows would be another one, and rows that were trained on would be evaluated on.
    """
    summary = summaries[0]
    if data.is_mixture:
        summary = {name: sum(one[name] for one in summaries) for name in NUMBERS} | {"datasets": summaries}
        summary["is_complete"] = all(one["is_complete"] for one in summaries)
    if isinstance(train, Dataset):
        summary["loaded_rows"] = len(train)
    summary["loaded_eval_rows"] = len(test)
    folder = Path(data.output_dir)
    if "images" in data.formats:
        unusable = summary[UNUSABLE] = [rows_with_unusable_images(one.examined) for one in opened]
        if has_trained(folder) and read_json(folder / DATA).get(UNUSABLE, unusable) != unusable:
            raise UserError(
                "--dataset_name: other rows than at the start of the run cannot be used because of an image: restore the image "
                "files as they were, or choose another --output_dir"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DATA, summary)


def rows_with_unusable_images(examined: Dataset) -> str:
    """A checksum of which rows are skipped because of an image."""
    rows = [index for index, reason in enumerate(examined[REASON][:]) if reason.startswith(OF_IMAGE)]
    return digest_of({"rows": rows})


def count_training_rows(data: DataSettings) -> int | None:
    """Rows of the training split, of a mixture those of an epoch; None for a stream that does not say."""
    sizes = []
    for source in data.sources:
        rows = reading.open_dataset(data, source, data.streaming or not reading.is_local(source.name))[source.train_split]
        if isinstance(rows, Dataset):
            sizes.append(len(rows))
        elif rows.info.splits:
            sizes.append(rows.info.splits[source.train_split].num_examples)
        else:  # of text files the lines can be counted
            sizes.append(sum(1 for _ in rows) if reading.is_local(source.name) and not data.streaming else None)
    if data.is_mixture:
        if all(sizes) and not data.streaming:
            return sum(share(data, sizes))
        return None
    return sizes[0]
