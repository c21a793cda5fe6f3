"""The mark of a whole checkpoint says what is in it: every file with its size and a checksum.

The checksum is XXH3 (64 bits), from the xxhash package that `datasets` brings: it finds damage, it does not withstand forgery.
It reads as fast as memory does, and runs beside the fsync that waits for the disk, so it costs a save no time.
"""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.folder import MARK, sync, write_json

WRITING = "writing"  # a file in a checkpoint that is being written or deleted: without a mark beside it, there is nothing to lose


def begin(checkpoint: Path):
    """Makes the folder, or takes the mark from what is there."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / WRITING).touch()
    (checkpoint / MARK).unlink(missing_ok=True)


def is_cut_short(checkpoint: Path) -> bool:
    """Whether a kill came while it was written or deleted."""
    is_begun = checkpoint.is_dir() and ((checkpoint / WRITING).is_file() or not any(checkpoint.iterdir()))
    return is_begun and not (checkpoint / MARK).exists()


def remove(checkpoint: Path):
    """Deletes a checkpoint; a kill on the way leaves one that is cut short."""
    begin(checkpoint)
    for path in checkpoint.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != WRITING:
            path.unlink()
    shutil.rmtree(checkpoint)


def seal(checkpoint: Path, is_mine) -> dict[str, list]:
    """Waits until the files whose names `is_mine` are on the disk; returns name: [bytes, checksum] of each."""
    own = {name: path for name, path in _files(checkpoint).items() if is_mine(name)}
    with ThreadPoolExecutor() as pool:
        synced = [pool.submit(sync, path) for path in own.values()]
        files = {name: [path.stat().st_size, checksum] for (name, path), checksum in _checksums(own, pool)}
        for one in synced:
            one.result()
    return files


def end(checkpoint: Path, content: dict):
    """Writes the mark, last of all."""
    for path in (*(path for path in checkpoint.rglob("*") if path.is_dir()), checkpoint, checkpoint.parent):
        sync(path)  # the names of the files
    write_json(checkpoint / MARK, content | {"checksum": _of(content)})
    (checkpoint / WRITING).unlink()


def fault(checkpoint: Path, is_mine=lambda name: True) -> str:
    """What is wrong with a checkpoint, '' for nothing: sizes of all its files, checksums of those whose names `is_mine`.

    A mark of an earlier version, without a list of files, is believed.
    """
    try:
        mark = json.loads((checkpoint / MARK).read_text("utf-8"))
        checksum = mark.pop("checksum", None)
        if checksum is None and "files" not in mark and mark["geometry"]:
            return ""
        if checksum != _of(mark):
            return f"{MARK} was changed"
        there = {name: checkpoint / name for name in mark["files"]}
        for name, path in there.items():
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != mark["files"][name][0]:
                return f"{name} has {size:,} bytes, it had {mark['files'][name][0]:,}"
        with ThreadPoolExecutor() as pool:
            own = {name: path for name, path in there.items() if is_mine(name)}
            changed = [name for (name, _), now in _checksums(own, pool) if now != mark["files"][name][1]]
        return f"{changed[0]} was changed" if changed else ""
    except FileNotFoundError:
        return f"{MARK} is missing"
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MARK} is no mark any more"


def size(checkpoint: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in _files(checkpoint).values())


def _files(checkpoint: Path) -> dict[str, Path]:
    paths = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name not in (MARK, WRITING))
    return {path.relative_to(checkpoint).as_posix(): path for path in paths}


def _checksums(files: dict[str, Path], pool: ThreadPoolExecutor):
    return zip(files.items(), pool.map(_checksum, files.values()), strict=True)


def _checksum(path: Path) -> str:
    import xxhash

    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def _of(content: dict) -> str:
    import xxhash

    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()
