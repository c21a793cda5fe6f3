"""Recipes without launch.sh: `python`, `torchrun` and `accelerate launch`."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

from harness import configs, runs
from harness.start import machine, recipes

import pytest
import torch
from conftest import ROOT, slow
from runs import is_complete, losses, read, tiny_documents, tiny_model, weights

RECIPE = ROOT / "recipes/qwen2_fineweb_edu.py"
COUNT_COLLECTIVES = ROOT / "tests/run/count_collectives.py"
CONFIG = ROOT / "accelerate_configs/4gpu_full_shard.yaml"
# The checks of the first process take longer than an all-reduce may.
CHECKS_SLOWLY = f"""
import functools, runpy, time
from harness.nodes import network
from harness.start import recipes

claim_run = recipes.claim_run
recipes.check_all_reduce = functools.partial(network.check_all_reduce, seconds=4)
recipes.claim_run = lambda *arguments: time.sleep(8) or claim_run(*arguments)
runpy.run_path({str(RECIPE)!r}, run_name="__main__")
"""
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
@pytest.mark.parametrize(("launcher", "processes"), [([], 1), (TORCHRUN, PROCESSES)], ids=["python", "torchrun"])
def test_python_and_torchrun(start, model, tmp_path, launcher, processes):
    """Into the default output directory. The other processes wait for the first one, which checks the run."""
    (tmp_path / "slowly.py").write_text(CHECKS_SLOWLY)
    process = start(*launcher, tmp_path / "slowly.py", "--use_cpu", PYTHONPATH=str(ROOT / "recipes"))
    run = tmp_path / "outputs" / RECIPE.stem
    assert_trained(process, run, model, processes, is_sharded=False)
    assert read(run, "run.json")["recipe"] == RECIPE.stem and read(run, "run.json")["config"] == ""
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


def choose_device(**given: bool) -> runs.Run:
    """As `parse` does, with these values of arguments."""
    started = recipes.start_of_training()
    values = argparse.Namespace(use_peft=False, activation_checkpointing_kwargs=None, **given)
    started.run = dataclasses.replace(started.run, values=values)
    started.choose_device()
    return started.run


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
    monkeypatch.setattr(machine, "allow_fsdp_on_cpu", lambda: None)  # for the rest of the process
    run = choose_device(use_cpu=True, bf16=True)
    assert not run.config.path and run.processes == int(variables.get("WORLD_SIZE", 1))
    printed = "".join(capsys.readouterr())
    assert printed.count("warning") == warnings and all((key in printed) == bool(warnings) for key in configs.OWN_KEYS)


def test_flags_override_the_environment_of_accelerate(monkeypatch, no_recipe):
    """transformers reads the precision there, and accelerate its own activation checkpointing."""
    monkeypatch.setattr(
        os, "environ", os.environ | {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    )
    config = recipes.start_of_training().run.config
    assert config.mixed_precision == "bf16" and config.activation_checkpointing and not config.offload_params
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no" and os.environ["FSDP_ACTIVATION_CHECKPOINTING"] == "false"


def test_python_has_no_config(monkeypatch, capsys, no_recipe):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    assert recipes.start_of_training().run == runs.Run(sys.argv[0], trains=True) and not any(capsys.readouterr())


@pytest.mark.parametrize(("own", "lines"), [({}, 1), ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, 0)])
def test_variable_that_launch_sh_sets_is_named(monkeypatch, capsys, no_recipe, own, lines):
    """CUDA may have read it when Python of the recipe runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "ACCELERATE_"))}
    monkeypatch.setattr(os, "environ", kept | own)
    choose_device(use_cpu=False, bf16=True)
    assert capsys.readouterr().out.count("PYTORCH_ALLOC_CONF=expandable_segments:True") == lines


def test_old_driver_of_rtx_40xx(monkeypatch):
    """accelerate refuses such machines unless NCCL does not copy between GPUs."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(recipes, "check_cuda_p2p_ib_support", lambda: False)
    recipes.disable_peer_to_peer()
    assert os.environ == {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def test_python_on_several_gpus_is_an_error():
    facts = machine.facts_of_node(runs.Run(str(RECIPE)), SimpleNamespace(n_gpu=4), None)
    assert "4 GPUs" in facts["problem"] and "CUDA_VISIBLE_DEVICES=0" in facts["problem"]
