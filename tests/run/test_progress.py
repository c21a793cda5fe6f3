"""The line at every log, and the counters behind it."""

from harness.run import progress

import torch
from conftest import read

RECIPE = "qwen2_fineweb_edu"


def test_the_line_is_aligned():
    logs = {"loss": 2.34567, "learning_rate": 2e-5, "grad_norm": 0.84, "tokens_per_second": 10512.3, "gpu_0_utilization": 97.0}
    lines = [progress.line_of(logs, step, 1000, 83.0) for step in (1, 1000)]
    assert lines[0] == "step     1/1,000  loss  2.3457  lr 2.00e-05  grad    0.840     10,512 tokens/s  GPU 97 %  0:01:23 left"
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
    assert 0.9 < (so_far["tokens"] - 100) / (4 * 2 * 2 * 256) <= 1
    speeds = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(speeds) == 4 and all(0.9 < speed / (2 * 256) <= 1 for speed in speeds)


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
    assert gpus.read() == {} and gpus.utilization() == [80.0, 20.0]
    gpus.look()  # the counters are at their end: an error
    assert gpus.read() == {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert progress.Gpus().count == 0


def test_a_rehearsal_logs_speed_and_keeps_the_numbers_whole(rehearse):
    history = read(rehearse(RECIPE, "1x3090"), "trainer_state.json")["log_history"]
    assert all({"loss", "grad_norm", "tokens_per_second"} <= entry.keys() for entry in history if "loss" in entry)
