"""The completion marker of a checkpoint: damage to any of its files is found and named."""

import json
import os
import shutil
import sys
from contextlib import nullcontext

from harness.folder import COMPLETION_MARKER, newest_complete_checkpoint
from harness.run import marker

import pytest

pytestmark = pytest.mark.unit

FILES = {"scheduler.pt": b"s" * 1_465, "rng_state_1.pth": b"r" * 15_000, "pytorch_model_fsdp_0/__0_0.distcp": b"w" * 70_000}


def _flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SETTINGS = {"rows of a step": 8, "seed": 42}
MARKER = {"row_settings": SETTINGS, "progress": {"seconds": 0.1}}
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
    marker.begin_writing(folder)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    assert marker.is_incomplete(folder) and newest_complete_checkpoint(tmp_path) is None
    first = marker.sync_files(folder, lambda name: "1" not in name)
    second = marker.sync_files(folder, lambda name: "1" in name)
    assert (len(first), len(second)) == (2, 1)
    marker.write_marker(folder, MARKER | {"files": first | second})
    assert newest_complete_checkpoint(tmp_path) == folder
    assert not marker.is_incomplete(folder) and marker.find_damage(folder) == ""
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, COMPLETION_MARKER])
def test_damage_is_found(checkpoint, name, kind):
    DAMAGE[kind](checkpoint / name)
    assert name in marker.find_damage(checkpoint)
    if name == "rng_state_1.pth" and kind in ("one bit changed", "zeros"):  # its checksum is compared by its process only
        assert not marker.find_damage(checkpoint, lambda name: "1" not in name)


@pytest.mark.parametrize("change", [marker.begin_writing, marker.delete], ids=["begin", "delete"])
def test_checkpoint_is_never_taken_for_complete_after_a_kill(checkpoint, tmp_path, monkeypatch, change):
    """Kills the process before each change of a file: the checkpoint is incomplete, undamaged, or gone.

    Folders are listed with WRITING first, which is the worst order for `delete`.
    """
    scan = os.scandir

    def scan_writing_first(*arguments):
        return nullcontext(sorted(scan(*arguments), key=lambda entry: entry.name != marker.WRITING))

    monkeypatch.setattr(os, "scandir", scan_writing_first)
    for number in range(1, 100):
        folder = tmp_path / f"killed before change {number}/checkpoint-5"
        folder.parent.mkdir()
        if change is marker.delete:
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
        assert not folder.exists() or marker.is_incomplete(folder) or not marker.find_damage(folder), number
    assert number > (3 if change is marker.begin_writing else 8)
    assert folder.exists() == (change is marker.begin_writing)


def test_links_are_not_followed(checkpoint, tmp_path):
    """Neither where a checkpoint is deleted or written again, nor where one is read."""
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    for change, name in ((marker.delete, "deleted"), (marker.begin_writing, "written")):
        (tmp_path / name).symlink_to(other)
        change(tmp_path / name)
        assert not (tmp_path / name).is_symlink() and marker.find_damage(other) == ""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link").symlink_to(other)
    marker.delete(tmp_path / "folder")
    assert not (tmp_path / "folder").exists() and marker.find_damage(other) == ""
    assert not (tmp_path / "deleted").exists() and marker.is_incomplete(tmp_path / "written")
    (checkpoint / "scheduler.pt").unlink()
    (checkpoint / "scheduler.pt").symlink_to(other / "scheduler.pt")
    assert marker.find_damage(checkpoint) == "scheduler.pt is outside of the checkpoint"


def test_checkpoint_that_is_a_link_is_read(checkpoint, tmp_path):
    """To a larger disk, for example."""
    checkpoint.rename(tmp_path / "elsewhere")
    checkpoint.symlink_to(tmp_path / "elsewhere")
    assert marker.find_damage(checkpoint) == ""


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/../../x", "", ".", "a/", "..", "\0", "\ud800"])
def test_names_outside_of_the_checkpoint_are_refused(checkpoint, name):
    marker.begin_writing(checkpoint)
    marker.write_marker(checkpoint, MARKER | {"files": {name: [1, "x"]}})
    assert marker.find_damage(checkpoint)


def without_files(text):
    content = json.loads(text) | {"files": {}}
    del content["checksum"]
    return json.dumps(content | {"checksum": marker.checksum_of_content(content)}).encode()


def test_odd_markers_are_damage(checkpoint):
    path = checkpoint / COMPLETION_MARKER
    text = path.read_bytes()
    changed = text.replace(b'"seed": 42', b'"seed": 43')
    for content in (without_files(text), changed, b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"9" * 5_000):
        path.write_bytes(content)
        assert marker.find_damage(checkpoint) == f"{COMPLETION_MARKER} is damaged"
