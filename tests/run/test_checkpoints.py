"""A run goes on from its newest whole checkpoint as if nothing had been; a finished one says so."""

import shutil
from pathlib import Path

from harness.folder import latest
from harness.nodes import signals
from harness.run import session

import pytest
from conftest import BRIEF, losses, read

RECIPE = "qwen2_fineweb_edu"


def test_a_finished_run_says_so_and_is_left_alone(rehearse, launch):
    run = rehearse(RECIPE, "1x3090")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.json"}
    process = launch("--tiny", RECIPE, "1x3090", "--output_dir", run, *BRIEF)
    assert process.returncode == 0
    for word in ("is finished", "20 steps", "--max_steps", "--output_dir", "rm -r"):
        assert word in process.stdout
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.json"}


def test_a_run_killed_after_its_last_step_trains_no_other(rehearse, launch, workplace):
    run = workplace / "runs/killed-at-the-end"
    shutil.copytree(rehearse(RECIPE, "1x3090"), run)
    before = losses(run)
    (run / "train_results.json").unlink()
    process = launch("--tiny", RECIPE, "1x3090", "--output_dir", run, *BRIEF)
    assert process.returncode == 0, process.stderr
    results = read(run)
    assert (results["global_step"], results["resumed_from_step"]) == (20, 20) and losses(run) == before
    assert results["tokens"] > 0 and results["train_runtime"] > 0  # of the part before


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("llama31_70b_qlora", "2x3090_qlora"),
        ("llama31_8b_lora", "4gpu_full_shard"),
        ("gpt2_xl_wikitext", "3xt4_shard_grad_op"),
        ("qwen2_chat", "1x3090"),
    ],
)
def test_resumed_equals_uninterrupted(rehearse, launch, workplace, recipe, config):
    """From the checkpoint in the middle of a finished run: the second half logs the same losses, bit for bit."""
    undisturbed = rehearse(recipe, config)
    middle = min(undisturbed.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    run = workplace / "runs" / f"resumed-{recipe}"
    shutil.copytree(middle, run / middle.name)
    shutil.copy(undisturbed / "run.json", run)
    process = launch("--tiny", recipe, config, "--output_dir", run, *BRIEF)
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] == 15
    assert losses(run) == losses(undisturbed)


def test_a_checkpoint_of_broken_weights_does_not_count(build_trainer, monkeypatch):
    """The loss turned NaN between two logs: the run stops before such a checkpoint is one to go on from."""
    flags = ["--max_steps", "2", "--save_steps", "1", "--logging_steps", "9", "--logging_first_step", "false"]
    trainer = build_trainer("qwen2_chat", *flags, "--eval_strategy", "no")
    monkeypatch.setattr(signals, "handle", lambda handler: None)
    next(trainer.model.parameters()).data[0] = float("nan")
    with pytest.raises(RuntimeError, match="no finite numbers at step 1: try a lower --learning_rate"):
        session.train(trainer)
    assert Path(trainer.args.output_dir, "checkpoint-1").is_dir()
    assert latest(Path(trainer.args.output_dir)) is None
