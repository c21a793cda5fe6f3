"""The first rows of a data set as a recipe makes them, for a preview, and how many an epoch has, for a plan too."""

import copy
import itertools
import statistics
import sys
from types import SimpleNamespace

ROWS = 400
# Rows there are by split; rows before they are cut and packed; whether they are conversations.
found = SimpleNamespace(data=None, totals={}, whole={}, is_chat=False)


def enter(data):
    """From here on in this process a recipe loads the first rows only, and SFTTrainer keeps what it makes of them."""
    from datasets import Dataset
    from trl import SFTTrainer
    from trl.data_utils import is_conversational

    all_splits, prepare, found.data = data.splits, SFTTrainer._prepare_dataset, data

    def few(streaming: bool) -> dict:
        splits = all_splits(streaming=True)
        splits = {name: splits[name] for name in (data.dataset_train_split, data.dataset_test_split) if name in splits}
        found.totals = {name: getattr((rows.info.splits or {}).get(name), "num_examples", None) for name, rows in splits.items()}
        if streaming:
            return splits
        if data.path().exists():
            found.totals = {name: len(rows) for name, rows in all_splits(streaming=False).items()}
        return {name: Dataset.from_list(list(rows.take(ROWS)), features=rows.features) for name, rows in splits.items()}

    def keep(trainer, dataset, tokenizer, args, packing, formatting_func, name):
        found.is_chat = is_conversational(next(iter(dataset)))
        uncut = copy.copy(args)
        uncut.max_length, uncut.shuffle_dataset = None, False
        found.whole[name] = prepare(trainer, dataset, tokenizer, uncut, False, formatting_func, name)
        return prepare(trainer, found.whole[name], tokenizer, args, packing, None, name)

    data.splits, SFTTrainer._prepare_dataset = few, keep


def look(trainer) -> tuple[list, dict, list]:
    """Rows to train on as they are packed, the documents of each split, and what is left of those for training."""
    args, packed = trainer.args, list(itertools.islice(trainer.train_dataset, ROWS))
    splits = {"train": packed, "eval": trainer.eval_dataset or []}
    for name, rows in splits.items():
        whole = itertools.islice(found.whole[name], ROWS) if name in found.whole else rows
        splits[name] = [document for row in whole for document in documents(row)]
    length = getattr(args, "max_length", None) or sys.maxsize
    is_split = (getattr(args, "packing", False) and args.packing_strategy != "bfd") or "train" not in found.whole
    return packed, splits, [document if is_split else [part[:length] for part in document] for document in splits["train"]]


def documents(row: dict) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of each document of a row, packed or not."""
    ids, start, parts = row["input_ids"], 0, []
    labels = row.get("labels", ids)
    for length in row.get("seq_lengths") or [len(ids)]:
        parts.append((ids[start : start + length], labels[start : start + length]))
        start += length
    return parts


def epoch(whole: list, seen: list, packed: list) -> tuple[float | None, float]:
    """Rows and tokens of an epoch, estimated."""
    data = found.data
    if not (total := found.totals.get(data.dataset_train_split)):
        return None, 0
    tokens = min(total * len(whole) / min(total, ROWS), data.max_samples or total) * statistics.mean(len(ids) for ids, _ in seen)
    return tokens / mean_length(packed), tokens


def rows_of_an_epoch(trainer) -> float | None:
    """How many there are once they are packed, by the first of them; None when nobody says how many documents there are."""
    packed, splits, seen = look(trainer)
    return epoch(splits["train"], seen, packed)[0]


def mean_length(packed: list) -> float:
    return statistics.mean(len(row["input_ids"]) for row in packed)
