"""Too little disk space ends a run before it begins. A disk that fills, or a folder that disappears, costs no checkpoint."""

import os
import shutil
import subprocess
from pathlib import Path

from harness.run.checkpoints import check_disk_space, estimated_sizes

import pytest
from runs import is_complete, losses, read, wait_for_checkpoint

RECIPE = "qwen2_fineweb_edu"
FLAGS = ["--max_steps", "12", "--save_steps", "6", "--logging_steps", "6", "--eval_strategy", "no"]


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of some megabytes on `tmp_path`."""
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs root on Linux, to mount a small disk")

    def resize(size):
        subprocess.run(["mount", "-o", f"remount,size={size}", tmp_path], check=True)
        return tmp_path

    yield resize
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_space_for_two_checkpoints_and_the_model(build_trainer, small_disk, error_of):
    trainer = build_trainer("qwen2_chat")
    trainer.args.output_dir = str(small_disk("3M"))
    assert "--output_dir" in error_of(check_disk_space, trainer)
    checkpoint, model = estimated_sizes(trainer)
    trainer.args.output_dir = str(small_disk(str(2 * checkpoint + model + 300_000)))
    check_disk_space(trainer)
    trainer.args.metric_for_best_model = "loss"  # the best one too
    assert "--output_dir" in error_of(check_disk_space, trainer)
    trainer.args.metric_for_best_model = None
    trainer.args.output_dir, trainer.args.save_strategy = str(small_disk("2M")), "no"
    check_disk_space(trainer)


@pytest.fixture
def fail_after_checkpoint(fork_launch, tmp_path_factory):
    """Starts a rehearsal, calls `break_disk()` after its first checkpoint, and returns the error message."""

    def call(run, break_disk):
        log = tmp_path_factory.mktemp("log") / "log"
        process = fork_launch.start("--tiny", RECIPE, "1x3090", "--output_dir", run, *FLAGS, out=log, err=log)
        wait_for_checkpoint(run, 6, process, log)
        break_disk()
        code, text = process.wait(timeout=120), log.read_text()
        (message,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert code == 74 and "Traceback" not in text
        return message

    return call


def test_disk_fills_during_a_save(small_disk, fail_after_checkpoint, fork_launch, rehearse):
    folder = small_disk("16M")
    run, other_file = folder / "run", folder / "other"

    def fill():
        with other_file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - 1_500_000)

    message = fail_after_checkpoint(run, fill)
    assert "cannot be written at step 12: " in message and "of the disk are free" in message
    assert f"resumes from {run / 'checkpoint-6'}" in message
    other_file.unlink()
    process = fork_launch("--tiny", RECIPE, "1x3090", "--output_dir", run, *FLAGS)
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] == 6 and losses(run) == losses(rehearse(RECIPE, "1x3090", *FLAGS))


def test_output_directory_disappears(fail_after_checkpoint, tmp_path):
    run = Path(tmp_path, "run")
    message = fail_after_checkpoint(run, lambda: run.rename(tmp_path / "moved"))
    assert "it has disappeared" in message
    assert not run.exists() and is_complete(tmp_path / "moved", 6)
