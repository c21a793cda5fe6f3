"""qwen2_fineweb_edu: packing without padding or truncation, documents that do not attend to each other."""

import torch
from runs import tiny_documents
from transformers import AutoModelForCausalLM

RECIPE = "qwen2_fineweb_edu"


def test_packing_keeps_every_token(build_trainer):
    trainer = build_trainer(RECIPE, "--max_length", "128", "--dataset_streaming", "false", "--max_eval_samples", "100")
    tokenizer = trainer.processing_class
    rows = [*trainer.train_dataset, *trainer.eval_dataset]
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) <= 128 for row in rows)
    packed = sorted(token for row in rows for token in row["input_ids"])
    assert packed == sorted(t for text in tiny_documents() for t in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    assert len(packed) / (128 * len(rows)) > 0.97


def test_documents_do_not_attend_to_each_other(build_trainer):
    """The logits of a document are the same alone and in a packed row, with the attention of the run and with SDPA."""
    trainer = build_trainer(RECIPE, "--max_length", "96", "--bf16", "false")
    model = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path, dtype=torch.float32).eval()
    row = next(row for row in trainer.train_dataset if len(row["seq_lengths"]) >= 2 and min(row["seq_lengths"]) > 8)
    batch = trainer.data_collator([{**row, "labels": row["input_ids"]}])
    with torch.no_grad():
        model.set_attn_implementation(trainer.model.config._attn_implementation)
        in_run = model(**batch, use_cache=False).logits[0]
        model.set_attn_implementation("sdpa")
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        start = 0
        for length in row["seq_lengths"]:
            alone = model(input_ids=batch["input_ids"][:, start : start + length]).logits[0]
            torch.testing.assert_close(packed[start : start + length], alone, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(in_run[start : start + length], alone, atol=1e-5, rtol=1e-4)
            start += length
        mixed = model(input_ids=batch["input_ids"]).logits[0]  # without position_ids that restart, they do attend
    assert (mixed - packed).abs().max() > 1e-3
