"""`launch.sh --plan` as a user calls it."""

import json
import os
import re
import shutil
import subprocess
import sys

from harness.model import gpu_features
from harness.runs import GpuFeatures, Run
from planner import choose, command, simulation
from planner.grid import Option
from planner.simulation import Refused

import pytest
from conftest import ROOT, slow
from runs import assert_one_error, tiny_tokenizer
from test_cards import FOUND, found_with
from transformers import AutoTokenizer

CONFIG = str(ROOT / "accelerate_configs/1x3090.yaml")
STEPS = ["--max_steps", "10"]  # otherwise a choice asks the Hub for the length of an epoch


def test_trainer_that_cannot_be_simulated(monkeypatch, error_of):
    monkeypatch.setattr(simulation, "simulate", None)  # to call it is a TypeError
    assert "mine.py" in error_of(command.simulate_quietly, Run("/mine.py"), [], False)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["RECIPE.py", "--card=A4000=48,155,inf"], "--card"),
        (["--start", "RECIPE.py"], "CONFIG"),
        (["--start", "RECIPE.py", "--for", "1x3090"], "--for"),
        (["--start", "--tiny", "RECIPE.py", "--json"], "--json"),
        (["RECIPE.py", "--for", ""], "--for"),
    ],
)
def test_mistake_is_one_error(monkeypatch, error_of, words, flag):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert flag in error_of(command.main, *words)


@pytest.mark.parametrize("words", [["--plan", "qwen2_chat"], ["--chat"]], ids=" ".join)
def test_help_of_a_command(launch, tmp_path, words):
    """It needs the standard library only, as before the first installation."""
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    process = launch(*words, "--help", PYTHON=str(tmp_path / "python"))
    assert process.returncode == 0 and process.stdout.startswith(f"usage: ./launch.sh {words[0]}") and not process.stderr


def test_what_cannot_be_simulated_is_one_error(launch, environment):
    paths = [ROOT / "recipes/qwen2_chat.py", *(ROOT / f"accelerate_configs/{name}.yaml" for name in ("1x3090", "4gpu_ddp"))]
    command = [sys.executable, "-m", "planner.command", *paths, "--json", "--model_name_or_path", "./nowhere"]
    variables = environment | {"PYTHONPATH": str(ROOT / "recipes"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert_one_error(process, "qwen2_chat cannot be simulated with any config: ", "./nowhere")
    process = launch("--plan", "qwen2_chat", "1x3090", "--max_lenght", "5", HF_HUB_OFFLINE="1")
    assert_one_error(process, "--max_length")


@pytest.fixture
def own_files(tmp_path):
    """A model's config and tokenizer without weights, and a dataset; returns their flags."""
    tiny_tokenizer("Qwen/Qwen2-0.5B").save_pretrained(tmp_path / "model")
    shutil.copy(ROOT / "tests/published/models/Qwen/Qwen2-0.5B/config.json", tmp_path / "model")
    rows = ({"instruction": f"Count to {number}.", "input": "", "output": "One, two. " * 15} for number in range(1000))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--model_name_or_path", "./model", "--dataset_name", "rows.jsonl", "--num_train_epochs", "2"]


@slow
def test_plan_of_a_config(launch, own_files, tmp_path):
    """The number of steps follows from the recipe's rows."""
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    texts = [f"### Instruction\n{row['instruction']}\n\n### Python\n{row['output']}" for row in rows]
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)
    steps = 2 * 0.9 * tokens / (16 * 2048)  # a tenth is held out
    flags = [*own_files, "--card", "A4000=48,155,768", "--picture"]
    process = launch("--plan", "llama31_8b_lora", "1x3090", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    planned = int(re.search(r"^the run +about ([\d,]+) steps, estimated", process.stdout, re.MULTILINE)[1])
    assert steps > 2 and abs(planned - steps) <= 1.5, (planned, steps)
    rows = re.findall(r"^\| (A4000|RTX 3090) +\| (yes|no)", process.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["A4000", "RTX 3090"] and rows[0][1] == "yes"
    assert (tmp_path / "plan.png").stat().st_size > 10_000 and "error" not in process.stderr


def arguments_for(**options) -> command.PlanArguments:
    return command.PlanArguments(recipe=ROOT / "recipes/qwen2_chat.py", configs=[CONFIG], **options)


@pytest.fixture
def choice(monkeypatch, tmp_path):
    """Replaces the choice and the start of its run; returns what the choice sees of the one GPU, and what is started."""
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "NVIDIA GeForce RTX 3090, 24576, 8.6, 0"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setattr(os, "environ", {"PATH": path, "CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setattr(command, "start_server", lambda: "fork")
    monkeypatch.setattr(gpu_features, "find_gpu_features", lambda: GpuFeatures([], os.environ["CUDA_VISIBLE_DEVICES"]))
    seen = {}

    def find(machine, grid, simulate):
        seen["no_triton"] = grid.run("recipe.py", CONFIG).gpu.no_triton
        seen["hidden"] = os.environ["CUDA_VISIBLE_DEVICES"] == ""
        return [choose.Candidate(Option(CONFIG, 1, False), FOUND, 1.0)]

    monkeypatch.setattr(choose, "choose", find)
    monkeypatch.setattr(choose, "weigh_compiling", None)
    monkeypatch.setattr(os, "execve", lambda path, words, environment: seen.update(words=words, environment=environment))
    return seen


def test_run_after_the_choice_sees_the_gpus(choice, capsys):
    """The choice does not; it knows that Triton cannot be used, which is printed: nothing is compiled."""
    arguments = arguments_for(start=True, flags=STEPS)
    command.plan_choice(arguments)
    assert choice["hidden"] and choice["no_triton"] == "1" and "Triton" in capsys.readouterr().err
    assert choice["words"][3:5] == [str(arguments.recipe), CONFIG]
    assert choice["environment"]["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(("own", "reason"), [([], "1"), ([("A4000", 48.0, 155.0, 768.0)], "")])
def test_plan_of_a_config_knows_that_triton_is_missing(monkeypatch, choice, error_of, own, reason):
    """As the choice does, unless the plan is for another GPU."""
    found = []

    def simulate(method, run, *rest, **options):
        found.append((run.gpu.no_triton, os.environ["CUDA_VISIBLE_DEVICES"]))
        return Refused("1x3090", "too large")

    monkeypatch.setattr(command, "simulate_in_process", simulate)
    error_of(command.plan_configs, arguments_for(cards=own))
    assert found == [(reason, "")]


def test_why_the_number_of_steps_is_not_known(environment, own_files, tmp_path, monkeypatch):
    """There is no tokenizer: the dataset has nothing to do with it."""
    for file in (tmp_path / "model").glob("token*"):
        file.unlink()
    monkeypatch.chdir(tmp_path)
    count = command.row_counter("fork", str(ROOT / "recipes/llama31_8b_lora.py"), own_files)
    assert "tokenizer" in command.with_steps(found_with(max_steps=-1), count).no_steps
