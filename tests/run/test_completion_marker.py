"""The completion marker of a checkpoint: damage to any of its files is found and named."""

import os
import shutil
import sys
from contextlib import nullcontext

from harness.folder import COMPLETION_MARKER, newest_complete_checkpoint, write_json
from harness.run import checkpoints

import pytest

FILES = {"scheduler.pt": b"s" * 1_465, "rng_state_1.pth": b"r" * 15_000, "pytorch_model_fsdp_0/__0_0.distcp": b"w" * 70_000}


def _flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit changed": _flip_bit,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
# Python's audit events for changes of files.
CHANGES = {"open", "os.mkdir", "os.remove", "os.rmdir"}


@pytest.fixture
def checkpoint(tmp_path):
    """A complete checkpoint with FILES, written by two processes."""
    folder = tmp_path / "checkpoint-5"
    checkpoints.begin_writing(folder)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    assert checkpoints.is_incomplete(folder) and newest_complete_checkpoint(tmp_path) is None
    first = checkpoints.sync_files(folder, lambda name: "1" not in name)
    second = checkpoints.sync_files(folder, lambda name: "1" in name)
    assert (len(first), len(second)) == (2, 1)
    checkpoints.write_marker(folder, {"geometry": {"seed": 42}, "progress": {"seconds": 0.1}, "files": first | second})
    assert newest_complete_checkpoint(tmp_path) == folder
    assert not checkpoints.is_incomplete(folder) and checkpoints.find_damage(folder) == ""
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, COMPLETION_MARKER])
def test_damage_is_found(checkpoint, name, kind):
    DAMAGE[kind](checkpoint / name)
    assert name in checkpoints.find_damage(checkpoint)
    if name == "rng_state_1.pth" and kind in ("one bit changed", "zeros"):  # its checksum is compared by its process only
        assert not checkpoints.find_damage(checkpoint, lambda name: "1" not in name)


@pytest.mark.parametrize("change", [checkpoints.begin_writing, checkpoints.delete], ids=["begin", "delete"])
def test_checkpoint_is_never_taken_for_complete_after_a_kill(checkpoint, tmp_path, monkeypatch, change):
    """Kills the process before each change of a file: the checkpoint is incomplete, undamaged, or gone.

    Folders are listed with WRITING first, which is the worst order for `delete`.
    """
    scan = os.scandir

    def scan_writing_first(*arguments):
        return nullcontext(sorted(scan(*arguments), key=lambda entry: entry.name != checkpoints.WRITING))

    monkeypatch.setattr(os, "scandir", scan_writing_first)
    for number in range(1, 100):
        folder = tmp_path / f"killed before change {number}/checkpoint-5"
        if change is checkpoints.delete:
            shutil.copytree(checkpoint, folder)
        pid = os.fork()
        if pid == 0:
            remaining = number

            def kill(event, arguments):
                nonlocal remaining
                remaining -= event in CHANGES
                if not remaining:
                    os._exit(9)

            sys.addaudithook(kill)
            change(folder)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
        assert not folder.exists() or checkpoints.is_incomplete(folder) or not checkpoints.find_damage(folder), number
    assert number > (3 if change is checkpoints.begin_writing else 8)
    assert folder.exists() == (change is checkpoints.begin_writing)


def test_marker_of_earlier_version_is_trusted(checkpoint):
    write_json(checkpoint / COMPLETION_MARKER, {"model": "m", "geometry": {"seed": 42}, "progress": {}})
    assert checkpoints.find_damage(checkpoint) == ""


def test_damaged_marker(checkpoint):
    text = (checkpoint / COMPLETION_MARKER).read_text()
    (checkpoint / COMPLETION_MARKER).write_text(text.replace('"seed": 42', '"seed": 43'))
    assert checkpoints.find_damage(checkpoint) == f"{COMPLETION_MARKER} was changed"
    (checkpoint / COMPLETION_MARKER).write_text("[]")
    assert checkpoints.find_damage(checkpoint) == f"{COMPLETION_MARKER} is damaged"


def test_checkpoint_that_does_not_exist(checkpoint):
    shutil.rmtree(checkpoint)
    assert checkpoints.find_damage(checkpoint) == f"{COMPLETION_MARKER} is missing" and not checkpoints.is_incomplete(checkpoint)
