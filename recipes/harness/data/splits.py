"""Splits of a dataset, and slices of splits such as train[:1%]: which rows are trained on and which are evaluated on."""

from collections.abc import Collection
from typing import Any

from harness.data.sources import Source
from harness.messages import UserError

from datasets import Dataset, IterableDataset, ReadInstruction, concatenate_datasets

EVALUATION_SPLITS = ("test", "validation", "valid", "dev", "val", "eval", "evaluation")  # in this order, without a flag
UNKNOWN_LENGTH = 10**9  # of a split, while it is not known
Parts = list[tuple[str, int, int]]  # split, start and end


def evaluation_split(source: Source, splits: Collection[str], is_given: bool) -> str:
    """The name of the split to evaluate on: that of the flag or recipe, else one that is usually called so.

    `is_given`: by the flag.
    """
    name = source.test_split
    if name in splits or is_slice(name) or is_given:
        return name
    usual = [split for split in EVALUATION_SPLITS if split in splits and split != source.train_split]
    return usual[0] if usual else name


def is_slice(name: str) -> bool:
    """Whether this is `train[:1%]`, `train+test` or the like, and not the name of one split."""
    return "[" in name or "+" in name


def splits_of(name: str) -> list[str]:
    """The splits of `train[:1%]+test`: train and test."""
    return [part.split("[")[0].strip() for part in name.split("+")]


def choose_rows(train: str, test: str, splits: dict[str, Any]) -> tuple[Any, Any]:
    """The rows of two splits or slices of splits; None for the latter if there is no such split."""
    if train in splits and (test in splits or not is_slice(test)):
        return splits[train], splits.get(test)
    chosen = [
        concatenate_datasets([splits[split].select(range(start, end)) for split, start, end in parts]) if parts else None
        for parts in parts_of_splits(train, test, {split: len(rows) for split, rows in splits.items()})
    ]
    return chosen[0], chosen[1]


def parts_of_splits(train: str, test: str, lengths: dict[str, int]) -> tuple[Parts, Parts]:
    """Which rows of which splits to train on and to evaluate on; [] for the latter if there is no such split.

    Raises UserError for a slice that `datasets` does not understand, that has no rows, or that shares rows with the other.
    """
    found = []
    for flag, name in (("dataset_train_split", train), ("dataset_test_split", test)):
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
                    f"--dataset_train_split {train} and --dataset_test_split {test} share rows of {split}: pass slices that do "
                    "not overlap"
                )
    return found[0], found[1]


def check_splits(source: Source, test: str, splits: dict[str, Any], is_given: bool) -> None:
    """Raises UserError unless the splits and slices of the arguments exist and are different.

    `test`: of `evaluation_split`. Slices of splits of unknown length are checked when they are read.
    """
    train, found = source.train_split, f"{source.display_name} has the split{'s' if len(splits) > 1 else ''} {', '.join(splits)}"
    for name in splits_of(train):
        if name not in splits:
            raise UserError(f"--dataset_train_split: {found}, none called {name}: pass one of these")
    for name in splits_of(test):
        if name not in splits and is_given:
            raise UserError(f"--dataset_test_split: {found}, none called {name}: leave the flag out to hold some rows out")
    if test == train:
        raise UserError(f"--dataset_train_split and --dataset_test_split are both {train}: pass two different splits")
    if is_slice(train) or is_slice(test):
        parts_of_splits(train, test, {str(name): number_of_rows(rows, name) or UNKNOWN_LENGTH for name, rows in splits.items()})


def number_of_rows(rows: Any, split: str) -> int | None:
    """The rows of a split, None if it does not say."""
    if isinstance(rows, Dataset):
        return len(rows)
    info = (rows.info.splits or {}).get(split) if isinstance(rows, IterableDataset) else None
    return getattr(info, "num_examples", None)
