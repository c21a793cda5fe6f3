"""Files below a URL, in a bucket or wherever else fsspec can write. Other processes change them too, and the network can fail."""

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from harness.folder import CHECKPOINT, COMPLETION_MARKER, parse_json, remove_link, step_of
from harness.json_types import Types
from harness.messages import UserError
from harness.run.disk import DISK_ERRORS

import fsspec
from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

PATIENCE = 60  # seconds of trying again at the start of a run, and after its last step
T = TypeVar("T")


class Storage:
    """The files, by their names below the URL. Methods raise whatever fsspec's library for the protocol raises."""

    def __init__(self, url: str) -> None:
        """Raises UserError if the URL's protocol is unknown or its package is missing."""
        self.url = url.rstrip("/")
        protocol, rest = split_protocol(url)
        if not protocol or not rest.strip("/"):
            raise UserError(f"--mirror: {url} is not a URL: expected one such as s3://BUCKET/FOLDER or file:///FOLDER")
        if protocol == "hf" and not rest.startswith("buckets/"):
            raise UserError(f"--mirror: {url}: every file would be a commit: expected hf://buckets/OWNER/NAME/FOLDER")
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            fs, root = url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            package = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
            if package in ("s3fs", "gcsfs"):
                package += f"=={fsspec.__version__}"  # their versions are those of fsspec
            raise UserError(f"--mirror: {protocol}:// needs a package: {sys.executable} -m pip install {package}") from error
        except ValueError as error:
            raise UserError(f"--mirror: {self.url}: {describe(error)}") from error
        self.fs = DirFileSystem(root, fs)
        self.folder = Path(root) if isinstance(fs, LocalFileSystem) else None  # if it is on this machine

    def read(self, name: str, expected: Types) -> dict[str, Any]:
        """The content of a JSON file, {} if there is none. Raises DamagedFile for any other file than is expected."""
        try:
            return parse_json(self.fs.cat_file(name), f"{self.url}/{name}", expected)
        except FileNotFoundError:
            return {}

    def write(self, name: str, content: dict) -> None:
        """Writes a JSON file, which others see complete or not at all."""
        draft = f"{name}.draft" if self.folder else name  # a bucket shows an object when it is complete
        self.fs.pipe_file(draft, (json.dumps(content, indent=2) + "\n").encode())
        if self.folder:
            (self.folder / draft).replace(self.folder / name)

    def upload(self, file: Path, name: str) -> None:
        if self.folder:
            remove_link(self.folder / name)
        self.fs.put_file(str(file), name)

    def download(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(name, str(file))

    def remove(self, name: str) -> None:
        """Removes a file if it is there."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.fs.rm_file(name)

    def checkpoints(self) -> list[str]:
        """The names of all checkpoints, complete or not, the newest first."""
        try:
            names = [Path(path).name for path in self.fs.ls("", detail=False)]
        except FileNotFoundError:
            return []
        return sorted(filter(CHECKPOINT.fullmatch, names), key=lambda name: step_of(Path(name)), reverse=True)

    def remove_checkpoint(self, name: str) -> None:
        """Removes the completion marker first, so that what remains after a kill is not complete."""
        self.remove(f"{name}/{COMPLETION_MARKER}")
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(name, recursive=True)

    def sizes(self, name: str) -> dict[str, int]:
        """The sizes of the files of a checkpoint in bytes, by their names in it."""
        return {path.removeprefix(f"{name}/"): info["size"] for path, info in self.fs.find(name, detail=True).items()}


def describe(error: Exception) -> str:
    """The first line of an error, without names and passwords of URLs."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return re.sub(r"://[^/@\s]*@", "://", text)


def retry(action: Callable[[], T], patience: float, give_up: threading.Event | None = None, what: str = "") -> T:
    """Calls `action` until it succeeds. Raises its error after `patience` seconds, or once `give_up` is set.

    Errors that do not go away are raised at once: a missing or damaged file, a full disk. `what` is for a message after the first
    failure.
    """
    began, pause, give_up = time.monotonic(), 1.0, give_up or threading.Event()
    while True:
        try:
            return action()
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:  # of botocore, aiohttp, google.auth …: they have no class in common
            is_of_disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
            if is_of_disk or time.monotonic() - began + pause > patience:
                raise
            if what and pause == 1:
                print(f"{what} failed ({describe(error)}); it is tried again.", flush=True)
            if give_up.wait(pause):
                raise
        pause = min(2 * pause, 30)


def at_start(storage: Storage, action: Callable[[], T], patience: float = PATIENCE) -> T:
    """Calls `action` as `retry` does. Raises UserError if it fails."""
    try:
        return retry(action, patience, what=f"--mirror: {storage.url}")
    except UserError as error:
        raise UserError(f"--mirror: {error}".replace("--mirror: --mirror: ", "--mirror: ")) from error
    except Exception as error:
        raise UserError(
            f"--mirror: {storage.url} cannot be used: {describe(error)}: check the URL, the credentials and the network"
        ) from error
