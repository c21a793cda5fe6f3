"""The completion marker of a checkpoint, complete.json: written last, it lists every file with its size and checksum.

transformers writes a checkpoint in several steps and resumes from an incomplete one without an error. With the marker, a
checkpoint is complete or does not count.

The checksum is XXH3 (64 bits) from the xxhash package, which `datasets` requires. It finds damage; it is no signature, so the
names in a marker are not trusted: they must be of files in the checkpoint. It is computed while fsync waits for the disk, so it
does not make a save slower.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.folder import COMPLETION_MARKER, sync, write_json
from harness.messages import DamagedFile

import xxhash

WRITING = "writing"  # a file in a checkpoint that is being written or deleted; without the marker the checkpoint is incomplete
Entry = list  # of a file in the marker: [bytes, checksum]


def begin_writing(checkpoint: Path) -> None:
    """Makes the folder, or removes the completion marker of an existing one. A link is replaced, its target is not touched."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    checkpoint.mkdir(exist_ok=True)  # not the folder of the run, which may have disappeared
    (checkpoint / WRITING).touch()
    (checkpoint / COMPLETION_MARKER).unlink(missing_ok=True)


def is_incomplete(checkpoint: Path) -> bool:
    """Whether the run was killed while the checkpoint was written or deleted."""
    if not checkpoint.is_dir() or (checkpoint / COMPLETION_MARKER).exists():
        return False
    return (checkpoint / WRITING).is_file() or not any(checkpoint.iterdir())


def delete(checkpoint: Path) -> None:
    """Deletes a checkpoint, but no targets of links. After a kill in between, `is_incomplete` is true for what remains."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    begin_writing(checkpoint)
    for path in checkpoint.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != WRITING:
            path.unlink()
    shutil.rmtree(checkpoint)


def sync_files(checkpoint: Path, is_mine: Callable[[str], bool]) -> dict[str, Entry]:
    """Waits until the files whose names `is_mine` accepts are on the disk; returns their entries in the marker by name."""
    own = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and path.name not in (COMPLETION_MARKER, WRITING) and is_mine(name):
            own[name] = path
    with ThreadPoolExecutor() as pool:
        syncs = pool.map(sync, own.values())
        checksums = pool.map(checksum_of_file, own.values())
        list(syncs)  # raises their errors
        return {name: [own[name].stat().st_size, checksum] for name, checksum in zip(own, checksums, strict=True)}


def write_marker(checkpoint: Path, content: dict) -> None:
    """Writes the completion marker, after everything else."""
    folders = [path for path in checkpoint.rglob("*") if path.is_dir()]
    for path in (*folders, checkpoint, checkpoint.parent):
        sync(path)  # the names of the files in it
    write_json(checkpoint / COMPLETION_MARKER, content | {"checksum": checksum_of_content(content)})
    (checkpoint / WRITING).unlink()


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """The completion marker of a checkpoint. Raises DamagedFile for anything else, and FileNotFoundError if there is none."""
    text = (checkpoint / COMPLETION_MARKER).read_bytes()
    try:
        marker = json.loads(text)
        is_complete = marker.pop("checksum") == checksum_of_content(marker) and marker["files"]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        is_complete = False
    if not is_complete:
        raise DamagedFile(f"{COMPLETION_MARKER} is damaged")
    return marker


def find_damage(checkpoint: Path, is_mine: Callable[[str], bool] = lambda name: True) -> str:
    """What is wrong with a checkpoint, "" for nothing. Compares the sizes of all files, and the checksums of this process's."""
    try:
        files = read_marker(checkpoint)["files"]
        for name, (size, _) in files.items():
            path = checkpoint / name
            if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(checkpoint)):
                return f"{name} is outside of the checkpoint"
            if not path.is_file() or path.stat().st_size != size:
                return f"{name} is missing, or does not have its {size:,} bytes"
        with ThreadPoolExecutor() as pool:
            checksums = {name: pool.submit(checksum_of_file, checkpoint / name) for name in files if is_mine(name)}
        for name, checksum in checksums.items():
            if checksum.result() != files[name][1]:
                return f"{name} was changed"
        return ""
    except (DamagedFile, ValueError) as error:  # a ValueError is about a name that no file can have
        return str(error)
    except FileNotFoundError:
        return f"{COMPLETION_MARKER} is missing"
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"


def checksum_of_file(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def checksum_of_content(content: dict) -> str:
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()
