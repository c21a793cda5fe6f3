"""Python code that comes with a model does not run, and nothing asks on standard input whether it may."""

import json
import shutil

import numpy
import pytest
from payloads import ran, write_model_with_code
from safetensors.numpy import save_file

COMMANDS = {
    "rehearsal": "--tiny qwen2_fineweb_edu 1x3090 --model_name_or_path model",
    "rehearsal of a recipe that loads the model": "--tiny gpt2_xl_wikitext 3xt4_full_shard --model_name_or_path model",
    "full size": "qwen2_fineweb_edu 1x3090 --use_cpu --bf16 false --dataset_name rows.jsonl --model_name_or_path model",
    "plan": "--plan qwen2_fineweb_edu 1x3090 --model_name_or_path model",
    "preview": "--preview qwen2_fineweb_edu --dataset_name rows.jsonl --model_name_or_path model",
    "prepare": "--prepare qwen2_fineweb_edu --dataset_name rows.jsonl --model_name_or_path model",
    "chat": "--chat ./run",
    "verify": "--verify ./verified ./model",
    "merge": "--merge ./adapter",
}


@pytest.fixture
def folder(tmp_path):
    """A model with code; a run that has saved one, and the adapter of one."""
    write_model_with_code(tmp_path / "model", tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n' * 50)
    shutil.copytree(tmp_path / "model", tmp_path / "run")
    (tmp_path / "run/train_results.json").write_text('{"global_step": 1, "epoch": 1.0, "final_loss": 1.0}')
    (tmp_path / "run/run.json").write_text('{"recipe": "mine", "config": "1x3090", "tiny": false, "data_files": []}')
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "model"), "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    for file in ("adapter/adapter_model", "model/model"):
        save_file({"weight": numpy.zeros(1)}, tmp_path / f"{file}.safetensors")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_code_of_a_model_does_not_run(fork_launch, rehearse, folder, command):
    """Standard input answers yes to every question."""
    if "verified" in command:
        (folder / "verified").symlink_to(rehearse("qwen2_fineweb_edu", "1x3090"))
    (folder / "answers").write_text("yes\n" * 99)
    process = fork_launch(*command.split(), cwd=folder, STDIN=str(folder / "answers"))
    assert process.returncode == 2 and "error: " in process.stderr.splitlines()[-1], process.stdout + process.stderr
    assert "brings Python code of its own" in process.stderr.splitlines()[-1]
    assert "Do you wish to run" not in process.stdout and ran(folder) == []
