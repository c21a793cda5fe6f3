"""The rows that a run was evaluated on, kept as tokens: --verify computes the loss of a saved model on them."""

import json
from pathlib import Path
from typing import Any

from harness.folder import HELD_OUT, draft_of
from harness.run.parameters import base_of
from harness.run.samples import why_no_text

import pyarrow
import pyarrow.parquet
from datasets import Dataset
from transformers import Trainer


def why_not_held_out(trainer: Trainer) -> str:
    """Why a trainer has no rows that --verify could compute the loss of, "" if it has."""
    if reason := why_no_text(trainer):
        return reason
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} is not a causal language model"
    return "" if any(map(len, tokenized_datasets(trainer).values())) else "no evaluation rows have the column input_ids"


def tokenized_datasets(trainer: Trainer) -> dict[str, Dataset]:
    """The evaluation datasets with tokens, by label; a single one has the label ""."""
    datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
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
        rows.append({"dataset": "", "conversation": text, "input_ids": row["input_ids"], "labels": [], "seq_lengths": []})
    with draft_of(Path(trainer.args.output_dir, HELD_OUT)) as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)


def tokens_of_row(trainer: Trainer, row: dict) -> dict[str, list[int]]:
    """Tokens and labels of a row as the model gets them, and the lengths of its documents."""
    columns = ("input_ids", "labels", "seq_lengths", "attention_mask")
    batch = trainer.data_collator([{name: row[name] for name in columns if name in row}])
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    if batch.get("attention_mask") is not None:
        is_token = batch["attention_mask"][0].bool()
        ids, labels = ids[is_token], labels[is_token]
    return {"input_ids": ids.tolist(), "labels": labels.tolist(), "seq_lengths": row.get("seq_lengths") or [len(ids)]}
