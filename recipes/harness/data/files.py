"""The local files of a dataset: whether one was changed after a run began, also in its middle.

`data_files.json` in the output directory has the size, the modification time and the XXH3 checksum (64 bits) of every file. The
checksums are computed while the run trains. At the next start a file with another modification time is read and compared; files
with the same time and size are compared while the run trains, and `changed_files` has those that differ.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.data import reading
from harness.data.script_arguments import ScriptArguments, each_dataset
from harness.folder import newest_complete_checkpoint, read_json, write_json
from harness.launched import NODE_VARIABLE, UserError, print_once

import xxhash

DATA_FILES = "data_files.json"
WRITE_INTERVAL = 60.0  # seconds between two writes of data_files.json while the checksums are computed
Entry = list  # [bytes, modification time in ns, checksum or ""]


def check_data_files(output_dir: Path, script_args: ScriptArguments) -> None:
    """Raises UserError if a local file of the dataset was changed since the run in `output_dir` began. Writes nothing.

    Prints a warning for a file that was written again before its checksum was known.
    """
    if NODE_VARIABLE in os.environ or newest_complete_checkpoint(output_dir) is None:
        return  # copies on other nodes have other times
    saved, unknown = _read(output_dir), []
    for name, (size, modified, _) in _files(script_args).items():
        before_size, before_modified, before = saved.get(name, (size, modified, ""))
        if (size, modified) == (before_size, before_modified):
            continue
        if size != before_size or (before and checksum(Path(name)) != before):
            raise UserError(
                f"--dataset_name: {name} has changed since the run in {output_dir} began. Evaluation rows might be trained on: "
                "choose another --output_dir, or move that folder away"
            )
        if not before:
            unknown.append(name)
    if unknown:
        print_once(
            f"warning: {', '.join(unknown[:3])}{' and others' if len(unknown) > 3 else ''} may have changed since the run in "
            f"{output_dir} began: written again before the run had computed a checksum"
        )


def record_data_files(output_dir: Path, script_args: ScriptArguments) -> None:
    """Writes data_files.json, with the checksums that are known already."""
    if NODE_VARIABLE in os.environ:
        return
    continues = newest_complete_checkpoint(output_dir) is not None
    saved, found = _read(output_dir) if continues else {}, _files(script_args)
    for name, entry in found.items():
        entry[2] = saved.get(name, entry)[2]  # of an equal file, see `check_data_files`
    if found != saved:
        _write(output_dir, found, changed_files(output_dir) if continues else [])


def compute_checksums(output_dir: Path) -> threading.Thread:
    """Starts a thread that adds the missing checksums to data_files.json, and then compares the files that had one.

    Some programs keep the modification time, and some file systems have times of two seconds. The thread prints a warning for a
    file that was changed nevertheless, and adds its name to "changed" in data_files.json.
    """

    files = _read(output_dir)

    def is_same_version(name: str) -> bool:
        status = Path(name).stat()
        return [status.st_size, status.st_mtime_ns] == files[name][:2]  # else the next start compares it

    def compute() -> None:
        written = time.monotonic()
        missing = [name for name, entry in files.items() if not entry[2]]
        known = [name for name, entry in files.items() if entry[2]]
        for name in missing:
            found = checksum(Path(name))
            if is_same_version(name):
                files[name][2] = found
            if name == missing[-1] or time.monotonic() - written > WRITE_INTERVAL:
                _write(output_dir, files, changed_files(output_dir))
                written = time.monotonic()
        for name in known:
            if checksum(Path(name)) != files[name][2] and is_same_version(name):
                _write(output_dir, files, {*changed_files(output_dir), name})
                print(warning_of_change(name, output_dir), flush=True)

    def compute_quietly() -> None:
        with contextlib.suppress(OSError):  # a file or the folder has disappeared, which others report
            compute()

    thread = threading.Thread(target=compute_quietly, name="checksums", daemon=True)
    thread.start()
    return thread


def checksum(file: Path) -> str:
    with file.open("rb", buffering=0) as content:
        return hashlib.file_digest(content, xxhash.xxh3_64).hexdigest()


def changed_files(output_dir: Path) -> list[str]:
    """The files whose content was changed after the run began, but not their size and modification time."""
    return list(_read(output_dir, "changed"))


def warning_of_change(name: str, output_dir: Path | str) -> str:
    return (
        f"warning: --dataset_name: {name} has changed since the run in {output_dir} began, with the same size and modification "
        "time: this run has rows of both versions, and may have trained on evaluation rows"
    )


def _read(output_dir: Path, key: str = "files") -> Any:
    """The files with their entries, or the names of the changed ones; empty if there are none."""
    try:
        content = read_json(output_dir / DATA_FILES)
    except ValueError:  # damaged
        content = {}
    return content.get(key, {})


def _write(output_dir: Path, files: dict[str, Entry], changed: Iterable[str]) -> None:
    write_json(output_dir / DATA_FILES, {"files": files} | ({"changed": sorted(changed)} if changed else {}))


def _files(script_args: ScriptArguments) -> dict[str, Entry]:
    """The local files of a dataset by absolute path, {} for a dataset of the Hub."""
    files = [file for one in each_dataset(script_args) for file in reading.local_files(one.dataset_name)]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns, ""] for file in files}
