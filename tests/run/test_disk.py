"""A disk that is too small is foreseen; one that fills, or goes away, ends the run with one line and costs no checkpoint."""

import os
import shutil
import subprocess
from pathlib import Path

from harness.run import disk

import pytest
from conftest import ROOT, losses, read, wait_until

RECIPE = "qwen2_fineweb_edu"
FLAGS = ["--max_steps", "20", "--save_steps", "10", "--logging_steps", "10", "--eval_strategy", "no"]


@pytest.fixture
def small_disk(tmp_path):
    """Makes a disk of some megabytes."""
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs root on Linux, to mount a small disk")
    yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", tmp_path], check=True) and tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_room_for_two_checkpoints_and_the_model(build_trainer, small_disk, says):
    trainer = build_trainer("qwen2_chat")
    trainer.args.output_dir = str(small_disk("3M"))
    line = says(disk.check, trainer, None)
    assert "3.1 MB free" in line and "2 checkpoints of " in line and "a model of " in line and "another disk" in line
    trainer.args.output_dir = str(small_disk("9M"))
    disk.check(trainer, None)
    trainer.args.output_dir, trainer.args.save_strategy = str(small_disk("2M")), "no"
    disk.check(trainer, None)


@pytest.fixture
def train(environment, workplace, tmp_path_factory):
    """Starts a rehearsal and waits until its first checkpoint is whole; then does something, and returns how it ended."""

    def call(run, then):
        log = tmp_path_factory.mktemp("log") / "log"
        command = [ROOT / "launch.sh", "--tiny", RECIPE, "1x3090", "--output_dir", run, *FLAGS]
        with log.open("w") as file:
            process = subprocess.Popen(list(map(str, command)), cwd=workplace, env=environment, stdout=file, stderr=file)
        wait_until(lambda: (run / "checkpoint-10/complete.json").is_file() or process.poll() is not None, 120, log.read_text)
        then()
        code, text = process.wait(timeout=120), log.read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert code == 74 and "Traceback" not in text
        return line

    return call


def test_a_disk_that_fills_in_the_middle_of_a_save(small_disk, train, starts, rehearse):
    folder = small_disk("16M")
    run, ballast = folder / "run", folder / "ballast"

    def fill():
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - 1_500_000)

    line = train(run, fill)
    assert "at step 20: the disk is full: for a checkpoint of " in line and " MB are missing" in line
    assert f"goes on from {run / 'checkpoint-10'}" in line
    ballast.unlink()
    process = starts("--tiny", RECIPE, "1x3090", "--output_dir", run, *FLAGS)
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] == 10 and losses(run) == losses(rehearse(RECIPE, "1x3090", *FLAGS))


def test_a_folder_that_disappears(train, tmp_path):
    run = Path(tmp_path, "run")
    line = train(run, lambda: run.rename(tmp_path / "elsewhere"))
    assert "it has disappeared" in line and not run.exists() and (tmp_path / "elsewhere/checkpoint-10/complete.json").is_file()
