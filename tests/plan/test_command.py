"""`launch.sh --plan` as a person calls it."""

import json
import re
import shutil

from harness.rehearsal import tiny_model

import pytest
from conftest import ROOT, is_one_line
from transformers import AutoTokenizer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--plan needs a RECIPE"]),
        (["qwen2_chatt"], ["no recipe is called 'qwen2_chatt'", "qwen2_chat"]),
        (["qwen2_chat", "1x3091"], ["no config is called '1x3091'", "1x3090"]),
        (["qwen2_chat", "1x3090", "--max_lenght", "5"], ["unknown flag --max_lenght", "--max_length"]),
        (["qwen2_chat", "1x3090", "--price_per_gpu_hour", "cheap"], ["--price_per_gpu_hour is cheap, expected a number"]),
        (["qwen2_chat", "1x3090", "--price_per_gpu_hour"], ["--price_per_gpu_hour needs a number"]),
    ],
)
def test_mistakes_are_one_line(launch, arguments, words):
    is_one_line(launch("--plan", *arguments), *words)


@pytest.fixture
def mine(tmp_path):
    """A model's config and tokenizer without weights, and rows of one's own."""
    tiny_model.make_tokenizer(tiny_model.FAMILIES["Qwen/Qwen2-0.5B*"]).save_pretrained(tmp_path / "model")
    shutil.copy(ROOT / "tests/published/models/Qwen/Qwen2-0.5B/config.json", tmp_path / "model")
    rows = ({"instruction": f"Count to {number}.", "input": "", "output": "One, two. " * 15} for number in range(1000))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--model_name_or_path", "./model", "--dataset_name", "rows.jsonl", "--num_train_epochs", "2"]


def test_hours_and_money_of_epochs(launch, mine, tmp_path):
    """Steps by the recipe's own rows, in hours and in money."""
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    tokens = [
        len(tokenizer(f"### Instruction\n{row['instruction']}\n\n### Python\n{row['output']}")["input_ids"]) + 1 for row in rows
    ]
    steps = 2 * 0.9 * sum(tokens) / (16 * 2048)  # a tenth is held out
    process = launch("--plan", "llama31_8b_lora", "1x3090", *mine, "--price_per_gpu_hour", "100", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    about = int(re.search(r"^the run +about (\d+) steps, by the first rows", process.stdout, re.MULTILINE)[1])
    assert steps > 2 and abs(about - steps) <= 1.5, (about, steps)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in process.stdout.splitlines() if line[:1] == "|"]
    card = next(dict(zip(table[0], row, strict=True)) for row in table if row[0] == "L4")
    step, hours, price = ([float(end) for end in card[name].split("–")] for name in ("s a step", "hours", "price"))
    for end in (0, 1):
        assert hours[end] == pytest.approx(about * step[end] / 3600, abs=0.1)
        assert price[end] == pytest.approx(100 * about * step[end] / 3600, rel=0.1, abs=1)
    assert (tmp_path / "plan.png").stat().st_size > 10_000 and "error" not in process.stderr
