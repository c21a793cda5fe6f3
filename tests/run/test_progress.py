"""The message at every log, and the counters behind it."""

import json
import os
import subprocess

from harness.run import metrics, progress, results

import pytest
from runs import add_parts, history

RECIPE = "qwen2_fineweb_edu"


def test_message_of_a_log():
    logs = {"loss": 2.34567, "learning_rate": 2e-5, "grad_norm": 0.84, "tokens_per_second": 10512.3}
    message = progress.format_logs(logs, 1, 1000, 83.0)
    assert message == "step 1/1,000  loss 2.3457, grad_norm 0.84, learning_rate 2e-05, tokens_per_second 10512, 0:01:23 left"
    own = {"eval_loss": 2.0, "eval_runtime": 3.2, "eval_accuracy": 0.5, "eval_num_tokens": 9.0, "epoch": 1.0}
    assert progress.format_logs(own, 20, 30, 1.0) == "step 20/30  eval_loss 2, eval_accuracy 0.5"
    assert not progress.format_logs({"train_runtime": 9.0}, 30, 30, 0.0)


def test_loss_of_a_router_is_no_dataset():
    logs = {"eval_aux_loss": 0.01, "eval_loss": 2.0, "eval_code_loss": 1.5, "eval_runtime": 3.2}
    assert metrics.evaluation_losses(logs) == {"eval_loss": 2.0, "eval_code_loss": 1.5}


def test_seconds_of_steps(build_trainer, monkeypatch):
    """Start, evaluations and checkpoints are not in the time from which tokens per second are computed."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)

    def takes(seconds, function):
        def slow(*args, **kwargs):
            nonlocal now
            now += seconds
            return function(*args, **kwargs)

        return slow

    flags = ["--max_steps", "4", "--eval_steps", "2", "--save_steps", "2", "--logging_steps", "1", "--max_eval_samples", "4"]
    flags += ["--eval_on_start", "--max_length", "64"]
    left = []
    monkeypatch.setattr(progress, "format_logs", lambda logs, step, steps, seconds: "loss" in logs and left.append(seconds))
    trainer = build_trainer(RECIPE, *flags)
    counted = add_parts(trainer).progress
    counted.before = {"tokens": 100, "seconds": 50.0}
    trainer.add_callback(counted)
    trainer.training_step = takes(1.0, trainer.training_step)  # called for two micro-batches per step
    trainer.evaluate = takes(1000.0, trainer.evaluate)
    trainer._save_checkpoint = takes(1000.0, trainer._save_checkpoint)
    trainer.train()
    so_far = counted.so_far()
    assert so_far["seconds"] == 50 + 4 * 2 and so_far["runtime"] == 4 * 2 + 5000
    assert left == pytest.approx([3 * 2, 2 * 2, 2, 0])
    assert 0.9 < (so_far["tokens"] - 100) / (4 * 2 * 2 * 64) <= 1
    assert 0 < so_far["loss_tokens"] < so_far["tokens"]
    speeds = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(speeds) == 4 and all(0.9 < speed / (2 * 64) <= 1 for speed in speeds)


@pytest.mark.parametrize(("strategy", "logged"), [("steps", [2, 3, 4, 5]), ("no", [])])
def test_every_checkpoint_and_the_last_step_are_logged(build_trainer, strategy, logged):
    """A resumed run does not know the losses since the last log."""
    flags = ["--max_steps", "5", "--save_steps", "3", "--logging_steps", "2", "--logging_first_step", "false"]
    trainer = build_trainer("qwen2_chat", *flags, "--logging_strategy", strategy, "--eval_strategy", "no", "--max_length", "32")
    counted = add_parts(trainer).progress
    trainer.add_callback(counted)
    output = trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == logged
    assert results.mean_loss(trainer.state.log_history) == (pytest.approx(output.training_loss) if logged else None)


def test_every_log_has_the_speed(rehearse):
    assert all({"loss", "grad_norm", "tokens_per_second"} <= entry.keys() for entry in history(rehearse(RECIPE, "1x3090")))


# Prints what the two trackers have, as JSON: tag to (step, value) for TensorBoard, run to logs for trackio.
READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage as storage
events = EventAccumulator(sys.argv[1]).Reload()
board = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
runs = {run: storage.get_logs("huggingface", run) for run in storage.get_runs("huggingface")}
print(json.dumps([board, runs]))
"""


def test_trackers(rehearse, tracker_python, tmp_path):
    """TensorBoard and trackio get every log once, from the first process."""
    variables = {"PYTHON": str(tracker_python), "TRACKIO_DIR": str(tmp_path / "trackio")}
    flags = ["--report_to", "all", "--max_steps", "6", "--eval_strategy", "no", "--save_strategy", "no"]
    run = rehearse(RECIPE, "4gpu_ddp", *flags, NPROC_PER_NODE="2", **variables)
    [written] = run.glob("runs/*/events.out.tfevents.*.0")  # another file has the evaluation at the end
    read_both = [tracker_python, "-c", READ, written.parent]
    board, runs = json.loads(subprocess.check_output(read_both, env=os.environ | variables, text=True))
    losses = [(entry["step"], pytest.approx(entry["loss"])) for entry in history(run)]
    [evaluation] = history(run, "eval_loss")
    [(name, logs)] = runs.items()
    assert name.startswith(run.name)
    assert [(log["train/global_step"], log["train/loss"]) for log in logs if "train/loss" in log] == losses
    assert [log["eval/loss"] for log in logs if "eval/loss" in log] == [evaluation["eval_loss"]]
    assert [tuple(point) for point in board["train/loss"]] == losses
    assert [tuple(point) for point in board["eval/loss"]] == [(6, pytest.approx(evaluation["eval_loss"]))]
    assert len(board["train/tokens_per_second"]) == len(losses)
