"""The rows of the training split that are held out for evaluation, where there is no split for it."""

import numpy as np
from datasets import IterableDataset


def hold_out(reasons: list[str], digests: list[str], count: int) -> list[int]:
    """At most `count` rows to evaluate on, by index. `reasons`: why each row is skipped, "" if it is not.

    Rows that equal a held-out one are not trained on either. With them, a tenth of the rows is held out at most.
    """
    equal: dict[str, list[int]] = {}
    for index, (reason, digest) in enumerate(zip(reasons, digests, strict=True)):
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
        is_counted = is_small or shards < 10
        known = 10 * count
        if is_counted:
            known = len(list(rows.take(known)))
        wanted = min(count, max(1, known // 10))
        last_shard = rows.shard(shards, shards - 1)
        last = list(last_shard.take(wanted + 1))
        if len(last) > wanted:  # a part of the stream may have this file or block only
            return last[:wanted]
    first = list(rows.take(10 * count))
    order = np.random.default_rng(0).permutation(len(first))
    wanted = min(count, max(1, len(first) // 10))
    return [first[index] for index in order[:wanted]]
