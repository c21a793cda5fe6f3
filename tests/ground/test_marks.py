"""The mark of a checkpoint: any damage to any of its files is found, and named."""

import os
import shutil
import sys
from contextlib import nullcontext

from harness import marks
from harness.folder import MARK, latest, write_json

import pytest

FILES = {"scheduler.pt": b"s" * 1_465, "rng_state_1.pth": b"r" * 15_000, "pytorch_model_fsdp_0/__0_0.distcp": b"w" * 70_000}


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit changed": _flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


CHANGES = {"open", "os.mkdir", "os.remove", "os.rmdir"}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint-5"
    marks.begin(folder)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    assert marks.is_cut_short(folder) and latest(tmp_path) is None
    parts = [marks.seal(folder, lambda name, n=n: ("1" in name) == n) for n in (False, True)]  # as two processes would
    assert [len(part) for part in parts] == [2, 1]
    marks.end(folder, {"geometry": {"seed": 42}, "effort": {"seconds": 0.1}, "files": parts[0] | parts[1]})
    assert latest(tmp_path) == folder and not marks.is_cut_short(folder) and marks.fault(folder) == ""
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, MARK])
def test_damage_is_found(checkpoint, name, kind):
    DAMAGE[kind](checkpoint / name)
    assert name in marks.fault(checkpoint)
    if name == "rng_state_1.pth" and kind in ("one bit changed", "zeros"):  # only whose file it is reads it
        assert not marks.fault(checkpoint, lambda name: "1" not in name)


@pytest.mark.parametrize("change", [marks.begin, marks.remove], ids=["begun", "deleted"])
def test_a_kill_on_the_way_leaves_one_that_is_cut_short(checkpoint, tmp_path, monkeypatch, change):
    """Or one that is whole, or none. Python's audit events name the places; a folder is listed with the sign first."""
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda *a: nullcontext(sorted(scan(*a), key=lambda entry: entry.name != marks.WRITING)))
    for place in range(1, 100):
        folder = tmp_path / f"killed at {place}/checkpoint-5"
        if change is marks.remove:
            shutil.copytree(checkpoint, folder)
        pid = os.fork()
        if pid == 0:
            left = iter(range(place - 1))
            sys.addaudithook(lambda event, _, left=left: event in CHANGES and next(left, None) is None and os._exit(9))
            change(folder)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
        assert not folder.exists() or marks.is_cut_short(folder) or not marks.fault(folder), place
    assert place > (3 if change is marks.begin else 8) and folder.exists() == (change is marks.begin)


def test_a_checkpoint_of_an_earlier_version_is_believed(checkpoint):
    write_json(checkpoint / MARK, {"model": "m", "geometry": {"seed": 42}, "effort": {}})
    assert marks.fault(checkpoint) == ""


def test_a_mark_that_was_changed_counts_as_none(checkpoint):
    text = (checkpoint / MARK).read_text()
    (checkpoint / MARK).write_text(text.replace('"seed": 42', '"seed": 43'))
    assert marks.fault(checkpoint) == f"{MARK} was changed"
    (checkpoint / MARK).write_text("[]")
    assert marks.fault(checkpoint) == f"{MARK} is no mark any more"


def test_without_its_folder(checkpoint):
    shutil.rmtree(checkpoint)
    assert marks.fault(checkpoint) == f"{MARK} is missing" and not marks.is_cut_short(checkpoint)
