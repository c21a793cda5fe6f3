"""The preview shows what trains and what does not, counts it, and warns of what would teach something else."""

import json
import re
import runpy
import sys
from types import SimpleNamespace

from harness.commands import first_rows, preview
from harness.launched import Checked
from harness.rehearsal import tiny_model

import pytest
import torch
from conftest import RECIPES, ROOT
from transformers import PreTrainedModel
from trl import SFTTrainer


@pytest.fixture
def show(workplace, monkeypatch, capsys):
    """Runs a recipe on its stand-ins as `--preview --tiny` does, in this process; returns exit code, output and warnings."""

    def call(recipe, *flags):
        for cls, name in ((PreTrainedModel, "from_pretrained"), (SFTTrainer, "_prepare_dataset")):
            monkeypatch.setattr(cls, name, getattr(cls, name))  # put back afterwards
        monkeypatch.setattr(first_rows, "found", SimpleNamespace(data=None, totals={}, whole={}, is_chat=False))
        monkeypatch.chdir(workplace)
        path = str(ROOT / f"recipes/{recipe}.py")
        launched = {"recipe": path, "tiny": True, "on_cpu": True, "checking": True, "command": "preview"}
        monkeypatch.setenv("RECIPE_LAUNCH", json.dumps(launched))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys, "argv", [path, *flags])
        capsys.readouterr()
        with pytest.raises((Checked, SystemExit)) as ended:
            runpy.run_path(path, run_name="__main__")
        said = capsys.readouterr()
        return getattr(ended.value, "code", 0), said.out, said.err

    return call


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
def test_every_recipe(show, recipe):
    code, out, warnings = show(recipe)
    assert code == 0 and "warning" not in warnings, warnings
    assert "--- a row of" in out and "an epoch" in out and "steps" in out.split("an epoch")[1]
    shares = {name: float(share) for name, share in re.findall(r"^(\w+) +([\d.]+)%", out, re.MULTILINE)}
    assert shares["padding"] == 0
    assert shares["trains"] > 98 if recipe in ("qwen2_fineweb_edu", "gpt2_xl_wikitext") else 5 < shares["trains"] < 100


def test_what_trains_stands_in_brackets(show):
    """What the assistant says and the end of its turn, and nothing else."""
    out = show("qwen2_chat")[1]
    rows = out.split("--- a row of")[1:]
    assert len(rows) == preview.SHOWN
    for trained in out.split("The first rows")[1].split("⟦")[2:]:
        assert trained.count("⟧") == 1 and "<|im_start|>" not in trained.split("⟧")[0]
    assert "◆<|im_start|>assistant\n⟦" in out and "◆<|im_end|>⟧" in out


def test_rows_in_which_nothing_trains(show):
    code, _, warnings = show("llama31_8b_lora", "--max_length", "8")
    assert code == 1 and "documents nothing trains" in warnings


def test_texts_that_are_trained_on_and_evaluated(show, tmp_path):
    for split, texts in (("train", "abcdef"), ("test", "exyz")):
        rows = [{"text": f"A text that begins with {text}, and goes on for some more words. " * 3} for text in texts]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, _, warnings = show("qwen2_fineweb_edu", "--dataset_name", str(tmp_path), "--dataset_streaming", "false")
    assert code == 1 and "1 of 4 documents for evaluation are trained on" in warnings


class TestWarnings:
    @pytest.fixture
    def tokenizer(self):
        return tiny_model.make_tokenizer(tiny_model.FAMILIES["Qwen/Qwen2-0.5B*-Instruct"])

    def warnings(self, tokenizer, train, labels=None):
        trainer = SimpleNamespace(
            model=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None)), args=SimpleNamespace(max_length=64)
        )
        batch = {"input_ids": torch.tensor(train[0][0]), "labels": torch.tensor(labels or train[0][1])}
        return "\n".join(preview._warnings(tokenizer, {"train": train, "eval": []}, train, [batch], trainer))

    def test_a_row_without_an_end(self, tokenizer):
        ids = tokenizer("Some words.")["input_ids"]
        end = [tokenizer.eos_token_id]
        assert not self.warnings(tokenizer, [(ids + end, ids + end)])
        assert "1 of 1 documents have no end token" in self.warnings(tokenizer, [(ids, ids)])
        masked = [*ids, preview.IGNORED]
        assert "1 of 1 documents have no end token" in self.warnings(tokenizer, [(ids + end, masked)], ids + end)

    def test_a_template_without_the_turns_end(self, tokenizer, monkeypatch):
        monkeypatch.setattr(first_rows.found, "is_chat", True)
        row = [tokenizer.eos_token_id] * 3
        tokenizer.chat_template = "{% for m in messages %}### {{ m['role'] }}\n{{ m['content'] }}\n\n{% endfor %}"
        assert "does not end the assistant's turn" in self.warnings(tokenizer, [(row, row)])

    def test_padding_that_takes_the_end_out_of_the_loss(self, tokenizer):
        row = [5, 6, tokenizer.eos_token_id]
        collated = [5, 6, preview.IGNORED]  # as a collator does that masks by the padding's id
        assert not self.warnings(tokenizer, [(row, row)], collated)
        tokenizer.pad_token = tokenizer.eos_token
        assert "--pad_token" in self.warnings(tokenizer, [(row, row)], collated)
        assert not self.warnings(tokenizer, [(row, row)])

    def test_colour(self, tokenizer):
        ids = tokenizer("A question<|im_end|> an answer<|im_end|>")["input_ids"]
        labels = [preview.IGNORED] * 2 + ids[2:]
        plain = preview.painted(tokenizer, ids, labels, colour=False)
        assert plain.count("⟦") == plain.count("⟧") == 1 and plain.count("◆<|im_end|>") == 2
        painted = preview.painted(tokenizer, ids, labels, colour=True)
        assert "\033[90m" in painted and "\033[1;32m<|im_end|>" in painted and "⟦" not in painted
