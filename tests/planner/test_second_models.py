"""A model that a trainer holds next to the one it trains is a part of its own in a plan, while it is on the GPU."""

import pytest
from conftest import ROOT

DPO, OWN = ROOT / "recipes/qwen3_dpo.py", ROOT / "tests/recipes/own/distill.py"
ONE, FOUR = ROOT / "accelerate_configs/1x3090.yaml", ROOT / "accelerate_configs/4gpu_full_shard.yaml"
# Bytes in bf16, from the number of parameters on the model's page on the Hub.
REFERENCE = 2 * 494_032_768


@pytest.fixture(scope="module")
def found(simulate) -> dict[str, dict]:
    dpo = ["--use_peft", "false", "--model_name_or_path", "Qwen/Qwen2-0.5B-Instruct"]
    runs = {
        "reference": (DPO, ONE, dpo, "cuda"),
        "sharded reference": (DPO, FOUR, dpo, "cuda"),
        "teacher": (OWN, ONE, ["--dataset_name", "trl-lib/Capybara"], "cuda"),
    }
    return dict(zip(runs, simulate(runs.values()), strict=True))


def held(simulation: dict, name: str) -> dict[str, int]:
    """Bytes of a holder on the GPU at the peak of each moment."""
    return {moment: peak["by_holder"].get(name, 0) for moment, peak in simulation["peaks"].items()}


def test_reference_model_is_on_the_gpu(found):
    sizes = held(found["reference"], "ref_model")
    for moment in ("forward", "backward", "optimizer step"):
        assert sizes[moment] == pytest.approx(REFERENCE, rel=1e-3), moment
    assert held(found["reference"], "weights")["forward"] == pytest.approx(2 * REFERENCE, rel=1e-3), "trained in float32"


def test_reference_model_is_sharded(found):
    """TRL shards it as one unit, which is gathered as a whole."""
    run = found["sharded reference"]
    assert held(run, "ref_model")["forward"] == pytest.approx(REFERENCE / 4, rel=1e-2)
    assert held(run, "gathered")["forward"] >= REFERENCE
    assert run["copies"] == 4, "every process loads it, and the model, from their files"


def test_teacher_of_an_own_trainer(found):
    sizes = held(found["teacher"], "teacher")
    assert sizes["backward"] == sizes["forward"] == pytest.approx(2 * REFERENCE, rel=1e-3), "in float32"
