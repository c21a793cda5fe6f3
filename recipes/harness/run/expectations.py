"""What --verify compares a model with: the evaluation rows of a run as tokens, and what it expects of them."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

from harness.folder import draft_of, write_json
from harness.model.quantized import read_source
from harness.run.evaluation import step_of_saved_model
from harness.run.parameters import base_of
from harness.run.samples import why_no_text

import pyarrow
import pyarrow.parquet
import torch
from datasets import Dataset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase, Trainer

HELD_OUT = "held_out.parquet"  # the rows that a run was evaluated on, as tokens
EXPECTED = "expected.json"  # what --verify compares a model with


def why_no_expectations(trainer: Trainer) -> str:
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


def save_expectations(
    trainer: Trainer, original: PreTrainedConfig, evaluation: dict[str, float], conversations: list[dict[str, Any]]
) -> None:
    """Writes what --verify compares the saved, merged or served model with; not collective.

    `evaluation`: {} if the loss is another one than the negative log-likelihood of tokens, which alone can be computed again.
    held_out.parquet has the tokens of all evaluation rows, and expected.json the losses of the last evaluation, the
    `conversations` with their tokens, and what the tokenizer and the original model say about generation.
    """
    datasets = tokenized_datasets(trainer)
    rows = [{"dataset": name, **tokens_of_row(trainer, row)} for name, dataset in datasets.items() for row in dataset]
    output_dir = Path(trainer.args.output_dir)
    with draft_of(output_dir / HELD_OUT) as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    name = trainer.accelerator.unwrap_model(trainer.model).config.name_or_path
    columns = ("messages", "prompt", "completion", "tools", "chat_template_kwargs", "input_ids")
    losses = {label: f"eval_{label}_loss" if label else "eval_loss" for label in datasets}
    expected = {
        "step": step_of_saved_model(trainer),
        "eval_losses": {label: evaluation[key] for label, key in losses.items() if key in evaluation},
        "tie_word_embeddings": is_tied(trainer, original),
        "generation": generation_of(read_source(name).get("model", name)),
        "tokenizer": describe_tokenizer(tokenizer),
        "end_tokens": end_tokens(conversations, tokenizer),
        "conversations": [{name: row[name] for name in columns if name in row} for row in conversations],
    }
    write_json(output_dir / EXPECTED, expected)


def tokens_of_row(trainer: Trainer, row: dict) -> dict[str, list[int]]:
    """Tokens and labels of a row as the model gets them, and the lengths of its documents."""
    columns = ("input_ids", "labels", "seq_lengths", "attention_mask")
    batch = trainer.data_collator([{name: row[name] for name in columns if name in row}])
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    if batch.get("attention_mask") is not None:
        is_token = batch["attention_mask"][0].bool()
        ids, labels = ids[is_token], labels[is_token]
    return {"input_ids": ids.tolist(), "labels": labels.tolist(), "seq_lengths": row.get("seq_lengths") or [len(ids)]}


def is_tied(trainer: Trainer, original: PreTrainedConfig) -> bool:
    """Whether the output layer of the trained model has the weights of the embeddings; an adapter on one of them unties them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    have_no_adapter = isinstance(model.get_input_embeddings(), torch.nn.Embedding) and isinstance(
        model.get_output_embeddings(), torch.nn.Linear
    )
    return bool(original.tie_word_embeddings) and have_no_adapter


def end_tokens(conversations: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens at the end of the trained answers, with their ids; a template may write a line break after them."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special, ends = added | set(tokenizer.all_special_ids), set()
    for row in conversations:
        pairs = list(zip(row["input_ids"], row["labels"], strict=True))
        for is_counted, part in itertools.groupby(pairs, lambda pair: pair[1] != -100):
            tokens = [token for token, _ in part][-3:]
            if is_counted:
                ends.add(next((token for token in reversed(tokens) if token in special), tokens[-1]))
    return {tokenizer.convert_ids_to_tokens(token): token for token in sorted(ends)}


def generation_of(model: str) -> dict:
    """How the generation config of a model differs from transformers' defaults, {} if it has none on this machine."""
    try:
        config = GenerationConfig.from_pretrained(model, local_files_only=True)
    except OSError:
        return {}
    return config.to_diff_dict()


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict:
    """What equal tokenizers share: special tokens with their ids, and checksums of the vocabulary and the chat template."""
    names = ("bos", "eos", "pad", "unk")
    special = {name: [getattr(tokenizer, f"{name}_token"), getattr(tokenizer, f"{name}_token_id")] for name in names}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    texts = {"vocabulary": json.dumps(vocabulary), "chat_template": json.dumps(tokenizer.chat_template)}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts.items()}
    return {"special_tokens": special, **digests}
