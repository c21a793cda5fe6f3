"""The arguments that choose datasets, splits and rows, and the rows that they choose.

An epoch of a mixture in memory ends as soon as one of the datasets has been read once. The others give as many rows as their
weights say, the same ones in every epoch. With --max_samples an epoch has that many rows, and the rows of a small dataset are
repeated. Streams have no epoch: every dataset starts again when it ends. In both cases packing joins rows of different datasets
only as documents that do not see each other.
"""

import copy
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.data import reading, stream_rows
from harness.launched import UserError, print_once

import numpy as np
import trl
from datasets import Dataset, IterableDataset, ReadInstruction, concatenate_datasets

EVALUATION_SPLITS = ("test", "validation", "valid", "dev", "val", "eval", "evaluation")  # in this order, without a flag
Parts = list[tuple[str, int, int]]  # split, start and end
# The arguments that every dataset of a mixture has its own of.
OF_ONE_DATASET = (
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "text_rows",
    "display_name",
    "label",
    "weight",
    "first_rows",
    "cuts_texts",
    "eval_rows_of_run",
)


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """TRL's ScriptArguments, budgets that do not depend on the number of GPUs, and several datasets."""

    dataset_name: list[str] | None = field(
        default=None,
        metadata={
            "help": "A Hub ID, a folder or a file. With --dataset_weights several datasets; without it, several files of one."
        },
    )
    dataset_config: list[str] | None = field(
        default=None, metadata={"help": "Config of the dataset; of several datasets one for each, `default` for those without."}
    )
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={"help": "For several datasets: the share that each has of the rows, as 0.6 0.3 0.1 or 6 3 1."},
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows per optimizer step on all processes together; sets gradient_accumulation_steps."},
    )
    max_tokens: int | None = field(default=None, metadata={"help": "Train on this many tokens; sets max_steps."})
    max_samples: int | None = field(
        default=None,
        metadata={
            "help": "Train on at most this many documents. A stream with num_train_epochs keeps them in memory. Of several "
            "datasets exactly so many: small ones are repeated."
        },
    )
    max_eval_samples: int = field(
        default=256, metadata={"help": "Documents held out for evaluation and never trained on, at most; of each dataset."}
    )
    column_map: dict[str, str] | str | None = field(
        default=None, metadata={"help": 'New names of columns, as JSON: \'{"question": "prompt", "answer": "completion"}\'.'}
    )
    text_rows: str | None = field(
        default=None,
        metadata={
            "help": "What a row of text files is. Without the flag every line, and every document where there are several files.",
            "choices": ["line", "paragraph", "document"],
        },
    )
    split_conversations: bool = field(
        default=False,
        metadata={"help": "One row for every answer of a conversation, for templates that drop the reasoning of earlier ones."},
    )
    profile: bool = field(default=False, metadata={"help": "Profile some steps in the middle of the run."})
    mirror: str | None = field(
        default=None,
        metadata={"help": "URL of a folder (s3://, gs://, file:// …) to which checkpoints and the model are uploaded."},
    )

    # Set by `parse`. Without an annotation they are no fields, so they are no flags.
    dataset_formats = ()  # the formats of rows that the recipe can train on (see formats.py), its first choice first
    display_name = ""  # the dataset's name in messages; dataset_name is another one in a rehearsal
    label, weight = "", 1.0  # of a dataset of a mixture: its name in metrics, its share of the rows
    mixture = ()  # for each of several datasets the values of OF_ONE_DATASET
    given = frozenset()  # names of all arguments that the user passed
    text_field, seed = "text", 0
    output_dir = ""  # where `load` writes DATA
    first_rows = 0  # load only so many rows of each split, for a preview, a rehearsal or a plan; 0: all
    cuts_texts = False  # in a rehearsal: texts are cut after they were read
    eval_rows_of_run = 0  # in a rehearsal of one's own data: the max_eval_samples of the run
    asked_accumulation_steps = None  # the gradient_accumulation_steps that were asked for, without global_batch_size
    keeps_samples = False  # of a stream: its max_samples rows are read once, for all epochs

    def __post_init__(self) -> None:
        """A list of one dataset becomes the dataset, and the JSON of `--column_map` a dict."""
        for name in ("dataset_name", "dataset_config"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) == 1:
                setattr(self, name, value[0])
        if isinstance(self.column_map, str):
            try:
                self.column_map = json.loads(self.column_map)
            except json.JSONDecodeError as error:
                example = '{"question": "prompt", "answer": "completion"}'
                raise UserError(f"--column_map: {self.column_map} is not JSON, expected for example '{example}'") from error


