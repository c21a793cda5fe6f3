"""What `parse` refuses, in one line, before anything is spawned or written."""

import json
import runpy
import sys

import pytest
from conftest import ROOT

RECIPE = "qwen2_fineweb_edu"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([RECIPE, "--max_steps", "1.5"], ["--max_steps", "1.5"]),
        ([RECIPE, "--learning_rate", "high"], ["--learning_rate", "high"]),
        ([RECIPE, "--eval_strategy", "sometimes"], ["sometimes"]),
        ([RECIPE, "--max_steps", "-1"], ["--max_steps", "--max_tokens"]),
        ([RECIPE, "--load_in_4bit"], ["--use_peft"]),
        ([RECIPE, "--hub_token", "hf_secret"], ["hf auth login"]),
        ([RECIPE, "--push_to_hub"], ["hf upload"]),
        ([RECIPE, "--config"], ["--config needs"]),
        ([RECIPE, "stray"], ["stray"]),
        ([RECIPE, "--global_batch_size", "5"], ["--global_batch_size 5", "multiple of 2", "--global_batch_size 4"]),
        ([RECIPE, "--global_batch_size", "1"], ["--global_batch_size 1", "multiple of 2", "--global_batch_size 2"]),
        ([RECIPE, "--global_batch_size", "8", "--gradient_accumulation_steps", "2"], ["give one"]),
        (["--quantize", RECIPE], ["--load_in_4bit"]),
        (["llama31_70b_qlora", "--bf16", "true"], ["--bf16", "destroy"]),
        (["llama31_70b_qlora", "--bnb_4bit_quant_storage", "uint8"], ["uint8", "float32"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_refused_in_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    options = {"quantize": True, "config": ""} if arguments[0] == "--quantize" else {}
    recipe, *flags = arguments[len(options) > 0 :]
    config = "2x3090_qlora" if "70b" in recipe else "1x3090_offload"
    path = str(ROOT / f"recipes/{recipe}.py")
    launched = {"recipe": path, "config": str(ROOT / f"accelerate_configs/{config}.yaml"), "processes": 1}
    launched |= {"tiny": True, "on_cpu": True, "checking": True}
    monkeypatch.setenv("RECIPE_LAUNCH", json.dumps(launched | options))
    monkeypatch.setattr(sys, "argv", [path, *flags])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(path, run_name="__main__")
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.count("\n") == 1 and message.startswith("error: "), message
    assert "hf_secret" not in message
    for word in words:
        assert word in message
    assert not (tmp_path / "outputs/tiny" / recipe).exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 1),  # a rehearsal's own
        (["--per_device_eval_batch_size", "3"], 3),
        (["--per_device_eval_batch_size=3"], 3),
    ],
)
def test_evaluation_batches_are_not_larger_than_those_of_training(build_trainer, flags, expected):
    """Unless a flag says so; transformers' own 8 would be the largest of the run."""
    trainer = build_trainer("qwen2_chat", "--per_device_train_batch_size", "2", *flags)
    assert trainer.args.per_device_eval_batch_size == expected


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], 2),  # a rehearsal's own
        (["--global_batch_size", "12"], 6),
        (["--global_batch_size", "12", "--per_device_train_batch_size", "1"], 12),
        (["--gradient_accumulation_steps", "5"], 5),
    ],
)
def test_the_accumulation_follows_from_the_global_batch(build_trainer, flags, steps):
    assert build_trainer("qwen2_chat", *flags).args.gradient_accumulation_steps == steps


def test_ddp_searches_no_unused_parameters(build_trainer):
    assert build_trainer("qwen2_chat", "--use_peft").args.ddp_find_unused_parameters is False
    assert build_trainer("qwen2_chat", "--ddp_find_unused_parameters", "true").args.ddp_find_unused_parameters is True
