"""`launch.sh --plan` as a user calls it."""

import json
import re
import shutil
import subprocess
import sys

from harness.plan import cards, command
from harness.rehearsal import tiny

import pytest
from conftest import ROOT, assert_one_error, slow
from torch._subclasses import fake_tensor
from transformers import AutoTokenizer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--plan", "RECIPE"]),
        (["qwen2_chatt"], ["unknown recipe: qwen2_chatt", "mean qwen2_chat?"]),
        (["qwen2_chat", "1x3091"], ["unknown config: 1x3091", "mean 1x3090?"]),
        (["qwen2_chat", "1x3090", "--max_lenght", "5"], ["unknown flag --max_lenght", "--max_length"]),
        (["qwen2_chat", "--fo", "2x3090"], ["unknown flag --fo", "did you mean --for?"]),
        (["qwen2_chat", "1x3090", "--tiny"], ["--plan is about the full size: leave out --tiny"]),
        (["qwen2_chat", "1x3090", "--price_per_gpu_hour", "cheap"], ["--price_per_gpu_hour is 'cheap', expected a number"]),
        (["qwen2_chat", "1x3090", "--price_per_gpu_hour", "0"], ["--price_per_gpu_hour is '0', expected a number"]),
        (["qwen2_chat", "1x3090", "--price_per_gpu_hour"], ["--price_per_gpu_hour needs a number"]),
        (["qwen2_chat", "1x3090", "--card"], ["--card is ''", "expected NAME=GB,TFLOPS,GB/s"]),
        (["qwen2_chat", "1x3090", "--card", "A6000=48,155"], ["--card is 'A6000=48,155'", "--card A6000=48,155,768"]),
        (["qwen2_chat", "1x3090", "--card=A6000=48,155,fast"], ["--card is 'A6000=48,155,fast'"]),
        (["qwen2_chat", "1x3090", "--card", "=48,155,768"], ["--card is '=48,155,768'"]),
        (["qwen2_chat", "1x3090", "--card", "A6000=48,-1,768"], ["three numbers above 0"]),
        (["qwen2_chat", "1x3090", "--card", "A6000=48,155,inf"], ["three numbers above 0"]),
    ],
)
def test_mistake_is_one_error(launch, arguments, words):
    assert_one_error(launch("--plan", *arguments), *words)


@pytest.mark.parametrize("words", [["--plan", "--help"], ["--plan", "qwen2_chat", "--help"], ["--preview", "--help"]])
def test_help_after_a_command(launch, words):
    process = launch(*words)
    assert process.returncode == 0 and process.stdout == launch("--help").stdout and "--within 2h" in process.stdout


def test_what_no_config_can_simulate_is_one_error(environment):
    paths = [ROOT / "recipes/qwen2_chat.py", *(ROOT / f"accelerate_configs/{name}.yaml" for name in ("1x3090", "4gpu_ddp"))]
    command = [sys.executable, "-m", "harness.plan.command", *paths, "--json", "--model_name_or_path", "./nowhere"]
    variables = environment | {"PYTHONPATH": str(ROOT / "recipes")}
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert_one_error(process, "qwen2_chat cannot be simulated with any config: ", "./nowhere")


def test_library_of_other_version_is_one_error(monkeypatch, error_of):
    """The modules of a simulation import private names of torch."""
    monkeypatch.delattr(fake_tensor, "FakeTensorMode")
    for name in ("fakes", "simulation", "cards", "pages"):
        monkeypatch.delitem(sys.modules, f"harness.plan.{name}", raising=False)
    monkeypatch.setattr(command.processes, "import_libraries", lambda: True)
    message = error_of(command.main, str(ROOT / "recipes/qwen2_chat.py"), str(ROOT / "accelerate_configs/1x3090.yaml"))
    assert "FakeTensorMode" in message and "requirements.txt" in message


@pytest.fixture
def own_files(tmp_path):
    """A model's config and tokenizer without weights, and a dataset; returns their flags."""
    tiny.make_tokenizer(tiny.FAMILIES["Qwen/Qwen2-0.5B*"]).save_pretrained(tmp_path / "model")
    shutil.copy(ROOT / "tests/published/models/Qwen/Qwen2-0.5B/config.json", tmp_path / "model")
    rows = ({"instruction": f"Count to {number}.", "input": "", "output": "One, two. " * 15} for number in range(1000))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--model_name_or_path", "./model", "--dataset_name", "rows.jsonl", "--num_train_epochs", "2"]


@slow
def test_hours_and_price_of_epochs(launch, own_files, tmp_path):
    """The number of steps follows from the recipe's rows."""
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    texts = [f"### Instruction\n{row['instruction']}\n\n### Python\n{row['output']}" for row in rows]
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)
    steps = 2 * 0.9 * tokens / (16 * 2048)  # a tenth is held out
    process = launch(
        "--plan",
        "llama31_8b_lora",
        "1x3090",
        *own_files,
        "--price_per_gpu_hour",
        "100",
        "--card",
        "A6000=48,155,768",
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    planned = int(re.search(r"^the run +about ([\d,]+) steps, estimated", process.stdout, re.MULTILINE)[1])
    assert steps > 2 and abs(planned - steps) <= 1.5, (planned, steps)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in process.stdout.splitlines() if line[:1] == "|"]
    card = next(dict(zip(table[0], row, strict=True)) for row in table if row[0] == "L4")
    seconds, hours, price = ([float(end) for end in card[name].split("–")] for name in ("s per step", "hours", "price"))
    for end in (0, 1):
        assert hours[end] == pytest.approx(planned * seconds[end] / 3600, rel=0.06)  # two digits
        assert price[end] == pytest.approx(100 * planned * seconds[end] / 3600, rel=0.1, abs=1)
    assert [row[0] for row in table[2:]] == ["A6000", *(card.name for card in cards.CARDS)]
    assert table[2][1].startswith("yes, ") and "no" not in table[2][1]
    assert (tmp_path / "plan.png").stat().st_size > 10_000 and "error" not in process.stderr
