"""A run goes on from its newest whole checkpoint as if nothing had been; a finished one says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from harness import marks
from harness.folder import latest
from harness.nodes import signals
from harness.run import checkpoints, session

import pytest
from conftest import ROOT, free_port, losses, read
from rehearsals import BRIEF

RECIPE = "qwen2_fineweb_edu"


def test_a_finished_run_says_so_and_is_left_alone(rehearse, starts):
    run = rehearse(RECIPE, "1x3090")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.json"}
    process = starts("--tiny", RECIPE, "1x3090", "--output_dir", run, *BRIEF)
    assert process.returncode == 0
    for word in ("is finished", "15 steps", "--max_steps", "--output_dir", "rm -r"):
        assert word in process.stdout
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.json"}


def test_a_run_killed_after_its_last_step_trains_no_other(rehearse, starts, workplace):
    run = workplace / "runs/killed-at-the-end"
    shutil.copytree(rehearse(RECIPE, "1x3090"), run)
    before = losses(run)
    (run / "train_results.json").unlink()
    process = starts("--tiny", RECIPE, "1x3090", "--output_dir", run, *BRIEF)
    assert process.returncode == 0, process.stderr
    results = read(run)
    assert (results["global_step"], results["resumed_from_step"]) == (15, 15) and losses(run) == before
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
def test_resumed_equals_uninterrupted(rehearse, starts, workplace, recipe, config):
    """From the checkpoint in the middle of a finished run: the second half logs the same losses, bit for bit."""
    undisturbed = rehearse(recipe, config)
    middle = min(undisturbed.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    run = workplace / "runs" / f"resumed-{recipe}"
    shutil.copytree(middle, run / middle.name)
    shutil.copy(undisturbed / "run.json", run)
    process = starts("--tiny", recipe, config, "--output_dir", run, *BRIEF)
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] == 10
    assert losses(run) == losses(undisturbed)


@pytest.mark.parametrize("now", [2, 8])
def test_four_processes_go_on_as_two_and_as_eight(rehearse, starts, workplace, now):
    """Sharded: the same global batches in float32 give the same losses."""
    flags = ["--max_steps", "5", "--save_steps", "3", "--logging_steps", "1", "--eval_strategy", "no", "--max_length", "64"]
    flags += ["--per_device_train_batch_size", "1", "--global_batch_size", "8", "--dataset_streaming", "false"]
    flags += ["--bf16", "false", "--learning_rate", "3e-3"]
    undisturbed = rehearse(RECIPE, "4gpu_full_shard", *flags)
    run = workplace / f"runs/on-{now}"
    shutil.copytree(undisturbed / "checkpoint-3", run / "checkpoint-3")
    shutil.copy(undisturbed / "run.json", run)
    process = starts("--tiny", RECIPE, "4gpu_full_shard", "--output_dir", run, *flags, NPROC_PER_NODE=str(now))
    assert process.returncode == 0, process.stderr
    results = read(run)
    assert (results["resumed_from_step"], results["world_size"], results["global_batch_size"]) == (3, now, 8)
    expected = losses(undisturbed)
    assert losses(run).keys() == expected.keys()
    for step, numbers in losses(run).items():
        assert numbers == (pytest.approx(expected[step][0], abs=1e-4), pytest.approx(expected[step][1], rel=1e-3)), step


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


def _changed(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Nine kinds of damage, each to a file that transformers would load, skip without a word, or stumble over.
DAMAGE = {
    "weights changed": ("model.safetensors", _changed, "was changed"),
    "weights cut": ("model.safetensors", lambda path: os.truncate(path, 1000), "has 1,000 bytes, it had "),
    "weights missing": ("model.safetensors", Path.unlink, "is missing"),
    "optimizer missing": ("optimizer.pt", Path.unlink, "is missing"),
    "optimizer empty": ("optimizer.pt", lambda path: os.truncate(path, 0), "has 0 bytes, it had "),
    "scheduler missing": ("scheduler.pt", Path.unlink, "is missing"),
    "random state missing": ("rng_state.pth", Path.unlink, "is missing"),
    "trainer's state cut": ("trainer_state.json", lambda path: os.truncate(path, 100), "has 100 bytes, it had "),
    "mark changed": ("complete.json", _changed, ""),
}


@pytest.fixture
def twice(rehearse, tmp_path):
    """A copy of a run's two checkpoints."""
    undisturbed = rehearse("qwen2_chat", "1x3090")
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, ignore=shutil.ignore_patterns("train_results.json"))
    return run, undisturbed


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_the_newest_falls_back(twice, capsys, kind):
    run, _ = twice
    file, damage, words = DAMAGE[kind]
    damage(run / "checkpoint-15" / file)
    assert checkpoints.newest(SimpleNamespace(output_dir=str(run))) == run / "checkpoint-10"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
    assert line.startswith(f"{run / 'checkpoint-15'} is damaged: {file} {words}") and "kept as damaged-checkpoint-15." in line
    assert (run / "damaged-checkpoint-15").is_dir() and not (run / "checkpoint-15").exists()


