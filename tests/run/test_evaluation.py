"""The evaluation of a run is a mean over tokens, with evaluation batches of any size and on any number of processes."""

import itertools
import json
import math

from harness.run.losses import EvaluationBatches

import pyarrow.parquet
import pytest
import torch
from runs import history, read
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize(("rows", "size", "processes"), [*itertools.product((0, 1, 5, 11, 16), (1, 2, 8), (1, 2, 4))])
def test_every_row_is_evaluated_once(rows, size, processes):
    """In order, and with as many rows on every process in a step. The last ones, fewer than processes, are on all of them."""
    samplers = [EvaluationBatches(rows, size, processes, process) for process in range(processes)]
    seen = []
    for step, batches in enumerate(zip(*samplers, strict=True)):
        assert len({len(batch) for batch in batches}) == 1 and 0 < len(batches[0]) <= size
        is_shared = step in samplers[0].shared
        assert len(set(batches)) == (1 if is_shared else processes)
        seen += [row for batch in (batches[:1] if is_shared else batches) for row in batch]
    assert seen == list(range(rows)) and all(sampler.shared == samplers[0].shared for sampler in samplers)


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_of_a_chat_is_a_mean_over_tokens(rehearse, tmp_path_factory, processes):
    """Most answers have one word and some have forty: a mean of means of batches would be half of it."""
    path = tmp_path_factory.getbasetemp() / "skewed.jsonl"
    answers = ["yes" if number % 4 else "river stone lamp " * 14 for number in range(96)]
    turns = [
        [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": answer}]
        for number, answer in enumerate(answers)
    ]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    flags = ["--dataset_name", path, "--packing", "false", "--max_length", "128", "--max_eval_samples", "5", "--bf16", "false"]
    flags += ["--per_device_eval_batch_size", "2", "--max_steps", "4", "--eval_steps", "4", "--save_steps", "4"]
    run = rehearse("qwen2_chat", "4gpu_ddp" if processes == 2 else "1x3090", *flags, "--dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    total = count = correct = 0
    for row in pyarrow.parquet.read_table(run / "held_out.parquet").to_pylist():
        if row["conversation"]:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"])[1:]
        total += cross_entropy(logits, labels, reduction="sum").item()
        count += (labels != -100).sum().item()
        correct += (logits.argmax(-1) == labels).sum().item()
    results = read(run)
    assert results["eval_loss"] == pytest.approx(total / count, rel=5e-3)  # the saved weights are bf16
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["loss_is_cross_entropy"] and results["loss_is_mean_over"] == "tokens"
    last = history(run, "eval_loss")[-1]
    assert last["eval_mean_token_accuracy"] == pytest.approx(correct / count, abs=0.02)
