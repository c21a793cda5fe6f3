"""qwen3_dpo: rows of preference data, the reference without the adapter, and the saved adapter's loss."""

import json

from harness.compat.transformers import transformer_layers

import pytest
import torch
from runs import read
from torch.nn.functional import logsigmoid
from trained import reload


def test_prompt_and_answers(build_trainer, tmp_path):
    """Answers end with the end of a turn."""
    row = {"instruction": "Why?", "input": "", "chosen": "So.", "rejected": "No."}
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps(row | {"system": f"Number {number}."}) for number in range(12)))
    trainer = build_trainer("qwen3_dpo", "--dataset_name", str(data), "--eval_strategy", "no", "--eval_on_start", "false")
    tokenizer = trainer.processing_class
    found = {name: tokenizer.decode(trainer.train_dataset[0][f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")}
    assert found["prompt"].split("<|im_end|>\n", 1)[1] == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert (found["chosen"].rstrip(), found["rejected"].rstrip()) == ("So.<|im_end|>", "No.<|im_end|>")


def test_reference_pass_keeps_checkpointing(build_trainer):
    """Its settings, which torch's function does not know, and the hooks of the embedding, in every micro-batch."""
    flags = ["--activation_checkpointing_kwargs", '{"every_n_layers": 2}', "--max_steps", "1", "--eval_strategy", "no"]
    trainer = build_trainer("qwen3_dpo", *flags, "--gradient_accumulation_steps", "3")
    hooks = []
    embedding = trainer.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, inputs: hooks.append(len(module._forward_hooks)))
    trainer.train()
    assert len(hooks) == 6 and set(hooks) == {hooks[0]}  # of the model and of its reference
    assert [layer.gradient_checkpointing for layer in transformer_layers(trainer.model).values()] == [True, False]


def test_saved_adapter_has_the_loss_of_the_run(rehearse, workdir, build_trainer):
    """The loss of its evaluation rows, from a plain model that gets every answer alone, and the base model as reference."""
    run = rehearse("qwen3_dpo", "4gpu_full_shard")
    model, rows = reload(run, workdir), build_trainer("qwen3_dpo").eval_dataset
    losses = []
    for row in rows:
        margin = 0.0
        for name, sign in (("chosen", 1), ("rejected", -1)):
            ids = torch.tensor([(row["prompt_ids"] + row[f"{name}_ids"])[:128]])
            trained = log_probability(model, ids, len(row["prompt_ids"]))
            with model.disable_adapter():
                margin += sign * (trained - log_probability(model, ids, len(row["prompt_ids"])))
        losses.append(-logsigmoid(torch.tensor(0.1 * margin)).item())
    assert sum(losses) / len(losses) == pytest.approx(read(run)["eval_loss"], rel=0.02)


def log_probability(model: torch.nn.Module, ids: torch.Tensor, prompt: int) -> float:
    with torch.no_grad():
        of_all = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return of_all.gather(1, ids[0, 1:, None])[prompt - 1 :].sum().item()
