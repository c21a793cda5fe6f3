"""Several datasets in one run: each has its share of the rows, by --dataset_weights, and evaluation rows of its own.

In memory an epoch ends as soon as one of the datasets has been read once. The others give as many rows as their weights say, the
same ones in every epoch. With --max_samples an epoch has that many rows, and the rows of a small dataset are repeated.
Streams have no epoch: every dataset starts again when it ends. In both cases packing joins rows of different datasets only as
documents that do not see each other.
"""

import math
from collections import Counter
from typing import Any

from harness.compat.datasets import mix_streams
from harness.data.script_arguments import ScriptArguments, each_dataset
from harness.launched import UserError, print_once

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets


def mix(script_args: ScriptArguments, datasets: list[Dataset] | list[IterableDataset]) -> Dataset | IterableDataset:
    """The rows of all datasets by weight, in an order that depends on the seed only."""
    if isinstance(datasets[0], IterableDataset):
        return mix_streams(datasets, [one.weight for one in each_dataset(script_args)], script_args.seed)
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


def summarize(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of data.json: the sums over the datasets, and `datasets` with what each has."""
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
