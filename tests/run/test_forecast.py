"""A run on GPUs is compared with its forecast, which is made while it trains."""

import json
import os
import subprocess
import sys

from harness.launched import Launched
from harness.run.forecast import describe_forecast, read_forecast
from harness.start import launch

import pytest
from conftest import ROOT, slow, wait_until
from local_hub import serve

RECIPE = "qwen2_fineweb_edu"
PLAN = {
    "peak_gpu_gb": 10.0,
    "reserved_gb": 12.0,
    "peak_host_gb": 8.0,
    "tokens_per_step": 16_384,
    "tokens_per_second": {"RTX 3090": [6_000, 12_000], "T4": [900, 1_800]},
    "step_seconds": {"RTX 3090": [1.365, 2.731], "T4": [9.0, 18.0]},
}
RESULTS = {
    "peak_gpu_gb": 10.4,
    "peak_gpu_reserved_gb": 12.5,
    "peak_host_gb": 8.4,
    "tokens": 163_840,
    "global_step": 10,
    "tokens_per_second": 8_000.0,
    "gpu_utilization": [97.0],
}


@pytest.fixture
def forecast(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return read_forecast(tmp_path, "NVIDIA GeForce RTX 3090")


def test_small_differences_are_numbers(forecast):
    assert describe_forecast(RESULTS | {"forecast": forecast}) == [
        "GB per GPU: 10.4 measured, 10.0 forecast (+4%)",
        "GB reserved: 12.5 measured, 12.0 forecast (+4%)",
        "GB host: 8.4 measured, 8.0 forecast (+5%)",
        "seconds per step: 2.05 measured, 1.36–2.73 forecast on RTX 3090",
    ]


@pytest.mark.parametrize(
    ("measured", "line", "reason"),
    [
        ({"peak_gpu_gb": 11.5}, 0, "the simulation lacks something"),
        ({"peak_gpu_gb": 7.0, "tokens": 81_920}, 0, "the steps had 8,192 tokens, and the forecast assumes 16,384"),
        ({"tokens_per_second": 4_000.0, "gpu_utilization": [99.0, 60.0]}, -1, "busy for 60 % of the time only: --profile"),
        ({"tokens_per_second": 4_000.0}, -1, "the GPUs were busy"),
        ({"tokens": 81_920}, -1, "the steps had 8,192 tokens"),
    ],
    ids=["more memory", "less memory", "GPU waits", "GPU is slow", "short rows"],
)
def test_large_differences_are_explained(forecast, measured, line, reason):
    lines = describe_forecast(RESULTS | {"forecast": forecast} | measured)
    assert reason in lines[line]
    assert sum(";" in text for text in lines) == (2 if "tokens" in measured and "peak_gpu_gb" in measured else 1)


def test_unknown_utilization_explains_nothing(forecast):
    lines = describe_forecast(RESULTS | {"forecast": forecast, "tokens_per_second": 4_000.0, "gpu_utilization": []})
    assert lines[-1] == "seconds per step: 4.10 measured, 1.36–2.73 forecast on RTX 3090"


def test_card_that_is_not_known(tmp_path, forecast):
    unknown = read_forecast(tmp_path, "NVIDIA RTX A6000")
    assert unknown["card"] is None and len(describe_forecast(RESULTS | {"forecast": unknown})) == 3
    (tmp_path / "plan.json").write_text('{"refused": "a reason"}')
    assert read_forecast(tmp_path, "Tesla T4") is None
    (tmp_path / "plan.json").write_text("{")
    assert read_forecast(tmp_path, "Tesla T4") is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('echo "$NNODES $NPROC_PER_NODE $*"', "2 4 -m harness.plan.command --forecast r.py c.yaml --json --max_steps 3\n"),
        ("echo half; sleep 0.5; exit 2", None),
        ("echo half; sleep 60", None),
    ],
    ids=["complete", "refused", "longer than the run"],
)
def test_plan_is_written_when_it_is_complete(tmp_path, monkeypatch, script, expected):
    """With a program in place of Python."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    launched = Launched(recipe="r.py", config="c.yaml", processes=8, nodes=2)
    draft, plan = tmp_path / f".plan.{os.getpid()}.draft", tmp_path / "plan.json"
    plan.write_text("of an earlier start")
    with launch.forecast_in_background(launched, ["--mirror", "file:///mirror", "--max_steps", "3"], tmp_path):
        wait_until(lambda: draft.exists() or plan.exists(), 20, lambda: "no draft")
        if "sleep 60" not in script:
            wait_until(lambda: not draft.exists(), 20, lambda: "an incomplete draft")
    assert (plan.read_text() if plan.exists() else None) == expected and not draft.exists()


START_FORECAST = """
import os, signal, sys
from pathlib import Path
from harness.launched import Launched
from harness.start import launch
sys.executable = sys.argv[1]
with launch.forecast_in_background(Launched(recipe="r.py", config="c.yaml", processes=1), [], Path(sys.argv[2])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_run_leaves_no_plan(tmp_path):
    """The plan of a killed run could be moved into place after the next start, which may have other flags."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nsleep 1; echo '{{}}'; touch {tmp_path}/simulated\n")
    program.chmod(0o755)
    variables = os.environ | {"PYTHONPATH": str(ROOT / "recipes")}
    subprocess.run([sys.executable, "-c", START_FORECAST, program, tmp_path], env=variables, timeout=60)
    wait_until((tmp_path / "simulated").exists, 20, lambda: "no simulation")
    wait_until(lambda: not list(tmp_path.glob(".plan*")), 20, lambda: str(list(tmp_path.iterdir())))
    assert not (tmp_path / "plan.json").exists()


def test_rehearsal_and_run_on_cpu_have_no_forecast(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *arguments, **options: pytest.fail("a simulation was started"))
    for other in (Launched(recipe="r", config="c", tiny=True), Launched(recipe="r", config="c", on_cpu=True)):
        with launch.forecast_in_background(other, [], tmp_path):
            pass


REHEARSED = {
    "tokens": 2_000,
    "global_step": 4,
    "weights_mb": 0.8,
    "optimizer_mb": 0.0,
    "peak_mb": 33.0,
    "peak_host_gb": 0.6,
    "forecast": {"tokens_per_step": 512, "weights_mb": 0.8, "optimizer_mb": 0.0, "peak_mb": 30.0, "peak_host_gb": 2.5},
}


def test_rehearsal_against_its_forecast():
    tokens, weights, states, peak, host = describe_forecast(REHEARSED)
    assert (
        tokens
        == "tokens per step: 500 measured, 512 forecast; some rows are shorter than the maximum, which the forecast assumes"
    )
    assert weights.endswith("0.800 measured, 0.800 forecast (+0.0%)") and states.endswith("0.000 measured, 0.000 forecast")
    assert peak == "MB of process 0, peak of a step: 33.000 measured, 30.000 forecast (+10.0%)"
    assert host.startswith("GB host: 0.6 measured, 2.5 forecast; ")
    one_step = {name: value for name, value in REHEARSED.items() if name not in ("optimizer_mb", "peak_mb")}
    assert len(describe_forecast(one_step)) == 3


def test_rehearsal_is_simulated_before_it_trains(tmp_path, monkeypatch):
    """With a program in place of Python."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nsleep 0.3; echo "$NNODES $NPROC_PER_NODE $*"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    launched = Launched(recipe="r.py", config="c.yaml", processes=8, tiny=True, on_cpu=True)
    with launch.forecast_in_background(launched, ["--forecast", "--max_steps", "3"], tmp_path):
        made = (tmp_path / "plan.json").read_text()
    assert made == "1 8 -m harness.plan.command --forecast --tiny r.py c.yaml --json --forecast --max_steps 3\n"


def test_simulated_peak_is_that_of_the_rehearsal(fork_launch, launch, tmp_path):
    """The tiny model and optimizer to the byte, the largest memory of a step to a percent; also in --report."""
    folder = str(tmp_path / "run")
    process = fork_launch(
        "--tiny", RECIPE, "1x3090", "--forecast", "--max_steps", "2", "--eval_strategy", "no", "--output_dir", folder
    )
    results = json.loads((tmp_path / "run/train_results.json").read_text())
    forecast = results["forecast"]
    assert results["weights_mb"] == forecast["weights_mb"] and results["optimizer_mb"] == forecast["optimizer_mb"]
    assert forecast["optimizer_mb"] == pytest.approx(2 * forecast["weights_mb"], abs=0.001), "Adam has two moments"
    assert results["peak_mb"] == pytest.approx(forecast["peak_mb"], rel=0.01)
    assert results["tokens"] / 2 == forecast["tokens_per_step"]
    assert "MB of process 0, peak of a step" in process.stdout
    assert f"{folder}, against its own forecast:\ntokens per step: " in launch("--report", folder).stdout


@slow
def test_forecast_of_a_real_recipe(tmp_path, environment, monkeypatch):
    with serve(ROOT / "tests/published") as hub:
        for name in ("HF_HOME", "HF_HUB_DISABLE_TELEMETRY"):
            monkeypatch.setenv(name, environment[name])
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "recipes")]))
        recipe, config = ROOT / "recipes/qwen2_fineweb_edu.py", ROOT / "accelerate_configs/1x3090.yaml"
        launched = Launched(recipe=str(recipe), config=str(config), processes=1)
        with launch.forecast_in_background(launched, ["--max_length", "256"], tmp_path):
            wait_until((tmp_path / "plan.json").exists, 200, lambda: "no plan")
    found = read_forecast(tmp_path, "NVIDIA GeForce RTX 3090")
    assert found["card"] == "RTX 3090" and found["tokens_per_step"] == 16 * 256 and 2 < found["peak_gpu_gb"] < 13
