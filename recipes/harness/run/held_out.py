"""The rows that a run was evaluated on, kept as tokens: --verify computes the loss of a saved model on them."""

import json
from pathlib import Path
from typing import Any

from harness.folder import HELD_OUT, draft_of
from harness.run.samples import why_no_text

import pyarrow
import pyarrow.parquet
from datasets import Dataset
from transformers import Trainer


def has_held_out(trainer: Trainer) -> bool:
    """Whether a trainer has rows that --verify can compute the loss of: tokens for a causal language model."""
    return not why_no_text(trainer) and any(map(len, tokenized_datasets(trainer).values()))


def tokenized_datasets(trainer: Trainer) -> dict[str, Dataset]:
    """The evaluation datasets with tokens, by label; a single one has the label ""."""
    datasets = trainer.eval_dataset
    if not isinstance(datasets, dict):
        datasets = {"": datasets}
    return {label: rows for label, rows in datasets.items() if isinstance(rows, Dataset) and "input_ids" in rows.column_names}


def save_held_out(trainer: Trainer, conversations: list[dict[str, Any]]) -> None:
    """Writes the tokens of all evaluation rows, and the first `conversations` as JSON with their tokens; not collective."""
    rows = [
        {"dataset": name, "conversation": None, **tokens_of_row(trainer, row)}
        for name, dataset in tokenized_datasets(trainer).items()
        for row in dataset
    ]
    columns = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
    for row in conversations:
        text = json.dumps({name: row[name] for name in columns if name in row})
        kept = {"dataset": "", "conversation": text, "input_ids": row["input_ids"], "labels": [], "seq_lengths": []}
        rows.append(kept | {"images": row.get("images")})
    with draft_of(Path(trainer.args.output_dir, HELD_OUT)) as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)


def tokens_of_row(trainer: Trainer, row: dict) -> dict[str, list[int]]:
    """Tokens and labels of a row as the model gets them, and the lengths of its documents."""
    columns = ("input_ids", "labels", "seq_lengths", "attention_mask", "images")
    given = {name: row[name] for name in columns if name in row}
    batch = trainer.data_collator([given])
    ids = batch["input_ids"][0]
    labels = batch["labels"][0]
    if batch.get("attention_mask") is not None:
        is_token = batch["attention_mask"][0].bool()
        ids = ids[is_token]
        labels = labels[is_token]
    lengths = row.get("seq_lengths") or [len(ids)]
    return {"input_ids": ids.tolist(), "labels": labels.tolist(), "seq_lengths": lengths, "images": row.get("images")}
