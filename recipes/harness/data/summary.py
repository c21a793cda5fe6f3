"""What `load` has read, skipped and held out: printed, and written into data.json."""

from collections import Counter
from typing import Any

from harness.data.conversion import DIGEST, REASON, Opened
from harness.messages import print_once

SHOWN_REASONS = 12
NUMBERS = ("rows", "skipped_rows", "held_out", "trained_rows")


def summarize(one: Opened, digests: frozenset[str]) -> dict[str, Any]:
    """What was read, skipped and found of a dataset; prints it. `digests`: of the rows that are held out of all datasets."""
    name = one.source.display_name
    reasons = one.examined[REASON][:]
    trained = 0
    for reason, digest in zip(reasons, one.examined[DIGEST][:], strict=True):
        if not reason and digest not in digests:
            trained += 1
    skipped = Counter(filter(None, reasons))
    shown = []
    for reason, count in skipped.most_common(SHOWN_REASONS):  # each image that cannot be read is one
        shown.append(f"{count:,} {reason} (the first is row {reasons.index(reason) + 1:,})")
    held_out = 0
    if one.held_out:
        held_out = len(one.eval_rows)
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


def add_summaries(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of data.json for a mixture: the sums over the datasets, and `datasets` with what each has."""
    total: dict[str, Any] = {}
    for name in NUMBERS:
        total[name] = sum(summary[name] for summary in summaries)
    return total | {"is_complete": all(summary["is_complete"] for summary in summaries), "datasets": summaries}
