"""Runs that are stopped by a signal: all processes agree on the step, and a stop leaves no evaluation out."""

import json

import pytest
from conftest import ROOT
from runs import history, is_complete, losses, read


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
        assert is_complete(run, step)


def test_stop_evaluates_and_saves_no_second_time(fork_launch, workdir):
    """transformers ends the epoch when a run stops, where the strategy "epoch" evaluates and saves."""
    run, signals = workdir / "runs/stopped-in-an-epoch", [[0, "step begins", 2, "SIGTERM"]]
    command = ["--tiny", ROOT / "tests/run/signal_itself.py", "1x3090", "--output_dir", run, "--max_steps", "9"]
    command += ["--eval_on_start", "false", "--save_strategy", "epoch", "--eval_strategy", "epoch"]
    process = fork_launch(*command, SIGNALS=json.dumps(signals))
    assert process.returncode == 143 and "Stopped by SIGTERM at step 3;" in process.stdout, process.stdout + process.stderr
    assert "eval_loss" not in process.stdout and process.stdout.count("A checkpoint is written.") == 1
    assert is_complete(run, 3)


@pytest.mark.parametrize(
    "moments", [[["step begins", 3]], [["batch is evaluated", 4], ["batch is evaluated", 8]]], ids=["before it", "in it"]
)
def test_evaluation_that_a_stop_left_out(fork_launch, workdir, moments):
    """The resumed run makes it, so that noise, a scheduler that depends on it and the best checkpoint are as uninterrupted."""
    command = ["--tiny", ROOT / "tests/run/signal_itself.py", "1x3090", "--max_steps", "8", "--save_steps", "4"]
    command += ["--eval_steps", "2", "--eval_delay", "4", "--eval_on_start", "false", "--logging_steps", "1"]
    command += ["--neftune_noise_alpha", "5", "--metric_for_best_model", "eval_loss"]
    command += ["--learning_rate", "1e-12"]  # so that the best evaluation is the first one, which the stop leaves out
    # No evaluation is better than the first one by 9, so the second one lowers the learning rate.
    plateau = json.dumps({"patience": 0, "threshold": 9, "threshold_mode": "abs"})
    command += ["--lr_scheduler_type", "reduce_lr_on_plateau", "--lr_scheduler_kwargs", plateau]
    whole, stopped = (workdir / f"runs/{name}-{len(moments)}" for name in ("not-stopped", "stopped-at-an-evaluation"))
    stops = [(stopped, [[0, *moment, "SIGTERM"]], 143) for moment in moments]
    for run, signals, code in ((whole, [], 0), *stops, (stopped, [], 0)):
        process = fork_launch(*command, "--output_dir", run, SIGNALS=json.dumps(signals))
        assert process.returncode == code, process.stdout + process.stderr
        assert ("Stopped by SIGTERM at step" in process.stdout) == (code == 143)
    assert losses(stopped) == losses(whole) and len(losses(whole)) == 8
    states = [read(run, "trainer_state.json") for run in (whole, stopped)]
    for name, count in (("eval_loss", 3), ("learning_rate", 8)):
        first, second = ([entry[name] for entry in history(run, name)] for run in (whole, stopped))
        assert first == second and len(first) == count
    assert states[0]["best_metric"] == states[1]["best_metric"]
    assert states[0]["best_global_step"] == states[1]["best_global_step"] == 4
