"""Recipes that give other trainers than SFTTrainer their rows: the trainer has the tokens of their texts."""

from pathlib import Path

import pytest
from runs import build_trainer, write_rows

OWN = Path(__file__).parent / "own"
TEXTS = [f"The number {number} comes before {number + 1}" for number in range(40)]


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
