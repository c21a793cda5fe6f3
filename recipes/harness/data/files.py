"""The local files of a dataset: whether one was changed after a run began, also in its middle.

`data_files.json` in the output directory has the size, the modification time and the XXH3 checksum (64 bits) of every file. The
checksums are computed while the run trains. At the next start a file with another modification time is read and compared.
"""

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

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
    saved, found = _read(output_dir), _files(script_args)
    for name, entry in found.items():
        entry[2] = saved.get(name, entry)[2]  # of an equal file, see `check_data_files`
    if found != saved:
        write_json(output_dir / DATA_FILES, {"files": found})


def compute_checksums(output_dir: Path) -> threading.Thread:
    """Starts a thread that adds the missing checksums to data_files.json."""

    def compute() -> None:
        files, written = _read(output_dir), time.monotonic()
        missing = [name for name, entry in files.items() if not entry[2]]
        for name in missing:
            size, modified, _ = files[name]
            found = checksum(Path(name))
            status = Path(name).stat()
            if (status.st_size, status.st_mtime_ns) == (size, modified):
                files[name][2] = found
            if name == missing[-1] or time.monotonic() - written > WRITE_INTERVAL:
                write_json(output_dir / DATA_FILES, {"files": files})
                written = time.monotonic()

    def compute_quietly() -> None:
        with contextlib.suppress(OSError):  # a file or the folder has disappeared, which others report
            compute()

    thread = threading.Thread(target=compute_quietly, name="checksums", daemon=True)
    thread.start()
    return thread


def checksum(file: Path) -> str:
    with file.open("rb", buffering=0) as content:
        return hashlib.file_digest(content, xxhash.xxh3_64).hexdigest()


def _read(output_dir: Path) -> dict[str, Entry]:
    try:
        return read_json(output_dir / DATA_FILES).get("files", {})
    except ValueError:  # damaged
        return {}


def _files(script_args: ScriptArguments) -> dict[str, Entry]:
    """The local files of a dataset by absolute path, {} for a dataset of the Hub."""
    files = [file for one in each_dataset(script_args) for file in reading.local_files(one.dataset_name)]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns, ""] for file in files}
