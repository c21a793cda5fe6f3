"""The rows of the training split that are held out for evaluation, where there is no split for it."""

from harness.messages import UserError, plural

import numpy as np
from datasets import IterableDataset


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
    left = max(1, len(usable) // 10)
    chosen = []
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
        known = len(list(rows.take(10 * count))) if is_counted else 10 * count
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
    found = f"{plural(rows, 'row')} that can be used" + (", all of them equal" if rows > distinct else "")
    return (
        f"--dataset_name: {name} has {found}, so no row of it is left to train on: the others have no text or answer, or `keep` "
        "of the recipe leaves them out (in qwen3_grpo, answers without a number). A run needs two different rows, one to train "
        "on and one to evaluate on, or rows for evaluation in a split or file named test"
    )
