"""Rows that a recipe leaves to SFTTrainer to tokenize are refused; other trainers get the rows that the recipe makes."""

from pathlib import Path

import pytest
from runs import build_trainer, write_rows

OWN = Path(__file__).parent / "own"
NEW_LINE = "train_dataset, eval_dataset = tokenize(train_dataset, eval_dataset, tokenizer, training_args)"
TEXTS = [f"The number {number} comes before {number + 1}" for number in range(40)]


@pytest.mark.parametrize("recipe", ["raw_rows", "mapped_rows"])
def test_rows_without_tokens_for_sft_trainer(fork_launch, workdir, tmp_path, recipe):
    """The message names the line that the recipe needs. Nothing is trained, nothing is written."""
    process = fork_launch("--tiny", OWN / f"{recipe}.py", "1x3090", "--output_dir", tmp_path / "run", cwd=workdir)
    assert process.returncode == 2 and "Traceback" not in process.stderr, process.stdout + process.stderr
    (message,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert f"{recipe}.py" in message and NEW_LINE in message
    assert "Training " not in process.stdout and not list(tmp_path.glob("run/checkpoint-*"))


@pytest.mark.parametrize("recipe", ["preferences", "weighed", "tagger"])
def test_rows_of_other_trainers(tmp_path, recipe):
    """A recipe that makes its rows, or whose trainer does, needs no other line: its tokens are those of its own texts."""
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    trainer = build_trainer(str(OWN / f"{recipe}.py"), tmp_path / "run", "--dataset_name", str(path))
    encode, end = trainer.processing_class.encode, trainer.processing_class.eos_token_id
    rows = [*trainer.train_dataset, *trainer.eval_dataset]
    if recipe == "preferences":
        found = sorted(row["chosen_ids"] for row in rows)
        assert found == sorted([*encode(f" {text}"), end] for text in TEXTS)
    else:
        assert sorted(row["input_ids"] for row in rows) == sorted(encode(text) for text in TEXTS)
