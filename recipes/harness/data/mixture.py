"""The rows of several datasets, mixed by their weights.

An epoch of a mixture in memory ends as soon as one of the datasets has been read once. The others give as many rows as their
weights say, the same ones in every epoch. With --max_samples an epoch has that many rows, and the rows of a small dataset are
repeated. Streams have no epoch: every dataset starts again when it ends. In both cases packing joins rows of different datasets
only as documents that do not see each other.
"""

import math
from typing import Any

from harness.data.sources import DataSettings
from harness.data.stream_rows import mix_streams
from harness.messages import UserError, print_once

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets


def mix(data: DataSettings, datasets: list[Dataset] | list[IterableDataset]) -> Dataset | IterableDataset:
    """The rows of all datasets by weight, in an order that depends on the seed only."""
    if isinstance(datasets[0], IterableDataset):
        return mix_streams(datasets, [source.weight for source in data.sources], data.seed)
    sizes = [len(rows) for rows in datasets]
    generator, start, chosen = np.random.default_rng(data.seed), 0, []
    for size, count in zip(sizes, share(data, sizes), strict=True):
        orders = [generator.permutation(size) for _ in range(-(-count // size))]
        chosen.append(start + np.concatenate(orders)[:count])
        start += size
    return concatenate_datasets(datasets).select(generator.permutation(np.concatenate(chosen)))


def share(data: DataSettings, sizes: list[int]) -> list[int]:
    """How many rows of datasets of these sizes an epoch has. Raises UserError if it has none of one of them."""
    total = data.max_samples or min(size / source.weight for size, source in zip(sizes, data.sources, strict=True))
    shares = [total * source.weight for source in data.sources]
    counts = list(map(math.floor, shares))
    by_rest = sorted(range(len(counts)), key=lambda index: counts[index] - shares[index])
    for index in by_rest[: round(total) - sum(counts)]:  # the largest rests are rounded up
        counts[index] += 1
    for source, count in zip(data.sources, counts, strict=True):
        if count == 0:
            raise UserError(
                f"--dataset_weights: an epoch has {total:.0f} rows, of which {source.display_name} would have none: pass a "
                "larger weight for it, or a larger --max_samples"
            )
    return counts


def count_rows_of_epoch(
    data: DataSettings, datasets: list[Dataset] | list[IterableDataset], summaries: list[dict[str, Any]]
) -> None:
    """Prints the shares of the datasets. Where it is known, adds to `summaries` the `epoch_rows` that an epoch has of each, and
    how many of its rows these are, `used_rows`.

    `summaries`: the content of data.json for each. A preview and a rehearsal load fewer rows than the run.
    """
    is_stream, sizes, counts = isinstance(datasets[0], IterableDataset), [], []
    is_known = not is_stream and all(summary["is_complete"] for summary in summaries)
    if is_known:
        for source, rows, summary in zip(data.sources, datasets, summaries, strict=True):
            of_all = min(summary["trained_rows"], source.first_rows or summary["trained_rows"])
            sizes.append(round(summary["trained_rows"] * len(rows) / of_all))  # more where conversations are split
        counts = share(data, sizes)
    elif is_stream and data.keeps_samples:
        sizes = [summary["trained_rows"] if summary["is_complete"] else math.inf for summary in summaries]
        counts = share(data, sizes)  # of max_samples
    for summary, count, size in zip(summaries, counts, sizes, strict=False):
        summary |= {"epoch_rows": count, "used_rows": min(count, size)}
    for number, source in enumerate(data.sources):
        text = f"{source.display_name}: {source.weight:.1%} of the rows"
        if is_stream:
            text += "; when it ends, it starts again"
        elif is_known and counts[number] > sizes[number]:
            text += f": in every epoch each of its {sizes[number]:,} rows {counts[number] / sizes[number]:.3g} times"
        elif is_known and counts[number] == sizes[number]:
            text += f": in every epoch each of its {sizes[number]:,} rows once"
        elif is_known:
            text += f": in every epoch the same {counts[number]:,} of its {sizes[number]:,} rows"
        print_once(f"{text}.")
