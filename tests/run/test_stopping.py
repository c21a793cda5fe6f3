"""Runs that are stopped or killed from outside: no process remains, and the same command resumes from the newest checkpoint."""

import json
import re
import shutil

import psutil
import pytest
import torch
from conftest import ROOT, losses, read, slow, wait_until
from rehearsals import SHORT
from safetensors.torch import load_file

RECIPE = "qwen2_fineweb_edu"


@pytest.fixture
def start(fork_launch, tmp_path):
    """Starts a rehearsal; returns its process and the file of its output. Kills it at the end of the test."""
    started = []

    def call(*arguments, **variables):
        log = tmp_path / f"{len(started)}.log"
        started.append(fork_launch.start(*arguments, out=log, err=log, **variables))
        return started[-1], log

    yield call
    for process in started:
        process.kill()


@pytest.mark.parametrize("config", ["1x3090", pytest.param("4gpu_shard_grad_op", marks=slow)])
def test_stop_writes_checkpoint(rehearse, start, workdir, config):
    """SIGTERM to the launcher: the step ends, a checkpoint is written, and the same command resumes from it."""
    rehearse(RECIPE, "1x3090")  # makes the tiny model and dataset
    run = workdir / "runs" / f"stopped-{config}"
    command = ["--tiny", RECIPE, config, "--output_dir", run, "--logging_steps", "1", "--eval_strategy", "no", "--bf16", "false"]
    processes = {} if config == "1x3090" else {"NPROC_PER_NODE": "2"}
    process, log = start(*command, "--max_steps", "2000", "--save_steps", "1000", **processes)
    wait_until(lambda: log.read_text().count("  loss ") > 2, 120, log.read_text)
    process.terminate()
    assert process.wait(timeout=60) == 143
    (step,) = re.findall(r"Stopped by SIGTERM at step (\d+); the same command resumes there", log.read_text())
    assert (run / f"checkpoint-{step}/complete.json").is_file() and not (run / "train_results.json").exists()
    assert "Traceback" not in log.read_text() and "error" not in log.read_text()
    if config == "1x3090":
        rehearse(RECIPE, config, *command[3:], "--max_steps", str(int(step) + 2))  # the last --output_dir counts
        assert read(run)["resumed_from_step"] == int(step) and len(losses(run)) == int(step) + 2


def test_all_processes_stop_after_the_same_step(fork_launch, workdir):
    """A signal reaches one of two processes, or a second signal the other one after they have agreed to stop."""
    run = workdir / "runs/signalled-one"
    command = ["--tiny", ROOT / "tests/run/signal_itself.py", "4gpu_full_shard", "--output_dir", run, "--ddp_timeout", "15"]
    command += ["--max_steps", "9", "--save_steps", "9", "--logging_steps", "1", "--eval_strategy", "no"]
    to_second = [[1, "step begins", 1, "SIGTERM"]]
    to_both = [[0, "step begins", 3, "SIGUSR1"], [1, "checkpoint is written", 4, "SIGTERM"]]
    for signals, code, name, step in ((to_second, 143, "SIGTERM", 2), (to_both, 75, "SIGUSR1", 4)):
        process = fork_launch(*command, NPROC_PER_NODE="2", SIGNALS=json.dumps(signals))
        assert process.returncode == code and not process.stderr, process.stderr
        assert process.stdout.count("Stopped by") == 1 and f"Stopped by {name} at step {step};" in process.stdout
        assert (run / f"checkpoint-{step}/complete.json").is_file()


def test_stop_evaluates_and_saves_no_second_time(fork_launch, workdir):
    """transformers ends the epoch when a run stops, where the strategy "epoch" evaluates and saves."""
    run, signals = workdir / "runs/stopped-in-an-epoch", [[0, "step begins", 2, "SIGTERM"]]
    command = ["--tiny", ROOT / "tests/run/signal_itself.py", "1x3090", "--output_dir", run, "--max_steps", "9"]
    command += ["--eval_on_start", "false", "--save_strategy", "epoch", "--eval_strategy", "epoch"]
    process = fork_launch(*command, SIGNALS=json.dumps(signals))
    assert process.returncode == 143 and "Stopped by SIGTERM at step 3;" in process.stdout, process.stdout + process.stderr
    assert "evaluation loss" not in process.stdout and process.stdout.count("A checkpoint is written.") == 1
    assert (run / "checkpoint-3/complete.json").is_file()


