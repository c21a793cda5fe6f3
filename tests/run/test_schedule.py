"""The schedule of the learning rate in short runs, and phases that do not fit into a run."""

from harness.data.reading import too_few_steps
from harness.run.trainer import fit_schedule

import pytest
from runs import add_parts
from transformers import TrainingArguments


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [(0.03, 1, 0), (0.03, 2, 0), (0.03, 3, 1), (0.03, 100, 3), (0.03, 101, 4), (0.6, 10, 6), (0.45, 3, 1), (5, 1, 0), (5, 4, 5)],
)
def test_share_of_the_warmup_rounds_down_in_a_short_run(given, steps, warmup):
    """It never takes the only step, or half of them. In longer runs it is that of transformers."""
    args = TrainingArguments("out", warmup_steps=given, use_cpu=True)
    fit_schedule(args, steps)
    assert args.get_warmup_steps(steps) == warmup


@pytest.mark.parametrize(("stable", "steps", "fits"), [(0, 25, False), (0, 60, True), (30, 60, True), (30, 70, False)])
def test_phases_that_do_not_fit(capsys, stable, steps, fits):
    """In the last case the last steps would have a learning rate of 0."""
    kwargs = {"num_decay_steps": 20} | ({"num_stable_steps": stable} if stable else {})
    schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
    fit_schedule(TrainingArguments("out", warmup_steps=10, use_cpu=True, **schedule), steps)
    assert ("--lr_scheduler_kwargs" in capsys.readouterr().out) != fits


def test_run_that_is_too_short(capsys):
    """It is said where the steps follow from the rows: a number of steps that was given is meant."""
    fit_schedule(TrainingArguments("out", use_cpu=True), 1)
    assert "--num_train_epochs" in capsys.readouterr().out
    fit_schedule(TrainingArguments("out", max_steps=1, use_cpu=True), 1)
    assert not capsys.readouterr().out and not too_few_steps(10)


def test_run_uses_it(build_trainer):
    trainer = build_trainer("qwen2_chat", "--warmup_steps", "0.03")
    add_parts(trainer)
    trainer.create_optimizer_and_scheduler(1)
    assert trainer.lr_scheduler.get_last_lr()[0] == trainer.args.learning_rate
