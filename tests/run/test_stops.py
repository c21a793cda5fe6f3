"""Stopped or killed from outside: nothing is left behind, and the same command goes on from the newest checkpoint."""

import contextlib
import re
import shutil
import subprocess

import psutil
import pytest
import torch
from conftest import ROOT, losses, read, wait_until
from rehearsals import BRIEF
from safetensors.torch import load_file

RECIPE = "qwen2_fineweb_edu"


@pytest.fixture
def start(environment, workplace, tmp_path):
    """Starts launch.sh and returns it with the file of what it prints; kills what is left of it afterwards."""
    started = []

    def call(*arguments):
        log = tmp_path / f"{len(started)}.log"
        with log.open("w") as file:
            command = [ROOT / "launch.sh", *map(str, arguments)]
            started.append(subprocess.Popen(command, cwd=workplace, env=environment, stdout=file, stderr=file))
        return started[-1], log

    yield call
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("config", ["1x3090", "4gpu_shard_grad_op"])
def test_a_stop_from_outside_leaves_a_checkpoint(rehearse, start, workplace, config):
    """SIGTERM to the launcher: one step more, a checkpoint, and the same command goes on from it."""
    rehearse(RECIPE, "1x3090")  # makes the stand-ins
    run = workplace / "runs" / f"stopped-{config}"
    command = ["--tiny", RECIPE, config, "--output_dir", run, "--logging_steps", "1", "--eval_strategy", "no", "--bf16", "false"]
    process, log = start(*command, "--max_steps", "2000", "--save_steps", "1000")
    wait_until(lambda: log.read_text().count("  loss ") > 2, 120, log.read_text)
    process.terminate()
    assert process.wait(timeout=60) == 143
    (step,) = re.findall(r"Stopped by SIGTERM at step (\d+); the same command goes on from there", log.read_text())
    assert (run / f"checkpoint-{step}/complete.json").is_file() and not (run / "train_results.json").exists()
    assert "Traceback" not in log.read_text() and "error" not in log.read_text()
    if config == "1x3090":
        rehearse(RECIPE, config, *command[3:], "--max_steps", str(int(step) + 2))  # a later --output_dir wins
        assert read(run)["resumed_from_step"] == int(step) and len(losses(run)) == int(step) + 2


def test_a_stop_before_training_leaves_no_process(start, workplace):
    process, log = start("--tiny", RECIPE, "4gpu_full_shard", "--output_dir", workplace / "runs/never-begun")
    ranks = []

    def spawned():
        with contextlib.suppress(psutil.NoSuchProcess):  # what launch.sh calls on its way is gone again at once
            ranks[:] = [rank for server in psutil.Process(process.pid).children() for rank in server.children()]
        return len(ranks) == 4

    wait_until(spawned, 120, log.read_text)
    process.terminate()
    assert process.wait(timeout=30) == 143, log.read_text()
    psutil.wait_procs(ranks, timeout=5)
    assert not any(rank.is_running() for rank in ranks)
    assert "Stopped by SIGTERM before the training began." in log.read_text() and "Traceback" not in log.read_text()


def test_killed_and_started_again_logs_the_same_losses(rehearse, start, starts, workplace):
    undisturbed = rehearse(RECIPE, "1x3090_offload")
    run = workplace / "runs/killed"
    command = ["--tiny", RECIPE, "1x3090_offload", "--output_dir", run, *BRIEF]
    process, log = start(*command)
    wait_until(lambda: (run / "checkpoint-10/complete.json").exists() or process.poll() is not None, 120, log.read_text)
    assert process.poll() is None, log.read_text()
    process.kill()  # the launcher alone: what it started must go with it
    process.wait()
    # A kill in the middle of a later save leaves half a checkpoint.
    (run / "checkpoint-12").mkdir()
    (run / "checkpoint-12/writing").touch()
    shutil.copy(run / "checkpoint-10/trainer_state.json", run / "checkpoint-12")

    again = starts(*command)
    assert again.returncode == 0, again.stderr
    assert f"Continuing from {run / 'checkpoint-10'}" in again.stdout and "checkpoint-12 was cut short" in again.stdout
    assert read(run)["resumed_from_step"] == 10
    assert losses(run) == losses(undisturbed)  # bit for bit
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
