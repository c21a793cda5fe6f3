"""The message at every log, and the counters behind it."""

from harness.run import metrics, progress, results

import pytest
from runs import add_parts

RECIPE = "qwen2_fineweb_edu"


def test_loss_of_a_router_is_no_dataset():
    logs = {"eval_aux_loss": 0.01, "eval_loss": 2.0, "eval_code_loss": 1.5, "eval_runtime": 3.2}
    assert metrics.evaluation_losses(logs) == {"eval_loss": 2.0, "eval_code_loss": 1.5}


def test_seconds_of_steps(build_trainer, monkeypatch, capsys):
    """Start, evaluations and checkpoints are not in the time from which tokens per second are computed."""
    monkeypatch.setattr(progress, "LONG", 3.9)  # after the second step, 4 s are left
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
    assert capsys.readouterr().out.count("A step takes 2.0 s on this CPU, the rest of the run 0.0 hours.") == 1
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
