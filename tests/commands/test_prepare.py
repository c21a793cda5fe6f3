"""`--prepare` downloads everything that a run needs: afterwards the recipe trains without the Hub."""

from pathlib import Path

import pytest
from forked_launcher import ForkedLauncher
from local_hub import serve
from runs import read, tiny_dataset, tiny_model

SHORT = ["--max_length", "64", "--max_eval_samples", "4", "--per_device_train_batch_size", "1", "--eval_strategy", "no"]
STREAM = ["--max_tokens", "2_000", *SHORT]


@pytest.fixture(scope="module")
def hub(tmp_path_factory, hub_port):
    with serve(tmp_path_factory.mktemp("hub"), hub_port) as server:
        yield server


@pytest.fixture
def publish_tiny(hub):
    """Puts the tiny model and dataset of a rehearsal on the local Hub, under the recipe's own Hub IDs."""

    def call(model, dataset, config="default"):
        tiny_model(model, hub.root / "models" / model)
        tiny_dataset(dataset, config, hub.root / "datasets" / dataset)

    return call


@pytest.fixture(scope="module")
def offline(environment, workdir):
    """With the variable that the launcher sets when the Hub is not reachable."""
    launcher = ForkedLauncher(environment | {"HF_HUB_OFFLINE": "1"}, workdir)
    yield launcher
    launcher.close()


def test_stream(publish_tiny, hub, fork_launch, offline, tmp_path):
    """All files of the chosen config are downloaded, and read without the Hub. Of another dataset there are none."""
    publish_tiny("Qwen/Qwen2-0.5B", "HuggingFaceFW/fineweb-edu", "sample-10BT")
    process = fork_launch("--preview", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path)
    assert process.returncode == 0 and "--- a sequence of" in process.stdout, process.stderr
    assert not any("model.safetensors" in request for request in hub.requests)
    process = fork_launch("--prepare", "qwen2_fineweb_edu", *STREAM, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert any("model.safetensors" in request for request in hub.requests)
    assert not (tmp_path / "outputs").exists()
    process = offline("qwen2_fineweb_edu", "1x3090", "--use_cpu", *STREAM, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert read(tmp_path / "outputs/qwen2_fineweb_edu")["dataset"] == "HuggingFaceFW/fineweb-edu"
    other = ["--dataset_name", "HuggingFaceFW/fineweb", "--output_dir", "other"]
    process = offline("qwen2_fineweb_edu", "1x3090", "--use_cpu", *STREAM, *other, cwd=tmp_path)
    assert process.returncode == 2 and "HuggingFaceFW/fineweb: " in process.stderr and "--prepare" in process.stderr


def test_dataset_is_tokenized_once(publish_tiny, environment, fork_launch, offline, tmp_path):
    """The run without the Hub reads the tokens that `--prepare` has written."""
    flags = ["--max_steps", "2", *SHORT, "--max_length", "256"]
    publish_tiny("Qwen/Qwen2-0.5B-Instruct", "trl-lib/Capybara")
    process = fork_launch("--prepare", "qwen2_chat", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    cache = Path(environment["HF_HOME"], "datasets")
    tokenized = sorted(cache.rglob("cache-*.arrow"))
    process = offline("qwen2_chat", "1x3090", "--use_cpu", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert read(tmp_path / "outputs/qwen2_chat")["global_step"] == 2
    assert tokenized and sorted(cache.rglob("cache-*.arrow")) == tokenized
