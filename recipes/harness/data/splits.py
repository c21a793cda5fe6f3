"""The splits of a dataset: which one is trained on, and which one is evaluated on."""

from collections.abc import Collection
from typing import Any

from harness.data.sources import Source
from harness.messages import UserError

from datasets import Dataset, IterableDataset

EVALUATION_SPLITS = ("test", "validation", "valid", "dev", "val", "eval", "evaluation")  # in this order, without a flag


def evaluation_split(source: Source, splits: Collection[str], is_given: bool) -> str:
    """The name of the split to evaluate on: that of the flag or recipe, else one that is usually called so.

    `is_given`: by the flag.
    """
    name = source.test_split
    if name in splits or is_given:
        return name
    usual = [split for split in EVALUATION_SPLITS if split in splits and split != source.train_split]
    return usual[0] if usual else name


def check_splits(source: Source, test: str, splits: Collection[str], is_given: bool) -> None:
    """Raises UserError unless the splits of the arguments exist and are different. `test`: of `evaluation_split`."""
    train = source.train_split
    found = f"{source.display_name} has the split{'s' if len(splits) > 1 else ''} {', '.join(splits)}"
    for flag, name in (("dataset_train_split", train), ("dataset_test_split", test)):
        if "[" in name or "+" in name:
            raise UserError(f"--{flag}: {name} is no split: pass the name of one, and --max_samples N to train on N rows of it")
    if train not in splits:
        raise UserError(f"--dataset_train_split: {found}, none called {train}: pass one of these")
    if test not in splits and is_given:
        raise UserError(f"--dataset_test_split: {found}, none called {test}: leave the flag out to hold some rows out")
    if test == train:
        raise UserError(f"--dataset_train_split and --dataset_test_split are both {train}: pass two different splits")


def number_of_rows(rows: Any, split: str) -> int | None:
    """The rows of a split, None if it does not say."""
    if isinstance(rows, Dataset):
        return len(rows)
    info = (rows.info.splits or {}).get(split) if isinstance(rows, IterableDataset) else None
    return getattr(info, "num_examples", None)
