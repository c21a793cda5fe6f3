"""The rows of several datasets, mixed by their weights.

An epoch of a mixture in memory ends as soon as one of the datasets has been read once. The others give as many rows as their
weights say, the same ones in every epoch. With --max_samples an epoch has that many rows, and the rows of a small dataset are
repeated. Streams have no epoch: every dataset starts again when it ends. In both cases packing joins rows of different datasets
only as documents that do not see each other.
"""

import math
import operator

from harness.data.settings import DataSettings
from harness.data.stream_rows import mix_streams
from harness.messages import UserError

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets


def mix(data: DataSettings, datasets: list[Dataset] | list[IterableDataset]) -> Dataset | IterableDataset:
    """The rows of all datasets by weight, in an order that depends on the seed only."""
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
