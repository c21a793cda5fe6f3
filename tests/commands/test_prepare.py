"""What `--prepare` brings here is all a run needs: the hub is stopped, and the recipe trains."""

import shutil

from harness.commands import prepare, stream_files

import pytest
from conftest import read
from stand_in_hub import serve
from starts import Starts

BRIEF = ["--max_length", "64", "--max_eval_samples", "4", "--per_device_train_batch_size", "1"]
STREAM = ["--max_tokens", "2_000", *BRIEF]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def hub(home):
    with serve(home / "hub") as server:
        yield server


@pytest.fixture
def stand_ins(starts, workplace, hub):
    """Puts the tiny stand-ins of a recipe into the hub, under the recipe's own ids."""

    def call(recipe, *ids):
        assert starts("--prepare", "--tiny", recipe).returncode == 0
        for kind, name in zip(("models", "datasets"), ids, strict=True):
            stand_in = next((workplace / "outputs/tiny/.stand-ins").glob(f"{name.replace('/', '--')}-*"))
            shutil.copytree(stand_in, hub.root / kind / name)

    return call


@pytest.fixture(scope="module")
def online(environment, hub, home):
    made = Starts(environment | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "cache")}, home)
    yield made
    made.close()


@pytest.fixture(scope="module")
def offline(environment, home):
    """With what launch.sh sets where nobody answers."""
    made = Starts(environment | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "cache")}, home)
    yield made
    made.close()


def test_a_stream(stand_ins, hub, online, offline, tmp_path):
    """As many of its files as the budget needs come here; a run that needs more says so."""
    stand_ins("qwen2_fineweb_edu", "Qwen/Qwen2-0.5B", "HuggingFaceFW/fineweb-edu")
    process = online("--preview", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path)
    assert process.returncode == 0 and "--- a row of" in process.stdout, process.stderr
    assert not any("model.safetensors" in request for request in hub.requests)
    process = online("--prepare", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "To download: model Qwen/Qwen2-0.5B" in process.stdout and "1 of its 8 files" in process.stdout
    assert not (tmp_path / "outputs").exists()
    again = online("--prepare", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path)
    assert "To download: nothing" in again.stdout
    process = offline("qwen2_fineweb_edu", "1x3090", "--use_cpu", *STREAM, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert read(tmp_path / "outputs/qwen2_fineweb_edu")["dataset"] == "HuggingFaceFW/fineweb-edu"
    longer = offline("qwen2_fineweb_edu", "1x3090", "--use_cpu", *STREAM, "--max_tokens", "100_000", cwd=tmp_path)
    assert longer.returncode == 2 and "too few of its files" in longer.stderr and "--prepare" in longer.stderr


def test_a_data_set_is_tokenized_already(stand_ins, home, online, offline, tmp_path):
    flags = ["--max_steps", "2", *BRIEF, "--max_length", "256"]
    stand_ins("qwen2_chat", "Qwen/Qwen2-0.5B-Instruct", "trl-lib/Capybara")
    process = online("--prepare", "qwen2_chat", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    tokenized = sorted((home / "cache/datasets").rglob("cache-*.arrow"))
    process = offline("qwen2_chat", "1x3090", "--use_cpu", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert read(tmp_path / "outputs/qwen2_chat")["global_step"] == 2
    assert tokenized and sorted((home / "cache/datasets").rglob("cache-*.arrow")) == tokenized


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
