"""The line at every log, and the counters behind it."""

import json
import os
import subprocess

from harness.run import progress

import pytest
import torch
from conftest import read

RECIPE = "qwen2_fineweb_edu"


def test_the_line_is_aligned():
    logs = {"loss": 2.34567, "learning_rate": 2e-5, "grad_norm": 0.84, "tokens_per_second": 10512.3, "gpu_0_utilization": 97.0}
    logs |= {"gpu_1_utilization": 96.0, "gpu_0_memory_gb": 14.21, "gpu_1_memory_gb": 14.0}
    lines = [progress.line_of(logs, step, 1000, 83.0) for step in (1, 1000)]
    start, rest = lines[0].split("  loss ")
    assert start == "step     1/1,000" and rest == (
        " 2.3457  lr 2.00e-05  grad    0.840     10,512 tokens/s  GPU 97 96 % 14.2 14.0 GB  0:01:23 left"
    )
    assert len(lines[0]) == len(lines[1])
    assert progress.line_of({"eval_loss": 2.0, "eval_runtime": 3.2}, 20, 30, 1.0) == "step 20/30  held-out loss 2.0000  in 3 s"
    assert progress.line_of({"train_runtime": 9.0}, 30, 30, 0.0) == ""


def test_seconds_are_those_of_steps(build_trainer, monkeypatch):
    """Neither the start nor an evaluation nor a checkpoint is in the time that tokens per second are counted in."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)

    def takes(seconds, function):
        def slow(*args, **kwargs):
            nonlocal now
            now += seconds
            return function(*args, **kwargs)

        return slow

    trainer = build_trainer(RECIPE, "--max_steps", "4", "--eval_steps", "2", "--save_steps", "2", "--logging_steps", "1")
    counted = progress.Progress(trainer, {"tokens": 100, "seconds": 50.0})
    trainer.add_callback(counted)
    trainer.training_step = takes(1.0, trainer.training_step)  # of two micro-batches
    trainer.evaluate = takes(1000.0, trainer.evaluate)
    trainer._save_checkpoint = takes(1000.0, trainer._save_checkpoint)
    trainer.train()
    so_far = counted.so_far()
    assert so_far["seconds"] == 50 + 4 * 2 and so_far["runtime"] == 4 * 2 + 4000
    assert 0.9 < (so_far["tokens"] - 100) / (4 * 2 * 2 * 128) <= 1
    speeds = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(speeds) == 4 and all(0.9 < speed / (2 * 128) <= 1 for speed in speeds)


def test_gpus_are_looked_at_between_logs(monkeypatch):
    """Every GPU of the node, by one of its processes; a GPU without such a counter ends nothing."""
    seen = iter([90, 10, 70, 30])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: next(seen))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: 3e9 + index)
    gpus = progress.Gpus()
    gpus.look()
    gpus.look()
    assert gpus.read() == {
        "gpu_0_utilization": 80.0,
        "gpu_0_memory_gb": 3.0,
        "gpu_1_utilization": 20.0,
        "gpu_1_memory_gb": 3.0,
    }
    assert gpus.read() == {} and gpus.of_the_run() == [(80.0, 3.0), (20.0, 3.0)]
    gpus.look()  # the counters are at their end: an error
    assert gpus.read() == {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert progress.Gpus().count == 0


def test_a_rehearsal_logs_speed_and_keeps_the_numbers_whole(rehearse):
    history = read(rehearse(RECIPE, "1x3090"), "trainer_state.json")["log_history"]
    assert all({"loss", "grad_norm", "tokens_per_second"} <= entry.keys() for entry in history if "loss" in entry)


# Writes down what every process of a run connects to, and which files trackio opens.
WATCH = """
import os, sys
def watch(event, arguments):
    if event in ("socket.connect", "sqlite3.connect"):
        with open(os.environ["SEEN"], "a") as file:
            print(os.environ.get("RANK"), event, *arguments[-1:], file=file)
if "SEEN" in os.environ:
    sys.addaudithook(watch)
"""
# What the two trackers would show, as JSON: tag to (step, value).
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
    """TensorBoard and trackio get what is logged, once, from the first process, and nothing leaves the machine."""
    site = next(tracker_python.parents[1].glob("lib/python*/site-packages"))
    (site / "sitecustomize.py").write_text(WATCH)
    variables = {"PYTHON": str(tracker_python), "TRACKIO_DIR": str(tmp_path / "trackio"), "SEEN": str(tmp_path / "seen")}
    flags = ["--report_to", "all", "--max_steps", "6", "--eval_strategy", "no", "--save_strategy", "no"]
    run = rehearse(RECIPE, "4gpu_ddp", *flags, NPROC_PER_NODE="2", **variables)
    [written] = run.glob("runs/*/events.out.tfevents.*.0")  # another one holds the evaluation at the end
    read_both = [tracker_python, "-c", READ, written.parent]
    seen = (tmp_path / "seen").read_text().splitlines()
    board, runs = json.loads(subprocess.check_output(read_both, env=os.environ | variables, text=True))
    history = read(run, "trainer_state.json")["log_history"]
    losses = [(entry["step"], pytest.approx(entry["loss"])) for entry in history if "loss" in entry]
    [evaluation] = [entry for entry in history if "eval_loss" in entry]
    [(name, logs)] = runs.items()
    assert name.startswith(run.name)
    assert [(log["train/global_step"], log["train/loss"]) for log in logs if "train/loss" in log] == losses
    assert [log["eval/loss"] for log in logs if "eval/loss" in log] == [evaluation["eval_loss"]]
    assert [tuple(point) for point in board["train/loss"]] == losses
    assert [tuple(point) for point in board["eval/loss"]] == [(6, pytest.approx(evaluation["eval_loss"]))]
    assert len(board["train/tokens_per_second"]) == len(losses)
    assert {line.split()[0] for line in seen if "sqlite3.connect" in line} == {"0"}
    abroad = [line for line in seen if "socket.connect" in line and "/pymp-" not in line and "'localhost'" not in line]
    assert not abroad
