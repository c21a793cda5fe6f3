"""Trainers of docs/your-recipe.md that are no recipe of this project have a plan too."""

import json
from types import SimpleNamespace

from planner import command, processes, simulation
from planner.cache import simulation_of
from planner.ledger import Ledger

import pytest
import torch
from conftest import ROOT
from runs import tiny_tokenizer
from test_cards import FOUND, found_with
from torch._subclasses.fake_tensor import FakeTensorMode

OWN = ROOT / "tests/recipes/own"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "max_window_layers": 8, "num_attention_heads": 2}
TRAINERS = ("kto", "rloo", "translate")


@pytest.fixture(scope="module")
def found(simulate, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer("Qwen/Qwen2-0.5B").save_pretrained(folder)
    config = json.loads((ROOT / "tests/published/models/Qwen/Qwen2-0.5B/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SIZES))
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "The number {number} comes before {number + 1}"}}\n' for number in range(24)))
    flags = ["--model_name_or_path", folder, "--dataset_name", rows]
    config = ROOT / "accelerate_configs/1x3090.yaml"
    (folder / "rloo.py").write_text((OWN / "rewards.py").read_text().replace("GRPO", "RLOO"))
    recipes = [OWN / "kto.py", folder / "rloo.py", OWN / "translate.py"]
    runs = [(recipe, config, flags, "cuda to the end") for recipe in recipes]
    return dict(zip(TRAINERS, map(simulation_of, simulate(runs)), strict=True))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_has_a_plan(found, trainer):
    peaks = found[trainer].peaks
    assert peaks["backward"].bytes > peaks["load"].bytes > 0 and "evaluation" in peaks


def test_process_that_simulates_has_one_thread(monkeypatch):
    """A fork of it would wait for the others for ever."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processes.call(processes.start_server(), torch.get_num_threads) == (0, 1)


def test_pixels_of_all_micro_batches_are_on_the_gpu():
    """The loader moves those of a whole step there."""
    step = object.__new__(simulation.SimulatedStep)
    step.ledger, step.micro_batches, step.simulation = Ledger(), 1, found_with(accumulation=4)
    step.fakes = SimpleNamespace(mode=FakeTensorMode(), fake=lambda value: value)
    step.batch = {simulation.PIXELS: torch.zeros(512, 2)}
    with step.ledger, step.ledger.within(moment="forward", holder="activations"):
        step.make_batches()
    assert step.ledger.peaks()["forward"].by_holder == {"images": 4 * 512 * 2 * 4}


def test_too_few_prompts_for_a_step(error_of):
    generating = found_with(completion=512, generated_rows=128, processes=1, answers=8)
    assert "--global_batch_size" in error_of(command.with_steps, generating, lambda: 11)
    for rows in (16, "the Hub does not answer"):
        assert command.with_steps(generating, lambda rows=rows: rows).max_steps == FOUND.max_steps
