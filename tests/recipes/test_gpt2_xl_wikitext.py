"""gpt2_xl_wikitext: packing with the plain Trainer, the report of every node, fp16 with float32 weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM


def test_packing_and_loss(build_trainer):
    trainer = build_trainer("gpt2_xl_wikitext", "--fp16", "false", "--max_samples", "20")
    assert len({token for row in trainer.train_dataset for token in row["input_ids"]}) > 100
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    assert max(lengths) <= 128 and sum(lengths) / (128 * len(lengths)) > 0.9
    end = trainer.processing_class.eos_token_id
    texts = [row["input_ids"] for row in trainer.train_dataset]
    assert sum(ids.count(end) for ids in texts) == 20  # each text of more than 50 characters, once

    # The trainer's loss of a packed row is the mean over its documents, each given to the plain model alone.
    row = next(row for row in trainer.train_dataset if len(row["seq_lengths"]) > 1 and min(row["seq_lengths"]) > 4)
    trainer.model.eval()
    batch = trainer._prepare_inputs(trainer.data_collator([row]))
    total, count, start = 0.0, 0, 0
    plain = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path, dtype=torch.float32).eval()
    for length in row["seq_lengths"]:
        ids = torch.tensor([row["input_ids"][start : start + length]])
        total += plain(input_ids=ids, labels=ids).loss.item() * (length - 1)
        count, start = count + length - 1, start + length
    with torch.no_grad():
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(total / count, rel=1e-4)