def set_datasets(script_args: ScriptArguments) -> None:
    """Sets `display_name` and, of several datasets, `mixture`: the arguments of each.

    `dataset_name` of several datasets is only a description afterwards, such as "0.7 a + 0.3 b". Raises UserError for names,
    configs and weights that do not belong together.
    """
    names, configs, weights = script_args.dataset_name, script_args.dataset_config, script_args.dataset_weights
    if isinstance(names, list) and not weights and all(map(reading.is_local, names)):
        names = script_args.dataset_name = ",".join(names)  # files of one dataset
    if not isinstance(names, list):
        if weights:
            raise UserError("--dataset_weights is for several datasets: pass a --dataset_name for each weight, or leave it out")
        if isinstance(configs, list):
            raise UserError(f"--dataset_config has {len(configs)} values, and --dataset_name names one dataset: pass one")
        script_args.display_name = names
        return
    _check_mixture(names, configs, weights)
    script_args.dataset_config = None  # each dataset gets its own below
    shared = {name: getattr(script_args, name) for name in OF_ONE_DATASET}
    script_args.mixture = [
        shared | {"dataset_name": name, "display_name": name, "label": label, "weight": weight / sum(weights)}
        for name, label, weight in zip(names, labels_of(names), weights, strict=True)
    ]
    for values, config in zip(script_args.mixture, configs or [], strict=False):
        if config != "default":
            values["dataset_config"], values["display_name"] = config, f"{values['dataset_name']} {config}"
    if script_args.text_rows:  # for those that are text files
        for values in script_args.mixture:
            values["text_rows"] = script_args.text_rows if reading.is_text(values["dataset_name"]) else None
        if not any(values["text_rows"] for values in script_args.mixture):
            raise UserError("--text_rows is for text files on this machine, and no dataset is one: leave out the flag")
    parts = [f"{values['weight']:.3g} {values['display_name']}" for values in script_args.mixture]
    script_args.dataset_name = script_args.display_name = " + ".join(parts)


def _check_mixture(names: list[str], configs: str | list[str] | None, weights: list[float] | None) -> None:
    """Raises UserError unless there is a weight, and if any a config, for each of several different datasets."""
    if not weights:
        example = " ".join(["1"] * len(names))
        raise UserError(
            f"--dataset_name names {len(names)} datasets ({', '.join(names)}): quote a path that has spaces, or pass the share "
            f"that each has of the rows, for equal ones --dataset_weights {example}"
        )
    if len(weights) != len(names):
        raise UserError(f"--dataset_weights has {len(weights)} values for {len(names)} datasets: pass one for each")
    if not all(isinstance(weight, int | float) and math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"--dataset_weights is {' '.join(map(str, weights))}, expected numbers above 0")
    if configs is not None and (not isinstance(configs, list) or len(configs) != len(names)):
        raise UserError(
            f"--dataset_config: pass one config for each of the {len(names)} datasets, and `default` for those without"
        )
    if len(set(zip(names, configs or names, strict=True))) < len(names):
        raise UserError("--dataset_name names a dataset twice: pass each once, with a larger weight")


def labels_of(names: list[str]) -> list[str]:
    """Short names for metrics, all different: `code` for `data/code.jsonl` and `code/*.jsonl`, `b` for `hub/b`.

    None is `train`, as TRL calls the training rows, or `aux`, whose metric would be that of a mixture of experts.
    """
    labels, reserved = [], {"", "train", "aux"}
    for name in names:
        parts = [part.strip("/").split(".")[0] for part in reversed(Path(name).parts)]
        short = next((part for part in parts if part not in reserved and not set("*?[") & set(part)), "data")
        candidates = (short, *(f"{short}-{number}" for number in range(2, len(names) + 2)))
        labels.append(next(label for label in candidates if label not in labels))
    return labels