def test_evaluation_that_a_stop_left_out(fork_launch, workdir):
    """The resumed run makes it, so that noise, a scheduler that depends on it and the best checkpoint are as uninterrupted."""
    command = ["--tiny", ROOT / "tests/run/signal_itself.py", "1x3090", "--max_steps", "8", "--save_steps", "4"]
    command += ["--eval_steps", "2", "--eval_delay", "4", "--eval_on_start", "false", "--logging_steps", "1"]
    command += ["--neftune_noise_alpha", "5", "--metric_for_best_model", "eval_loss"]
    command += ["--learning_rate", "1e-12"]  # so that the best evaluation is the first one, which the stop leaves out
    # No evaluation is better than the first one by 9, so the second one lowers the learning rate.
    plateau = json.dumps({"patience": 0, "threshold": 9, "threshold_mode": "abs"})
    command += ["--lr_scheduler_type", "reduce_lr_on_plateau", "--lr_scheduler_kwargs", plateau]
    whole, stopped = workdir / "runs/not-stopped", workdir / "runs/stopped-at-an-evaluation"
    signals = [[0, "step begins", 3, "SIGTERM"]]
    for run, variables, code in ((whole, [], 0), (stopped, signals, 143), (stopped, [], 0)):
        process = fork_launch(*command, "--output_dir", run, SIGNALS=json.dumps(variables))
        assert process.returncode == code, process.stdout + process.stderr
    assert losses(stopped) == losses(whole) and len(losses(whole)) == 8
    states = [json.loads((run / "trainer_state.json").read_text()) for run in (whole, stopped)]
    for name, count in (("eval_loss", 3), ("learning_rate", 8)):
        first, second = ([entry[name] for entry in state["log_history"] if name in entry] for state in states)
        assert first == second and len(first) == count
    assert states[0]["best_metric"] == states[1]["best_metric"]
    assert states[0]["best_global_step"] == states[1]["best_global_step"] == 4


def test_stop_before_training_ends_all_processes(start, workdir):
    command = ["--tiny", RECIPE, "4gpu_full_shard", "--output_dir", workdir / "runs/never-begun"]
    process, log = start(*command, NPROC_PER_NODE="2")
    workers = []

    def workers_have_started():
        workers[:] = psutil.Process(process.pid).children()
        return len(workers) == 2

    wait_until(workers_have_started, 120, log.read_text)
    process.terminate()
    assert process.wait(timeout=30) == 143, log.read_text()
    psutil.wait_procs(workers, timeout=5)
    assert not any(worker.is_running() for worker in workers)
    assert "Stopped by SIGTERM before the training began." in log.read_text() and "Traceback" not in log.read_text()


def test_killed_run_resumes_with_the_same_losses(rehearse, start, fork_launch, workdir):
    uninterrupted = rehearse(RECIPE, "1x3090_offload")
    run = workdir / "runs/killed"
    command = ["--tiny", RECIPE, "1x3090_offload", "--output_dir", run, *SHORT]
    process, log = start(*command)
    wait_until(lambda: (run / "checkpoint-4/complete.json").exists() or process.poll() is not None, 120, log.read_text)
    assert process.poll() is None, log.read_text()
    process.kill()  # the launcher only: its processes must exit with it
    process.wait()
    # A kill during a later save leaves an incomplete checkpoint.
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-5/writing").touch()
    shutil.copy(run / "checkpoint-4/trainer_state.json", run / "checkpoint-5")

    again = fork_launch(*command)
    assert again.returncode == 0, again.stderr
    assert f"Resuming from {run / 'checkpoint-4'}" in again.stdout and "checkpoint-5 is incomplete" in again.stdout
    assert read(run)["resumed_from_step"] == 4
    assert losses(run) == losses(uninterrupted)  # bit for bit
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, uninterrupted))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
