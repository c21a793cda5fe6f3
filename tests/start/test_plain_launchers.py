"""Recipes without launch.sh: `python`, `torchrun` and `accelerate launch`."""

import argparse
import json
import os
import subprocess
import sys

from harness import configs, runs
from harness.start import parsing, training

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from conftest import ROOT, slow
from runs import is_complete, losses, read, tiny_documents, tiny_model, weights
from trl import SFTConfig

RECIPE = ROOT / "recipes/qwen2_fineweb_edu.py"
COUNT_COLLECTIVES = ROOT / "tests/run/count_collectives.py"
CHECK_SLOWLY = ROOT / "tests/start/check_slowly.py"
CONFIG = ROOT / "accelerate_configs/4gpu_full_shard.yaml"
PROCESSES, MICRO_BATCHES = 2, 3
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", PROCESSES]
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_processes", PROCESSES, "--num_machines", 1, "--main_process_port", 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("Qwen/Qwen2-0.5B", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def flags(tmp_path_factory, model):
    """Flags for three steps with the tiny model and a small local dataset."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "data").mkdir()
    for file in range(PROCESSES):
        rows = [json.dumps({"text": text}) for text in tiny_documents()[file:60:PROCESSES]]
        (folder / f"data/{file}.jsonl").write_text("\n".join(rows))
    flags = ["--model_name_or_path", model, "--dataset_name", folder / "data", "--max_eval_samples", 4]
    flags += ["--max_steps", 3, "--save_steps", 3, "--logging_steps", 1, "--eval_strategy", "no", "--learning_rate", 1e-2]
    return [*flags, "--max_length", 64, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", MICRO_BATCHES]


@pytest.fixture
def start(environment, tmp_path, flags):
    """Calls Python with these arguments and the flags; returns the finished process."""

    def call(*arguments, **variables):
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables
        command = [sys.executable, *map(str, [*arguments, *flags])]
        return subprocess.run(command, cwd=tmp_path, env=environment | own, capture_output=True, text=True, timeout=240)

    return call


def assert_trained(process, run, model, processes, is_sharded):
    assert process.returncode == 0 and "warning" not in process.stderr, process.stderr
    results = read(run)
    assert (results["world_size"], results["fsdp_enabled"]) == (processes, is_sharded)
    assert results["global_batch_size"] == processes * MICRO_BATCHES and results["global_step"] == 3
    assert len(losses(run)) == 3 and is_complete(run, 3)
    before, after = weights(model), weights(run)
    assert after.keys() <= before.keys() and not any(torch.equal(before[name], weight) for name, weight in after.items())


@slow
def test_python(start, model, tmp_path):
    """Into the default output directory."""
    run = tmp_path / "outputs/qwen2_fineweb_edu"
    assert_trained(start(RECIPE, "--use_cpu"), run, model, processes=1, is_sharded=False)
    assert read(run, "run.json")["recipe"] == RECIPE.stem and read(run, "run.json")["config"] == ""


@slow
def test_torchrun(start, model, tmp_path):
    """The other processes wait for the first one, which checks the run."""
    run = tmp_path / "run"
    process = start(*TORCHRUN, CHECK_SLOWLY, "--use_cpu", "--output_dir", run, PYTHONPATH=str(ROOT / "recipes"))
    assert_trained(process, run, model, processes=PROCESSES, is_sharded=False)
    assert process.stdout.count("The model, train_results.json and loss.png are in") == 1


def test_accelerate_launch(start, fork_launch, flags, model, tmp_path):
    """It trains as launch.sh does with the same config, whose fsdp_reduce_each_batch only launch.sh reads."""
    run, same = tmp_path / "run", tmp_path / "same"
    command = [*ACCELERATE, "--config_file", CONFIG, COUNT_COLLECTIVES, "--use_cpu", "--output_dir", run]
    assert_trained(start(*command, PYTHONPATH=str(ROOT / "recipes")), run, model, processes=PROCESSES, is_sharded=True)
    launched = fork_launch(
        COUNT_COLLECTIVES, CONFIG.stem, "--use_cpu", "--output_dir", same, *flags, NPROC_PER_NODE=str(PROCESSES)
    )
    assert launched.returncode == 0, launched.stderr
    assert losses(run) == losses(same) and read(same)["config"] == CONFIG.stem and read(run)["config"] == ""

    for folder, times in ((run, 1), (same, MICRO_BATCHES)):
        collectives = read(folder, "collectives.json")
        assert len(collectives["steps"]) == 3
        for step in collectives["steps"]:
            reduced = sum(size for name, _, size in step if name == "reduce_scatter_single")
            assert reduced == pytest.approx(times * collectives["parameters"], rel=0.01)


def values(**given: bool) -> argparse.Namespace:
    """Values of arguments, as the parser finds them."""
    return argparse.Namespace(use_peft=False, activation_checkpointing_kwargs=None, **given)


@pytest.fixture
def no_recipe():
    """A context that this process gets in a test is no longer that of the next one."""
    yield
    runs.set_started(None)


@pytest.mark.parametrize(
    ("variables", "warnings"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, 1),
        ({"ACCELERATE_USE_FSDP": "true", "RANK": "0", "WORLD_SIZE": "2"}, 1),
        ({"ACCELERATE_USE_FSDP": "true", "RANK": "1", "WORLD_SIZE": "2"}, 0),
        ({}, 0),
    ],
    ids=["one process", "first process", "another process", "without FSDP"],
)
def test_keys_that_accelerate_launch_does_not_pass_on(monkeypatch, capsys, no_recipe, variables, warnings):
    """Those of this project; the first process prints which ones."""
    for name in ("ACCELERATE_USE_FSDP", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in ({"ACCELERATE_MIXED_PRECISION": "no"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training, "allow_fsdp_on_cpu", lambda: None)  # for the rest of the process
    started = training.start_of_training()
    started.choose_device(values(use_cpu=True, bf16=True))
    run = started.run
    assert not run.config.path and run.processes == int(variables.get("WORLD_SIZE", 1))
    printed = "".join(capsys.readouterr())
    assert printed.count("warning") == warnings and all((key in printed) == bool(warnings) for key in configs.OWN_KEYS)


def test_flags_override_the_environment_of_accelerate(monkeypatch, no_recipe):
    """transformers reads the precision there, and accelerate its own activation checkpointing."""
    monkeypatch.setattr(
        os, "environ", os.environ | {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    )
    config = training.start_of_training().run.config
    assert config.mixed_precision == "bf16" and config.activation_checkpointing and not config.offload_params
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no" and os.environ["FSDP_ACTIVATION_CHECKPOINTING"] == "false"


def test_python_has_no_config(monkeypatch, capsys, no_recipe):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    assert training.start_of_training().run == runs.Run(sys.argv[0], trains=True) and not any(capsys.readouterr())


@pytest.fixture
def gpus(monkeypatch, no_recipe):
    """Gives this process GPUs of a compute capability, until something computes on them."""

    def call(count: int, capability: tuple[int, int]):
        for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
        monkeypatch.setattr(AcceleratorState, "_shared_state", {})
        monkeypatch.setattr(PartialState, "_shared_state", {})

    return call


@pytest.mark.parametrize(("own", "lines"), [({}, 1), ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, 0)])
def test_variable_that_launch_sh_sets_is_named(monkeypatch, capsys, gpus, own, lines):
    """CUDA may have read it when Python of the recipe runs."""
    gpus(1, (8, 0))
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | own)
    training.start_of_training().choose_device(values(use_cpu=False, bf16=True))
    assert capsys.readouterr().out.count("PYTORCH_ALLOC_CONF=expandable_segments:True") == lines


def test_python_on_several_gpus_is_an_error(monkeypatch, gpus, error_of, tmp_path, model):
    gpus(4, (8, 0))
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "--output_dir", str(tmp_path / "run")])
    message = error_of(parsing.parse, SFTConfig, model_name_or_path=str(model), dataset_name="none", bf16=False)
    assert "4 GPUs" in message and "CUDA_VISIBLE_DEVICES=0" in message and "--nproc-per-node 4" in message
    assert not (tmp_path / "run").exists()


def test_old_driver_of_rtx_40xx(monkeypatch, gpus, error_of, tmp_path, model):
    """accelerate refuses such machines unless NCCL does not copy between GPUs."""
    gpus(1, (8, 9))
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $* in *driver*) echo 535.183.01 ;; *) echo 2, RTX 4090; echo 2, RTX 4090 ;; esac\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    with pytest.raises(NotImplementedError):
        SFTConfig(tmp_path / "run", bf16=False).device  # noqa: B018 (the property connects)
    PartialState._shared_state.clear()
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "--output_dir", str(tmp_path / "run")])
    stops = error_of(parsing.parse, SFTConfig, model_name_or_path=str(model), dataset_name="missing.jsonl", bf16=False)
    assert "file or folder not found: missing.jsonl" in stops
    assert os.environ["NCCL_P2P_DISABLE"] == os.environ["NCCL_IB_DISABLE"] == "1"