def test_after_damage_the_losses_are_those_of_an_undisturbed_run(twice, starts):
    run, undisturbed = twice
    _changed(run / "checkpoint-15/optimizer.pt")
    (run / "damaged-checkpoint-15").mkdir()  # from an earlier time
    process = starts("--tiny", "qwen2_chat", "1x3090", "--output_dir", run, *BRIEF)
    assert process.returncode == 0 and "damaged: optimizer.pt was changed" in process.stdout, process.stderr
    assert read(run)["resumed_from_step"] == 10 and losses(run) == losses(undisturbed)
    assert (run / "damaged-checkpoint-15.2/optimizer.pt").is_file()
    model = (run / "model.safetensors").read_bytes()
    assert model == (undisturbed / "model.safetensors").read_bytes()


def test_when_none_is_whole_nothing_is_touched(twice, says):
    run, _ = twice
    for path in run.glob("checkpoint-*"):
        (path / "scheduler.pt").unlink()
    before = sorted(run.rglob("*"))
    line = says(checkpoints.newest, SimpleNamespace(output_dir=str(run)))
    for words in ("checkpoint-10: scheduler.pt is missing", "checkpoint-15: ", "Nothing was deleted", "another --output_dir"):
        assert words in line
    assert sorted(run.rglob("*")) == before


def test_old_ones_are_deleted_by_step_whatever_the_clock_says(build_trainer, monkeypatch):
    """The clock is set back between two saves; never more checkpoints than the limit, in the middle of a save neither."""
    trainer = build_trainer("qwen2_chat", "--max_steps", "3", "--save_steps", "1", "--eval_strategy", "no")
    monkeypatch.setattr(signals, "handle", lambda handler: None)
    run, seen = Path(trainer.args.output_dir), []
    write, wrote = trainer._save_checkpoint, trainer.callback_handler.on_save

    def save(*arguments):
        seen.append(sorted(path.name for path in run.glob("checkpoint-*")))
        write(*arguments)

    def saved(*arguments):
        control = wrote(*arguments)
        for path in run.glob("checkpoint-*"):
            os.utime(path, (2e9 - 1e6 * len(seen),) * 2)
        return control

    monkeypatch.setattr(trainer, "_save_checkpoint", save)
    monkeypatch.setattr(trainer.callback_handler, "on_save", saved)
    session.train(trainer)
    assert seen == [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]
    assert latest(run) == run / "checkpoint-3"


AGREE = """
import json, os
from types import SimpleNamespace
from accelerate import PartialState
from harness.run import checkpoints
PartialState(cpu=True)
print(checkpoints.newest(SimpleNamespace(output_dir="run")))
"""


@pytest.mark.parametrize("file", ["scheduler.pt", "rng_state_1.pth"])
def test_all_agree_when_one_sees_the_damage(environment, tmp_path, file):
    """Two processes with a view of the folder each, of which the second is damaged: in a file of all, and in one of its own."""
    for rank in range(2):
        for step in (5, 10):
            checkpoint = tmp_path / f"{rank}/run/checkpoint-{step}"
            marks.begin(checkpoint)
            for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
                (checkpoint / name).write_text(name)
            marks.end(checkpoint, {"geometry": {"world_size": 2}, "files": marks.seal(checkpoint, lambda name: True)})
    _changed(tmp_path / "1/run/checkpoint-10" / file)
    port, started = str(free_port()), []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": "0", "GROUP_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT / "recipes")}
        command, where = [sys.executable, "-c", AGREE], tmp_path / rank
        started.append(subprocess.Popen(command, cwd=where, env=environment | own, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[0].splitlines() for process in started]
    assert [lines[-1] for lines in said] == ["run/checkpoint-5"] * 2
    assert f"checkpoint-10 is damaged: {file} was changed. It is kept" in said[0][0]
