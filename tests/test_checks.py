"""What is wrong is said before anything is spawned: hardware, folders, data, hub."""

import types

from harness import folder, hub
from harness.launched import Launched
from harness.start import arguments, checks, launch

import datasets
import pytest
import torch
from conftest import read
from hub import serve

CONFIG = {"num_processes": 2, "num_machines": 1, "mixed_precision": "bf16"}
IDENTITY = dict.fromkeys(("recipe", "model", "dataset", "dataset_config", "use_peft", "load_in_4bit"), "a")
IDENTITY |= {"tiny": False, "config": "c", "sharded": True}


def take(run, identity, is_default):
    folder.check(run, identity, is_default)
    folder.claim(run, identity, is_default)


@pytest.fixture
def says(capsys):
    """Calls something that must end the process with one line, and returns the line."""

    def call(function, *arguments):
        with pytest.raises(SystemExit) as stopped:
            function(*arguments)
        message = capsys.readouterr().err
        assert stopped.value.code == 2 and message.count("\n") == 1
        return message

    return call


@pytest.mark.parametrize(("gpus", "on_cpu"), [(8, False), (4, True), (0, True)])
def test_a_rehearsal_uses_the_gpus_only_when_they_are_enough(monkeypatch, gpus, on_cpu):
    """Two machines of four GPUs are eight processes on this one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    launched = Launched(config="hybrid.yaml", processes=8, tiny=True)
    launch._hardware({"mixed_precision": "bf16"}, launched)
    assert launched.on_cpu == on_cpu


def test_bf16_needs_compute_capability_8(monkeypatch, says):
    capability = {0: (8, 6), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    assert "Tesla T4 has compute capability 7.5" in says(checks.bf16, CONFIG, "c.yaml", 2)
    checks.bf16(CONFIG | {"mixed_precision": "fp16"}, "c.yaml", 2)
    capability[1] = (8, 0)
    checks.bf16(CONFIG, "c.yaml", 2)


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [((8, 6), True, "flash_attention_2"), ((8, 6), False, "sdpa"), ((7, 5), True, "sdpa"), (None, True, "sdpa")],
)
def test_flash_attention_where_it_can_be_had(monkeypatch, capability, installed, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda kernels_fallback_ok: installed)
    assert arguments.attention() == expected


def test_versions_are_a_warning(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(checks, "REQUIREMENTS", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").write_text("torch==0.1\n# comment\nnot-installed==1\n")
    monkeypatch.setattr(checks, "TESTED_PYTHON", (2, 7))
    checks.versions()
    warning = capsys.readouterr().out
    assert warning.startswith("warning: not tested with Python 3.") and "(tested: 0.1)" in warning
    assert "not-installed" not in warning


class TestRunFolder:
    def test_is_claimed_once(self, tmp_path):
        take(tmp_path / "new/run", IDENTITY, False)
        assert read(tmp_path / "new/run", "run.json") == IDENTITY
        take(tmp_path / "new/run", IDENTITY, False)

    @pytest.mark.parametrize("key", ["recipe", "model", "dataset", "dataset_config", "tiny", "use_peft", "load_in_4bit"])
    def test_of_another_run_is_refused(self, tmp_path, says, key):
        take(tmp_path / "run", IDENTITY, False)
        message = says(take, tmp_path / "run", IDENTITY | {key: True}, False)
        assert key in message and "--output_dir" in message
        assert read(tmp_path / "run", "run.json") == IDENTITY

    def test_with_files_of_somebody_else_is_refused(self, tmp_path, says):
        (tmp_path / "thesis.tex").touch()
        assert "not a run" in says(take, tmp_path, IDENTITY, False)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_in_use_by_another_run(self, tmp_path, says):
        take(tmp_path / "run", IDENTITY, False)
        held = folder.lock(tmp_path / "run")
        assert "another run is writing" in says(take, tmp_path / "run", IDENTITY, False)
        held.release()
        take(tmp_path / "run", IDENTITY, False)

    def test_that_cannot_be_written(self, tmp_path, says):
        (tmp_path / "file").touch()
        assert "cannot be written" in says(take, tmp_path / "file" / "run", IDENTITY, False)

    def test_a_rehearsal_with_another_config_steps_aside(self, tmp_path, capsys):
        run = tmp_path / "run"
        take(run, IDENTITY | {"tiny": True, "config": "old"}, True)
        (run / "model.safetensors").write_text("weights")
        take(run, IDENTITY | {"tiny": True, "config": "new"}, True)
        assert (tmp_path / "run.old/model.safetensors").read_text() == "weights"
        assert read(run, "run.json")["config"] == "new" and not (run / "model.safetensors").exists()
        assert "run.old" in capsys.readouterr().out

    def test_a_real_run_never_steps_aside(self, tmp_path):
        take(tmp_path / "run", IDENTITY, True)
        (tmp_path / "run/checkpoint-5").mkdir()
        take(tmp_path / "run", IDENTITY | {"config": "new"}, True)
        assert (tmp_path / "run/checkpoint-5").is_dir()

    def test_checkpoints_of_the_other_kind_are_refused(self, tmp_path, says):
        take(tmp_path / "run", IDENTITY, True)
        take(tmp_path / "run", IDENTITY | {"sharded": False, "config": "d"}, True)
        (tmp_path / "run/checkpoint-5").mkdir()
        assert "unsharded checkpoints of d" in says(take, tmp_path / "run", IDENTITY, True)

    def test_finished_means_as_far_as_asked(self, tmp_path):
        assert not folder.finished(tmp_path, 10, 3.0)
        folder.write_json(tmp_path / "train_results.json", {"global_step": 10, "epoch": 1.0})
        assert folder.finished(tmp_path, 10, 3.0) and not folder.finished(tmp_path, 11, 3.0)
        assert folder.finished(tmp_path, -1, 1.0) and not folder.finished(tmp_path, -1, 2.0)


class TestHub:
    """The real libraries against a hub that answers as the real one does."""

    @pytest.fixture
    def server(self, tmp_path, monkeypatch):
        with serve(tmp_path / "hub") as server:
            for name, module in (("ENDPOINT", "huggingface_hub.constants"), ("HF_ENDPOINT", "datasets.config")):
                monkeypatch.setattr(f"{module}.{name}", server.url)
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
            template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
            yield server

    def test_unknown_and_gated_models(self, server, says):
        (server.root / "models/locked/model").mkdir(parents=True)
        (server.root / "models/locked/model/.gated").touch()
        message = says(hub.reachable, "locked/model", "main")
        assert "locked/model is gated" in message and "hf auth login" in message
        assert "no/such-model is unknown" in says(hub.reachable, "no/such-model", "main")

    def test_a_model_that_is_there(self, server):
        (server.root / "models/open/model").mkdir(parents=True)
        (server.root / "models/open/model/config.json").write_text("{}")
        hub.reachable("open/model", "main")
        server.shutdown()
        hub.reachable("open/model", "main")  # from the cache

    def test_nobody_answers(self, server, says):
        server.shutdown()
        server.server_close()
        assert "hub cannot be reached" in says(hub.reachable, "no/network", "main")

    def test_a_folder_that_is_no_model(self, tmp_path, says):
        assert "no config.json" in says(hub.reachable, str(tmp_path), "main")
        assert "there is no folder ./nowhere" in says(hub.reachable, "./nowhere", "main")
        assert "unknown to the hub" in says(hub.reachable, "a b", "main")


def data_set(path, **columns):
    path.mkdir()
    datasets.disable_progress_bars()
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(path / "train.parquet"))
    return types.SimpleNamespace(dataset_name=str(path), dataset_config=None, dataset_train_split="train")


def test_the_text_column(tmp_path, says):
    data = data_set(tmp_path / "data", content=["some text"])
    message = says(hub.dataset, data, "text")
    assert "no column 'text'" in message and "content" in message and "--dataset_text_field" in message
    hub.dataset(data, "content")
    hub.dataset(data, None)


def test_an_empty_data_set(tmp_path, says):
    assert "is empty" in says(hub.dataset, data_set(tmp_path / "data", text=[]), "text")


def test_a_split_that_is_not_there(tmp_path, says):
    data = data_set(tmp_path / "data", text=["a"])
    data.dataset_train_split = "trian"
    assert "trian" in says(hub.dataset, data, "text")


def test_what_launch_decided_travels_in_the_environment(monkeypatch):
    launched = Launched(recipe="a b.py", config="c.yaml", processes=4, tiny=True, on_cpu=True)
    for name, value in launched.to_environment().items():
        monkeypatch.setenv(name, value)
    assert Launched.from_environment() == launched