def each_dataset(script_args: ScriptArguments) -> list[ScriptArguments]:
    """The arguments of every dataset: these, or of a mixture one copy for each of its datasets."""
    if not script_args.mixture:
        return [script_args]
    copies = []
    for values in script_args.mixture:
        one = copy.copy(script_args)
        for name, value in (values | {"mixture": ()}).items():
            setattr(one, name, value)
        one.max_samples = script_args.max_samples and math.ceil(script_args.max_samples * one.weight)
        copies.append(one)
    return copies


def change_each(script_args: ScriptArguments, change: Callable[[ScriptArguments], None]) -> None:
    """Calls `change` with the arguments of every dataset, and keeps the values of OF_ONE_DATASET that it sets."""
    if not script_args.mixture:
        change(script_args)
        return
    copies = each_dataset(script_args)
    for one in copies:
        change(one)
    script_args.mixture = [{name: getattr(one, name) for name in OF_ONE_DATASET} for one in copies]


def evaluation_split(script_args: ScriptArguments, splits: Any) -> str:
    """The name of the split to evaluate on: that of the flag or recipe, else one that is usually called so."""
    name = script_args.dataset_test_split
    if name in splits or is_slice(name) or "dataset_test_split" in script_args.given:
        return name
    usual = [split for split in EVALUATION_SPLITS if split in splits and split != script_args.dataset_train_split]
    return usual[0] if usual else name


def choose_splits(script_args: ScriptArguments, splits: dict[str, Any]) -> tuple[Any, Any]:
    """The rows to train on and to evaluate on, splits or slices of splits; None for the latter if there is no such split.

    `splits` can have slices too, under their names. Sets `dataset_test_split` to the split that is found.
    """
    script_args.dataset_test_split = evaluation_split(script_args, splits)
    names = script_args.dataset_train_split, script_args.dataset_test_split
    if names[0] in splits and (names[1] in splits or not is_slice(names[1])):
        return splits[names[0]], splits.get(names[1])
    lengths = {str(split): len(rows) for split, rows in splits.items()}
    chosen = [
        concatenate_datasets([splits[split].select(range(start, end)) for split, start, end in parts]) if parts else None
        for parts in parts_of_splits(script_args, lengths)
    ]
    return chosen[0], chosen[1]


def is_slice(name: str) -> bool:
    """Whether this is `train[:1%]`, `train+test` or the like, and not the name of one split."""
    return "[" in name or "+" in name


def splits_of(name: str) -> list[str]:
    """The splits of `train[:1%]+test`: train and test."""
    return [part.split("[")[0].strip() for part in name.split("+")]


def parts_of_splits(script_args: ScriptArguments, lengths: dict[str, int]) -> tuple[Parts, Parts]:
    """Which rows of which splits to train on and to evaluate on; [] for the latter if there is no such split.

    Raises UserError for a slice that `datasets` does not understand, that has no rows, or that shares rows with the other.
    """
    found = []
    for flag in ("dataset_train_split", "dataset_test_split"):
        name = getattr(script_args, flag)
        if not is_slice(name) and name not in lengths:
            found.append([])
            continue
        try:
            parts = [(part.splitname, part.from_, part.to) for part in ReadInstruction.from_spec(name).to_absolute(lengths)]
        except ValueError as error:
            raise UserError(f"--{flag} {name}: {error}") from error
        if not any(start < end for _, start, end in parts):
            sizes = ", ".join(f"{split} has {lengths[split]:,}" for split, _, _ in parts)
            raise UserError(f"--{flag} {name} has no rows; {sizes}")
        found.append(parts)
    for split, start, end in found[0]:
        for other, other_start, other_end in found[1]:
            if split == other and max(start, other_start) < min(end, other_end):
                raise UserError(
                    f"--dataset_train_split {script_args.dataset_train_split} and --dataset_test_split "
                    f"{script_args.dataset_test_split} share rows of {split}: pass slices that do not overlap"
                )
    return found[0], found[1]


