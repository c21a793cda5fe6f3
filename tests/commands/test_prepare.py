"""What `--prepare` brings here is all a run needs: the hub is stopped, and the recipe trains."""

import shutil
import subprocess
import sys

from harness.commands import prepare, stream_files

import pytest
from conftest import ROOT, read
from stand_in_hub import serve

BRIEF = ["--max_length", "64", "--max_eval_samples", "4", "--per_device_train_batch_size", "1"]
STREAM = ["--max_tokens", "2_000", *BRIEF]


@pytest.fixture
def hub(starts, workplace, tmp_path):
    """Serves the tiny stand-ins of a recipe under the recipe's own ids."""

    def call(recipe, model, data):
        assert starts("--prepare", "--tiny", recipe).returncode == 0
        for kind, name in (("models", model), ("datasets", data)):
            stand_in = next((workplace / "outputs/tiny/.stand-ins").glob(f"{name.replace('/', '--')}-*"))
            shutil.copytree(stand_in, tmp_path / "hub" / kind / name, dirs_exist_ok=True)
        return serve(tmp_path / "hub")

    return call


@pytest.fixture
def train(environment, tmp_path):
    """Trains as `python recipe.py` on this machine's CPU, with what launch.sh sets where nobody answers."""

    def call(recipe, *flags, **variables):
        command = [sys.executable, ROOT / f"recipes/{recipe}.py", "--use_cpu", *flags]
        variables = environment | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "recipes"), **variables}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    return call


def test_a_stream(hub, launch, train, tmp_path):
    """As many of its files as the budget needs come here; a run that needs more says so."""
    home = {"HF_HOME": str(tmp_path / "cache")}
    with hub("qwen2_fineweb_edu", "Qwen/Qwen2-0.5B", "HuggingFaceFW/fineweb-edu") as server:
        process = launch("--preview", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path, HF_ENDPOINT=server.url, **home)
        assert process.returncode == 0 and "--- a row of" in process.stdout, process.stderr
        assert not any("model.safetensors" in request for request in server.requests)
        process = launch("--prepare", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path, HF_ENDPOINT=server.url, **home)
        assert process.returncode == 0, process.stderr
        assert "To download: model Qwen/Qwen2-0.5B" in process.stdout and "1 of its 8 files" in process.stdout
        assert not (tmp_path / "outputs").exists()
        again = launch("--prepare", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path, HF_ENDPOINT=server.url, **home)
        assert "To download: nothing" in again.stdout
    # Now nobody answers.
    process = train("qwen2_fineweb_edu", *STREAM, **home)
    assert process.returncode == 0, process.stderr
    assert read(tmp_path / "outputs/qwen2_fineweb_edu")["dataset"] == "HuggingFaceFW/fineweb-edu"
    longer = train("qwen2_fineweb_edu", *STREAM, "--max_tokens", "100_000", **home)
    assert longer.returncode == 2 and "too few of its files" in longer.stderr and "--prepare" in longer.stderr


def test_a_data_set_is_tokenized_already(hub, launch, train, tmp_path):
    home, flags = {"HF_HOME": str(tmp_path / "cache")}, ["--max_steps", "2", *BRIEF, "--max_length", "256"]
    with hub("qwen2_chat", "Qwen/Qwen2-0.5B-Instruct", "trl-lib/Capybara") as server:
        process = launch("--prepare", "qwen2_chat", *flags, cwd=tmp_path, HF_ENDPOINT=server.url, **home)
        assert process.returncode == 0, process.stderr
    tokenized = sorted((tmp_path / "cache/datasets").rglob("cache-*.arrow"))
    process = train("qwen2_chat", *flags, **home)
    assert process.returncode == 0, process.stderr
    assert read(tmp_path / "outputs/qwen2_chat")["global_step"] == 2
    assert tokenized and sorted((tmp_path / "cache/datasets").rglob("cache-*.arrow")) == tokenized


def test_what_does_not_fit_is_refused(says, tmp_path):
    folder = tmp_path / "not/yet/there"
    prepare._fits_disk([(folder, 1000), (tmp_path, 1000)])
    assert "are to be written to the disk of" in says(prepare._fits_disk, [(folder, 1000), (tmp_path, 10**18)])
    prepare._fits_memory("some/model", 1000)
    assert "quantizing some/model takes 2003.0 GB of host memory" in says(prepare._fits_memory, "some/model", 10**12)


def test_files_that_do_not_say_how_many_rows_they_hold(says):
    from types import SimpleNamespace

    data = SimpleNamespace(dataset_name="a/stream", dataset_train_split="train")
    message = says(stream_files.choose, data, None, {"train": ["hf://datasets/a/stream@main/train.jsonl.gz"]}, None)
    assert "a/stream" in message and "--dataset_streaming false" in message
