"""Plans of trainers that are no recipe of this project, and of models that a trainer holds next to the one it trains."""

import json
from types import SimpleNamespace

from planner import command, processes, simulation
from planner.cache import simulation_of
from planner.ledger import Ledger

import pytest
import torch
from conftest import ROOT
from runs import tiny_tokenizer
from test_cards import found_with
from torch._subclasses.fake_tensor import FakeTensorMode

OWN = ROOT / "tests/recipes/own"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "max_window_layers": 8, "num_attention_heads": 2}
TRAINERS = ("kto", "rloo", "translate")
REFERENCE = 2 * 494_032_768  # bytes in bf16, from the number of parameters on the model's page on the Hub


@pytest.fixture(scope="module")
def found(simulate, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer("Qwen/Qwen2-0.5B").save_pretrained(folder)
    config = json.loads((ROOT / "tests/published/models/Qwen/Qwen2-0.5B/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SIZES))
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "The number {number} comes before {number + 1}"}}\n' for number in range(24)))
    flags = ["--model_name_or_path", folder, "--dataset_name", rows]
    one, four = (ROOT / f"accelerate_configs/{name}.yaml" for name in ("1x3090", "4gpu_full_shard"))
    (folder / "rloo.py").write_text((OWN / "rewards.py").read_text().replace("GRPO", "RLOO"))
    recipes = [OWN / "kto.py", folder / "rloo.py", OWN / "translate.py"]
    runs = {name: (recipe, one, flags, "cuda to the end") for name, recipe in zip(TRAINERS, recipes, strict=True)}
    dpo = ROOT / "recipes/qwen3_dpo.py", ["--use_peft", "false", "--model_name_or_path", "Qwen/Qwen2-0.5B-Instruct"], "cuda"
    runs["reference"], runs["sharded reference"] = ((dpo[0], config, *dpo[1:]) for config in (one, four))
    runs["teacher"] = (OWN / "distill.py", one, ["--dataset_name", "trl-lib/Capybara"], "cuda")
    return dict(zip(runs, map(simulation_of, simulate(runs.values())), strict=True))


def held(simulation: simulation.Simulation, name: str) -> dict[str, int]:
    """Bytes of a holder on the GPU at the peak of each moment."""
    return {moment: peak.by_holder.get(name, 0) for moment, peak in simulation.peaks.items()}


def test_reference_model_is_a_part_of_its_own(found):
    """On the GPU whole, or sharded: TRL shards it as one unit, which is gathered as a whole."""
    sizes = held(found["reference"], "ref_model")
    for moment in ("forward", "backward", "optimizer step"):
        assert sizes[moment] == pytest.approx(REFERENCE, rel=1e-3), moment
    assert held(found["reference"], "weights")["forward"] == pytest.approx(2 * REFERENCE, rel=1e-3), "trained in float32"
    run = found["sharded reference"]
    assert held(run, "ref_model")["forward"] == pytest.approx(REFERENCE / 4, rel=1e-2)
    assert held(run, "gathered")["forward"] >= REFERENCE
    assert run.copies == 4, "every process loads it, and the model, from their files"


def test_teacher_of_an_own_trainer(found):
    sizes = held(found["teacher"], "teacher")
    assert sizes["backward"] == sizes["forward"] == pytest.approx(2 * REFERENCE, rel=1e-3), "in float32"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_has_a_plan(found, trainer):
    peaks = found[trainer].peaks
    assert peaks["backward"].bytes > peaks["load"].bytes > 0 and "evaluation" in peaks


def test_process_that_simulates_has_one_thread(monkeypatch):
    """A fork of it would never end."""
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
        assert command.with_steps(generating, lambda rows=rows: rows) == generating
