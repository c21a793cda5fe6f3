"""Rows that a recipe leaves to SFTTrainer are tokenized by it; other trainers get the rows that the recipe makes."""

from pathlib import Path

from harness.commands.verify import read_held_out

import pytest
from runs import build_trainer, write_rows

OWN = Path(__file__).parent / "own"
TEXTS = [f"The number {number} comes before {number + 1}" for number in range(40)]


def test_rows_that_sft_trainer_tokenizes(fork_launch, workdir, tmp_path):
    """A line says so; --preview and --verify have its rows."""
    process = fork_launch("--tiny", OWN / "mapped_rows.py", "1x3090", "--max_steps", 2, "--output_dir", tmp_path, cwd=workdir)
    assert process.returncode == 0 and "SFTTrainer tokenizes the rows" in process.stdout, process.stdout + process.stderr
    (documents,) = read_held_out(tmp_path).documents.values()
    assert len(documents) == 16 and all(labels[0] == -100 != labels[-1] for _, labels, *_ in documents)
    process = fork_launch("--preview", "--tiny", OWN / "mapped_rows.py", cwd=workdir)
    assert process.returncode == 0 and "⟦" in process.stdout, process.stdout + process.stderr


def test_stream_that_sft_trainer_tokenizes(tmp_path, error_of):
    """It would resume at another row."""
    from harness.run.training import check_rows_of_trl

    trainer = build_trainer(str(OWN / "mapped_rows.py"), tmp_path)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    assert error_of(check_rows_of_trl, trainer).startswith("--dataset_streaming: ")


@pytest.mark.parametrize("recipe", ["preferences", "weighed"])
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
