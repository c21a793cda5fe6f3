"""What `load` has read, skipped and held out: printed, and written into data.json."""

from collections import Counter
from typing import Any

from harness.data.conversion import REASON
from harness.data.reading import files_of_splits
from harness.data.settings import Source
from harness.messages import plural, print_once

SHOWN_REASONS = 12
DUPLICATE = "equal to a row that is held out"


def summarize(facts: dict[str, list[str]], is_all: bool, held_out: int) -> dict[str, Any]:
    """What was read, skipped and found of a dataset.

    `facts`: of the rows that were read, by name; `is_all`: the `held_out` rows that are held out are among them.
    """
    skipped = Counter()
    first_skipped: dict[str, int] = {}
    for number, reason in enumerate(facts[REASON], 1):
        if reason:
            skipped[reason] += 1
            if reason != DUPLICATE:  # the first of those may be the held-out row itself
                first_skipped.setdefault(reason, number)
    if is_all:  # the held-out rows themselves are not skipped
        skipped[DUPLICATE] -= held_out
    skipped = +skipped  # without zeros
    return {
        "rows": len(facts[REASON]),
        "skipped_rows": skipped.total(),
        "skipped": dict(skipped.most_common()),
        "first_skipped": first_skipped,  # by reason, the number of the row in the training split, from 1
        "held_out": held_out,
        "trained_rows": len(facts[REASON]) - skipped.total() - held_out,
    }


def print_splits(source: Source, counts: dict[str, int | None]) -> None:
    """Prints what is trained on and what is evaluated on: the files or the split, and the number of rows.

    `counts`: the number of rows of the training split, and of the split for evaluation if there is one; None: not known.
    """
    files = files_of_splits(source.name, source.config)
    parts = []
    for use, split in zip(("training", "evaluation"), counts, strict=False):
        of_split = files.get(split, [])
        read = ", ".join(file.name for file in of_split) or f"split {split}"
        if len(of_split) > 3:
            read = f"{len(of_split)} files ({of_split[0].name} to {of_split[-1].name})"
        rows = "" if counts[split] is None else f", {plural(counts[split], 'row')}"
        parts.append(f"{use}: {read}{rows}")
    print_once(f"{source.display_name}: {'; '.join(parts)}.")


def print_summary(summary: dict[str, Any], train: str, test: str, splits: list[str]) -> None:
    """Prints the skipped rows with the reasons, and how many are held out of the training split. `splits`: all there are."""
    name = summary["name"]
    if summary["skipped"]:
        reasons = []
        for reason, number in summary["skipped"].items():
            first = summary["first_skipped"].get(reason)
            reasons.append(f"{number:,} {reason} (the first is row {first:,})" if first else f"{number:,} {reason}")
        if len(reasons) > SHOWN_REASONS:  # each image that cannot be read is one
            reasons[SHOWN_REASONS:] = [f"and {len(reasons) - SHOWN_REASONS:,} other reasons, in data.json"]
        read = f"{summary['rows']:,} rows" if summary["is_complete"] else f"the first {summary['rows']:,} rows"
        print_once(f"{name}: {summary['skipped_rows']:,} of {read} skipped: {', '.join(reasons)}.")
    if summary["held_out"]:
        held_out = f"{summary['held_out']} rows of {train}"
        print_once(
            f"{name} has no split {test}, only {', '.join(splits)}: {held_out} are held out for evaluation and never trained on."
        )


def add_summaries(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of data.json: the sums over the datasets, and `datasets` with what each has."""
    total = Counter(dict.fromkeys(("rows", "skipped_rows", "held_out", "trained_rows"), 0))
    skipped = Counter()
    ignored = []
    for summary in summaries:
        for name in total:
            total[name] += summary[name]
        skipped.update(summary["skipped"])
        ignored += [f"{column} of {summary['name']}" for column in summary["ignored_columns"]]
    return {
        "name": " + ".join(summary["name"] for summary in summaries),
        "is_complete": all(summary["is_complete"] for summary in summaries),
        "format": summaries[0]["format"],
        "ignored_columns": ignored,
        **total,
        "skipped": dict(skipped.most_common()),
        "datasets": summaries,
    }
