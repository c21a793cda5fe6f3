"""gpt2_xl_wikitext: packing with the plain Trainer, the report of every node, fp16 with float32 weights."""

import pytest
import torch
from conftest import slow
from runs import merge
from safetensors.torch import load_file
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


@slow
def test_saved_model_is_not_rounded(rehearse, tmp_path):
    """The weights may still be all-gathered in fp16 after an evaluation; the saved ones are those of the float32 checkpoint."""
    run = rehearse("gpt2_xl_wikitext", "3xt4_shard_grad_op")
    merge(run / "checkpoint-6", tmp_path / "merged")
    saved, merged = (load_file(next(folder.glob("model*.safetensors"))) for folder in (run, tmp_path / "merged"))
    assert saved.keys() == merged.keys() and all(torch.equal(saved[name], weight) for name, weight in merged.items())
    assert any((weight != weight.half().float()).any() for weight in saved.values())
