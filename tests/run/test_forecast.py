"""A run on GPUs is compared with the plan that was made for it."""

import dataclasses
import json

from harness.configs import AccelerateConfig
from harness.contexts import Context
from harness.folder import read_json
from harness.run.forecast import describe_forecast, read_forecast
from harness.start import plans

import pytest
from conftest import ROOT, read

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


@pytest.mark.unit
def test_small_differences_are_numbers(forecast):
    assert describe_forecast(RESULTS | {"forecast": forecast}) == [
        "GB per GPU: 10.4 measured, 10.0 forecast (+4%)",
        "GB reserved: 12.5 measured, 12.0 forecast (+4%)",
        "GB host: 8.4 measured, 8.0 forecast (+5%)",
        "seconds per step: 2.05 measured, 1.36–2.73 forecast on RTX 3090",
    ]


@pytest.mark.unit
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


@pytest.mark.unit
def test_unknown_utilization_explains_nothing(forecast):
    lines = describe_forecast(RESULTS | {"forecast": forecast, "tokens_per_second": 4_000.0, "gpu_utilization": []})
    assert lines[-1] == "seconds per step: 4.10 measured, 1.36–2.73 forecast on RTX 3090"


@pytest.mark.unit
def test_card_that_is_not_known(tmp_path, forecast):
    unknown = read_forecast(tmp_path, "NVIDIA RTX A6000")
    assert unknown["card"] is None and len(describe_forecast(RESULTS | {"forecast": unknown})) == 3
    (tmp_path / "plan.json").write_text('{"refused": "a reason"}')
    assert read_forecast(tmp_path, "Tesla T4") is None
    (tmp_path / "plan.json").write_text("{")
    assert read_forecast(tmp_path, "Tesla T4") is None


@pytest.fixture
def home(environment, monkeypatch):
    """The cache of this process is that of launch.sh in the tests."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", environment["HF_HOME"])


@pytest.mark.unit
def test_plan_is_that_of_the_same_recipe_config_flags_and_processes(tmp_path, home):
    recipe, config = tmp_path / "recipe.py", tmp_path / "config.yaml"
    recipe.write_text("a")
    config.write_text("b")
    run = Context(str(recipe), AccelerateConfig(str(config)), processes=2)
    plans.keep_plan(PLAN, run, ["--max_steps", "3"])

    def copied(context: Context, arguments: list[str]) -> bool:
        (tmp_path / "plan.json").write_text("of an earlier start")
        plans.copy_plan(context, arguments, tmp_path)
        return (tmp_path / "plan.json").exists()

    assert not copied(run, ["--max_steps", "4"]) and not copied(dataclasses.replace(run, processes=4), ["--max_steps", "3"])
    assert not copied(dataclasses.replace(run, tiny=True), ["--max_steps", "3"])
    assert copied(run, ["--output_dir", "some", "--max_steps", "3"])
    assert read_forecast(tmp_path, "Tesla T4")["peak_gpu_gb"] == 10.0
    config.write_text("c")
    assert not copied(run, ["--max_steps", "3"])


@pytest.mark.unit
def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    plans.keep_plan(PLAN, Context(__file__, AccelerateConfig(__file__)), [])
    plans.copy_plan(Context(__file__, AccelerateConfig(__file__)), [], tmp_path)
    assert not (tmp_path / "plan.json").exists()


def test_run_gets_its_plan(fork_launch, workdir, tmp_path, home):
    """It is at full size, with the model and the data of a rehearsal."""
    assert fork_launch("--prepare", "--tiny", "qwen2_chat").returncode == 0
    model, data = (next((workdir / "outputs/tiny/.made").glob(f"{name}-*")) for name in ("Qwen--Qwen2-0.5B-Instruct", "trl-lib*"))
    flags = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--use_cpu", "--max_steps", "1"]
    flags += ["--max_length", "64", "--per_device_train_batch_size", "1", "--max_eval_samples", "2", "--eval_strategy", "no"]
    recipe, config = ROOT / "recipes/qwen2_chat.py", ROOT / "accelerate_configs/1x3090.yaml"
    plans.keep_plan(PLAN, Context(str(recipe), AccelerateConfig(str(config)), processes=1), flags)
    process = fork_launch("qwen2_chat", "1x3090", *flags, "--output_dir", tmp_path / "run")
    assert process.returncode == 0, process.stderr
    assert read_json(tmp_path / "run/plan.json") == PLAN
    assert "forecast" not in read(tmp_path / "run")  # it ran on a CPU