def check_slices(script_args: ScriptArguments, splits: dict[str, IterableDataset]) -> None:
    """Raises UserError for slices that cannot be read. `load` checks those of splits of unknown length again."""
    infos = {str(name): (rows.info.splits or {}).get(name) for name, rows in splits.items()}
    parts_of_splits(script_args, {name: getattr(info, "num_examples", None) or 10**9 for name, info in infos.items()})


def hold_out(usable: list[int], digests: list[str], count: int, name: str) -> list[int]:
    """At most `count` rows to evaluate on, by index. `usable`: all rows that can be used.

    Rows that equal a held-out one are not trained on either. With them, a tenth of the rows is held out at most.
    """
    equal: dict[str, list[int]] = {}
    for index in usable:
        equal.setdefault(digests[index], []).append(index)
    if len(equal) < 2:
        raise UserError(too_few_rows(name, len(usable), len(equal)))
    groups = list(equal.values())
    left, chosen = max(1, len(usable) // 10), []
    for number in np.random.default_rng(0).permutation(len(groups)):
        if len(chosen) < count and len(groups[number]) <= left:
            chosen.append(groups[number])
            left -= len(groups[number])
    chosen = chosen or [min(groups, key=len)]
    return [group[0] for group in chosen]


def hold_out_of_stream(rows: IterableDataset, count: int, name: str, is_small: bool) -> list[dict]:
    """The first rows of the last file, or of the last block of Parquet files.

    A stream of one file without blocks, or with too few rows there, gives a random tenth of its first `10 * count` rows. In no
    case they are more than a tenth of the rows. All `rows` can be used; `name` is that of the dataset, `is_small` whether its
    rows may be counted.
    """
    if rows.num_shards > 1:
        # Blocks have one size, but for the last one, so a tenth of them is enough where counting rows means downloading them.
        is_counted = is_small or rows.num_shards < 10
        known = sum(1 for _ in itertools.islice(rows, 10 * count)) if is_counted else 10 * count
        wanted = at_most_a_tenth(known, count, name)
        last = list(rows.shard(rows.num_shards, rows.num_shards - 1).take(wanted + 1))
        if len(last) > wanted:  # a part of the stream may have this file or block only
            return last[:wanted]
    first = list(rows.take(10 * count))
    order = np.random.default_rng(0).permutation(len(first))
    return [first[index] for index in order[: at_most_a_tenth(len(first), count, name)]]


def at_most_a_tenth(rows: int, count: int, name: str) -> int:
    """How many of `rows` to hold out."""
    if rows < 2:
        raise UserError(too_few_rows(name, rows, rows))
    return min(count, max(1, rows // 10))


def too_few_rows(name: str, rows: int, distinct: int) -> str:
    found = f"{rows} row{'s' if rows != 1 else ''} that can be used" + (", all of them equal" if rows > distinct else "")
    return (
        f"--dataset_name: {name} has {found}, so no row of it is left to train on: a run needs two different rows, one to "
        "train on and one to evaluate on, or rows for evaluation in a split or file named test"
    )


def mix(script_args: ScriptArguments, datasets: list[Dataset] | list[IterableDataset]) -> Dataset | IterableDataset:
    """The rows of all datasets by weight, in an order that depends on the seed only."""
    if isinstance(datasets[0], IterableDataset):
        return stream_rows.mix(datasets, [one.weight for one in each_dataset(script_args)], script_args.seed)
    sizes = [len(rows) for rows in datasets]
    generator, start, chosen = np.random.default_rng(script_args.seed), 0, []
    for size, count in zip(sizes, share(script_args, sizes), strict=True):
        orders = [generator.permutation(size) for _ in range(-(-count // size))]
        chosen.append(start + np.concatenate(orders)[:count])
        start += size
    return concatenate_datasets(datasets).select(generator.permutation(np.concatenate(chosen)))


def share(script_args: ScriptArguments, sizes: list[int]) -> list[int]:
    """How many rows of datasets of these sizes an epoch has. Raises UserError if it has none of one of them."""
    datasets = each_dataset(script_args)
    total = script_args.max_samples or min(size / one.weight for size, one in zip(sizes, datasets, strict=True))
    shares = [total * one.weight for one in datasets]
    counts = list(map(math.floor, shares))
    by_rest = sorted(range(len(counts)), key=lambda index: counts[index] - shares[index])
    for index in by_rest[: round(total) - sum(counts)]:  # the largest rests are rounded up
        counts[index] += 1
    for one, count in zip(datasets, counts, strict=True):
        if count == 0:
            raise UserError(
                f"--dataset_weights: an epoch has {total:.0f} rows, of which {one.display_name} would have none: pass a larger "
                "weight for it, or a larger --max_samples"
            )
    return counts


def count_rows_of_epoch(
    script_args: ScriptArguments, datasets: list[Dataset] | list[IterableDataset], summaries: list[dict[str, Any]]
) -> None:
    """Prints the shares of the datasets. Where it is known, adds to `summaries` the `epoch_rows` that an epoch has of each, and
    how many of its rows these are, `used_rows`.

    `summaries`: the content of data.json for each. A preview and a rehearsal load fewer rows than the run.
    """
    is_stream, sizes, counts = isinstance(datasets[0], IterableDataset), [], []
    is_known = not is_stream and all(summary["is_complete"] for summary in summaries)
    if is_known:
        for one, rows, summary in zip(each_dataset(script_args), datasets, summaries, strict=True):
            of_all = min(summary["trained_rows"], one.first_rows or summary["trained_rows"])
            sizes.append(round(summary["trained_rows"] * len(rows) / of_all))  # more where conversations are split
        counts = share(script_args, sizes)
    elif is_stream and script_args.keeps_samples:
        sizes = [summary["trained_rows"] if summary["is_complete"] else math.inf for summary in summaries]
        counts = share(script_args, sizes)  # of max_samples
    for summary, count, size in zip(summaries, counts, sizes, strict=False):
        summary |= {"epoch_rows": count, "used_rows": min(count, size)}
    for number, one in enumerate(each_dataset(script_args)):
        text = f"{one.display_name}: {one.weight:.1%} of the rows"
        if is_stream:
            text += "; when it ends, it starts again"
        elif is_known and counts[number] > sizes[number]:
            text += f": in every epoch each of its {sizes[number]:,} rows {counts[number] / sizes[number]:.3g} times"
        elif is_known and counts[number] == sizes[number]:
            text += f": in every epoch each of its {sizes[number]:,} rows once"
        elif is_known:
            text += f": in every epoch the same {counts[number]:,} of its {sizes[number]:,} rows"
        print_once(f"{text}.")


def add_summaries(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of data.json: the sums over the datasets, and `datasets` with what each has.

    `trained_rows` is of an epoch where that is known: by its weight a dataset has more or fewer of its rows in it.
    """
    names = ("rows", "skipped_rows", "held_out", "trained_rows", "with_tools")
    total = {name: sum(summary[name] for summary in summaries) for name in names}
    if all("epoch_rows" in summary for summary in summaries):
        total["trained_rows"] = sum(summary["epoch_rows"] for summary in summaries)
    skipped, turns = (sum((Counter(summary[name]) for summary in summaries), Counter()) for name in ("skipped", "turns"))
    ignored = [f"{column} of {summary['name']}" for summary in summaries for column in summary["ignored_columns"]]
    return {
        "name": " + ".join(summary["name"] for summary in summaries),
        "is_complete": all(summary["is_complete"] for summary in summaries),
        "format": summaries[0]["format"],
        "ignored_columns": ignored,
        **total,
        "skipped": dict(skipped.most_common()),
        "turns": dict(turns.most_common()),
        "datasets": summaries,
    }
