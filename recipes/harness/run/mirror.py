"""--mirror URL: the checkpoints and the model of a run also in a bucket, or wherever else fsspec can write.

The mirror has what the output directory has: `checkpoint-N/…`, each with its completion marker, and at the end the files of the
model, `train_results.json` last. `run.json` says which run it is, and `owner.json`, rewritten every few seconds, who writes.

Each process uploads its own files of a checkpoint in a thread. When all are there, the first process uploads the marker. Nodes
without a shared folder have only their own files of a checkpoint; the mirror has all, and a start brings them to every node.
"""

import contextlib
import json
import math
import platform
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness import folder
from harness.folder import COMPLETION_MARKER, RESULTS, RUN, read_json
from harness.launched import UserError, print_once, readable_size
from harness.nodes.variables import seconds_of_silence
from harness.run.checkpoints import belongs_to
from harness.run.failures import DISK_ERRORS
from harness.run.marker import begin_writing, checksum_of_content, checksum_of_file, delete, write_marker
from harness.run.settings import RunSettings
from harness.run.steps import maximum

import fsspec
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from torch.distributed import ProcessGroup
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

OWNER = "owner.json"
TOKEN = ".mirror"  # a file in the output directory: the name under which its run owns the mirror
PATIENCE = 60  # seconds of trying again at the start of a run, and after its last step
DONE, FAILED, RUNNING, TAKEN = range(4)  # the state of a process's upload; the maximum of all processes counts
CHECKPOINT = re.compile(r"checkpoint-\d+")
T = TypeVar("T")


class Storage:
    """Files below a URL, which other processes change too. Methods raise whatever fsspec's library for the protocol raises."""

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
            self.fs, self.root = url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            package = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
            if package in ("s3fs", "gcsfs"):
                package += f"=={fsspec.__version__}"  # their versions are those of fsspec
            raise UserError(f"--mirror: {protocol}:// needs a package: {sys.executable} -m pip install {package}") from error
        except ValueError as error:
            raise UserError(f"--mirror: {self.url}: {describe(error)}") from error

    def path(self, name: str) -> str:
        self.fs.invalidate_cache()  # other processes change the files
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, name: str) -> dict | None:
        """The content of a JSON file, {} if it is damaged, None if there is none."""
        try:
            content = json.loads(self.fs.cat_file(self.path(name)))
            return content if isinstance(content, dict) else {}
        except FileNotFoundError:
            return None
        except ValueError:
            return {}

    def write(self, name: str, content: dict) -> None:
        """Writes a JSON file, which others see complete or not at all."""
        path, text = self.path(name), (json.dumps(content, indent=2) + "\n").encode()
        if isinstance(self.fs, LocalFileSystem):
            self.fs.pipe_file(f"{path}.draft", text)
            Path(f"{path}.draft").replace(path)
        else:
            self.fs.pipe_file(path, text)  # a bucket shows an object when it is complete

    def upload(self, file: Path, name: str) -> None:
        self.fs.put_file(str(file), self.path(name))

    def download(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(self.path(name), str(file))

    def remove(self, name: str) -> None:
        """Removes a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def checkpoints(self) -> list[str]:
        """The names of all checkpoints, complete or not, the newest first."""
        try:
            listed = [path.rstrip("/").rsplit("/", 1)[-1] for path in self.fs.ls(self.path(""), detail=False)]
        except FileNotFoundError:
            return []
        return sorted(filter(CHECKPOINT.fullmatch, listed), key=_step, reverse=True)

    def remove_checkpoint(self, name: str) -> None:
        """Removes the completion marker first, so that what remains after a kill is not complete."""
        self.remove(f"{name}/{COMPLETION_MARKER}")
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)

    def sizes(self, name: str) -> dict[str, int]:
        """The files of a checkpoint, with their sizes in bytes."""
        start = len(self.path(name)) + 1
        return {path[start:]: info["size"] for path, info in self.fs.find(self.path(name), detail=True).items()}


def describe(error: Exception) -> str:
    """The first line of an error, without names and passwords of URLs."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return re.sub(r"://[^/@\s]*@", "://", text)


def retry(action: Callable[[], T], patience: float, give_up: threading.Event | None = None, what: str = "") -> T:
    """Calls `action` until it succeeds. Raises its error after `patience` seconds, or once `give_up` is set.

    Errors that do not go away are raised at once: a missing file, a full disk. `what` is for a message after the first failure.
    """
    began, pause, give_up = time.monotonic(), 1.0, give_up or threading.Event()
    while True:
        try:
            return action()
        except FileNotFoundError:
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
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"--mirror: {storage.url} cannot be used: {describe(error)}: check the URL, the credentials and the network"
        ) from error


def check(url: str, identity: dict, output_dir: Path) -> dict:
    """Returns the results of the run in the mirror if it is finished, {} if not. Writes nothing.

    Raises UserError if the mirror has another run, or if a run writes there. `identity`: the content of run.json.
    """
    storage = Storage(url)
    if isinstance(storage.fs, LocalFileSystem) and Path(storage.root).is_relative_to(output_dir.absolute()):
        raise UserError(f"--mirror: {url} is in the output directory, so both would be lost together: pass another URL")
    existing = at_start(storage, lambda: storage.read(RUN), patience=10) or {}
    for key in identity.keys() - {"config", "recipe_digest"} if existing else ():
        if existing.get(key, identity[key]) != identity[key] and not folder.names_same_files(key, existing, identity):
            raise UserError(
                f"--mirror: {url} has a run with {key} {existing[key]}, this run has {key} {identity[key]}: pass another URL"
            )
    wait_for_silence(storage, read_token(output_dir))
    return at_start(storage, lambda: storage.read(RESULTS)) or {}


def wait_for_silence(storage: Storage, token: str) -> None:
    """Raises UserError if another run writes to the mirror; waits until that is certain.

    A run that ended by itself has removed its `owner.json`. One that was killed has not, but it no longer changes. If it was the
    run of the same output directory, which is locked, there is nothing to wait for.
    """
    owner = at_start(storage, lambda: storage.read(OWNER))
    if owner is None or owner.get("token") == token:
        return
    silence = owner.get("silence", seconds_of_silence())
    print_once(f"{storage.url} was last used by {_name(owner)}: waiting {silence} s for a sign that it is still running.")
    deadline = time.monotonic() + silence
    while time.monotonic() < deadline:
        time.sleep(min(2.0, silence / 8))
        now = at_start(storage, lambda: storage.read(OWNER))
        if now is None:
            return
        if now != owner:
            raise _in_use(storage, now)


def claim(url: str, identity: dict, output_dir: Path) -> None:
    """Writes run.json and owner.json into a mirror that passed `check`. Raises UserError if they cannot be written."""
    storage, token = Storage(url), read_token(output_dir)
    if not token:
        token = uuid.uuid4().hex
        (output_dir / TOKEN).write_text(token, "utf-8")
    at_start(storage, lambda: storage.write(OWNER, _owner(token)), patience=10)
    at_start(storage, lambda: storage.write(RUN, identity))


def exit_if_finished(url: str, uploaded: dict, training_args: TrainingArguments) -> None:
    """Exits with code 0 if the finished run is in the mirror or in the output directory; the mirror then has it too.

    `uploaded`: what `check` returned. Returns if the run is not finished, and if the output directory's own check should exit.
    """
    output_dir, steps, epochs = Path(training_args.output_dir), training_args.max_steps, training_args.num_train_epochs
    if folder.finished_results(output_dir, steps, epochs):
        if not folder.is_finished(uploaded, steps, epochs):
            storage = Storage(url)
            print_once(f"Uploading the model to {url}, which lacks it.")
            for name, path in finished_files(output_dir).items():
                at_start(storage, lambda name=name, path=path: storage.upload(path, name))
    elif folder.is_finished(uploaded, steps, epochs):
        print_once(
            f"The run in {url} is finished: {uploaded['global_step']} steps, final loss {uploaded['final_loss']:.4f}. Its model "
            "is there. To train further: the same command with more steps"
        )
        sys.exit(0)


def read_token(output_dir: Path) -> str:
    path = output_dir / TOKEN
    return path.read_text("utf-8") if path.is_file() else ""


def _owner(token: str, start: str = "") -> dict:
    """The content of owner.json. `start` is another one for every start of a run."""
    return {"token": token, "start": start, "host": platform.node(), "silence": seconds_of_silence(), "written": time.time()}


def _name(owner: dict) -> str:
    return f"a run on {owner.get('host', 'another machine')}"


def _in_use(storage: Storage, owner: dict) -> UserError:
    return UserError(
        f"--mirror: {_name(owner)} is writing to {storage.url}: wait for it, stop it, or pass another URL (and --output_dir)"
    )


class Ownership:
    """Rewrites owner.json every few seconds, so that a second run is refused. In the first process only."""

    def __init__(self, storage: Storage, token: str) -> None:
        self.storage, self.token, self.start = storage, token, uuid.uuid4().hex
        self.is_lost = False  # another run has taken the mirror, because nothing was heard of this one
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._rewrite, name="owner of the mirror", daemon=True)

    def begin(self) -> None:
        """Raises UserError if another run was faster."""
        owner = self.storage.read(OWNER)
        if owner is not None and owner.get("token") != self.token:
            raise _in_use(self.storage, owner)
        self.storage.write(OWNER, _owner(self.token, self.start))
        self._thread.start()

    def _rewrite(self) -> None:
        """Writes the owner's file again and again until the run ends, so that others see that it is alive. In a thread."""
        while not self._has_ended.wait(seconds_of_silence() / 4):
            with contextlib.suppress(Exception):  # the mirror cannot be reached now; uploads say so
                owner = self.storage.read(OWNER)
                if owner is not None and owner.get("start") != self.start:
                    self.is_lost = True
                    return
                self.storage.write(OWNER, _owner(self.token, self.start))

    def end(self) -> None:
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)
            if not self.is_lost:
                with contextlib.suppress(Exception):  # the next run waits for the silence of this one
                    self.storage.remove(OWNER)


@dataclass
class Upload:
    """One process's files of a checkpoint, or of the model, on their way: their paths, by their names in the mirror."""

    name: str
    files: dict[str, Path]
    marker: dict | None = None  # the completion marker, if this is a checkpoint
    error: str = ""
    give_up: threading.Event = field(default_factory=threading.Event)  # a failed upload is not tried again
    began: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> None:
        self.thread = threading.Thread(target=work, name=f"upload {self.name}", daemon=True)  # it keeps no process from exiting
        self.thread.start()

    def upload_files(self, storage: Storage) -> None:
        try:
            for name, path in self.files.items():
                what = f"The upload of {self.name} to {storage.url}"
                retry(lambda name=name, path=path: storage.upload(path, name), math.inf, self.give_up, what)
        except Exception as error:  # an upload never ends a run
            self.error = describe(error)


class Mirror(TrainerCallback):
    """Uploads every complete checkpoint and the model, and brings the newest checkpoint back. Does nothing without --mirror."""

    def __init__(self, trainer: Trainer, group: ProcessGroup | None, settings: RunSettings) -> None:
        """Raises UserError for options that need all files of a checkpoint on every node. `group`: see `make_cpu_group`."""
        self.output_dir, self.group = Path(trainer.args.output_dir), group
        self.limit, self.best = trainer.args.save_total_limit, ""
        url, self.process = settings.mirror, PartialState()
        self.storage = Storage(url) if url else None  # None as well if another run has taken the mirror
        self.has_own_disk = settings.separate_disks
        self.owner: Ownership | None = None
        self.upload: Upload | None = None  # this process's part; there is one on all processes or on none
        self.completion: Upload | None = None  # of the first process: all files are there, a thread uploads the marker
        self.complete: list[str] = []  # of the first process: names of the complete checkpoints in the mirror
        self.failed: dict[str, str] = {}  # of the first process: name and reason
        self.uploaded, self.seconds_waited = 0, 0.0
        if self.has_own_disk and trainer.args.load_best_model_at_end:
            raise UserError(
                "--load_best_model_at_end reads a checkpoint of which every node has only its part: pass an --output_dir that "
                "all nodes share, or leave out the flag"
            )

    # Before the training

    def pull(self) -> None:
        """Brings the newest complete checkpoint of the mirror into the output directory of every disk. Collective.

        Files that are there already are kept if their checksums are right. Damaged checkpoints are skipped. Nothing is pulled
        if the output directory has a newer complete one.
        """
        if not self.storage:
            return
        found, incomplete = self._on_first_process(self._begin)
        if incomplete:
            print_once(f"Incomplete in {self.storage.url}, and skipped: {', '.join(incomplete)}.")
        name, marker = self._newer_on_disk(found)
        if name and not self.has_own_disk:
            return
        if name:  # its files are on several disks
            self._begin_upload(name, marker)
            self._wait(PATIENCE)
            found = {name: marker, **found} if name in self._on_first_process(lambda: self.complete) else found
        pulled, damaged = self._pull_newest(found)
        is_left = not self.has_own_disk and folder.newest_complete_checkpoint(self.output_dir) is not None
        if damaged and not pulled and not self._on_first_process(lambda: is_left):
            reasons = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
            raise UserError(
                f"--mirror: no checkpoint in {self.storage.url} is complete ({reasons}). Nothing was deleted: restore one from a "
                "copy, or start over with another URL and another --output_dir"
            )
        for name, problem in damaged.items():
            print_once(f"{name} in {self.storage.url} is damaged: {problem}. It is skipped.")
        self._on_first_process(lambda: self._disown(damaged))
        if self.has_own_disk and self.process.is_local_main_process:
            for path in folder.checkpoints(self.output_dir):
                if not pulled or folder.step_of(path) > _step(pulled):
                    print_once(f"{path} was deleted: its files on other nodes are lost.")
                    delete(path)
        self.process.wait_for_everyone()

    def _pull_newest(self, found: dict[str, dict]) -> tuple[str, dict[str, str]]:
        """Pulls the newest checkpoint that is not damaged; returns its name, and what is wrong with the others. Collective."""
        damaged = {}
        pulls = self.process.is_local_main_process if self.has_own_disk else self.process.is_main_process
        for name, marker in found.items():
            with ThreadPoolExecutor(1) as pool:
                fetched = pool.submit(self._fetch, name, marker) if pulls else None
                while maximum(int(fetched is not None and not fetched.done()), self.group):  # collectives have a time limit
                    time.sleep(0.1)
            damage = error = ""
            try:
                damage = fetched.result() if fetched else ""
            except Exception as failure:  # see `retry`
                error = describe(failure)
            problems = gather_object([(damage, error)])
            if reasons := [error for _, error in problems if error]:
                raise UserError(f"--mirror: {name} cannot be downloaded from {self.storage.url}: {reasons[0]}")
            if not any(damage for damage, _ in problems):
                return name, damaged
            damaged[name] = next(damage for damage, _ in problems if damage)
        return "", damaged

    def _disown(self, damaged: dict[str, str]) -> None:
        """Removes the markers of damaged checkpoints, which will be written again."""
        for name in damaged:
            self.storage.remove(f"{name}/{COMPLETION_MARKER}")
        self.complete = [name for name in self.complete if name not in damaged]

    def _begin(self) -> tuple[dict[str, dict], list[str]]:
        """Takes the mirror; returns the markers of its complete checkpoints, the newest first, and the incomplete ones."""
        self.owner = Ownership(self.storage, read_token(self.output_dir))
        self.owner.begin()
        markers = {name: self.storage.read(f"{name}/{COMPLETION_MARKER}") for name in self.storage.checkpoints()}
        found = {name: marker for name, marker in markers.items() if marker is not None}
        self.complete = list(found)
        return found, [name for name in markers if name not in found]

    def _on_first_process(self, action: Callable[[], T]) -> T:
        """The result of `action`, which the first process calls, on all processes. Raises its UserError on all. Collective."""
        result, error = None, ""
        if self.process.is_main_process:
            try:
                result = at_start(self.storage, action)
            except UserError as problem:
                error = str(problem)
        result, error = broadcast_object_list([result, error])
        if error:
            raise UserError(error)
        return result

    def _newer_on_disk(self, found: dict[str, dict]) -> tuple[str, dict]:
        """Name and marker of the newest undamaged checkpoint on the disk that is newer than all of the mirror's. Collective."""
        newest = max(map(_step, found), default=-1)
        paths = [path for path in folder.checkpoints(self.output_dir) if folder.step_of(path) > newest]
        own = {path.name: _read_marker(path) for path in paths}
        for name, marker in broadcast_object_list([own])[0].items():
            files = {name: entry for name, entry in marker.get("files", {}).items() if self._is_mine(name)}
            is_damaged = not has_right_checksum(marker) or bool(damaged_files(self.output_dir / name, files))
            if not any(gather_object([is_damaged])):
                return name, marker
        return "", {}

    def _is_mine(self, name: str) -> bool:
        return belongs_to(name, self.process, self.process.is_main_process)

    def _fetch(self, name: str, marker: dict) -> str:
        """Brings the files of a checkpoint that this disk lacks. Returns what is wrong with the checkpoint, "" for nothing."""
        if not has_right_checksum(marker):
            return f"{COMPLETION_MARKER} was changed"
        checkpoint, files = self.output_dir / name, marker["files"]
        lacking = damaged_files(checkpoint, files)
        if not lacking and _read_marker(checkpoint) == marker:
            return ""
        size = readable_size(sum(files[file][0] for file in lacking))
        print_once(f"Downloading {name} from {self.storage.url}: {len(lacking)} of {len(files)} files, {size}.")
        begin_writing(checkpoint)

        def download(file: str) -> None:
            retry(lambda: self.storage.download(f"{name}/{file}", checkpoint / file), PATIENCE, what=f"The download of {file}")

        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(download, lacking))
        except FileNotFoundError as error:
            return f"a file is missing ({describe(error)})"
        if wrong := damaged_files(checkpoint, {file: files[file] for file in lacking}):
            return f"{wrong[0]} was changed"
        write_marker(checkpoint, {key: value for key, value in marker.items() if key != "checksum"})
        return ""

    def upload_missing(self, checkpoint: Path | None) -> None:
        """Uploads the checkpoint that the run resumes from if the mirror does not have it. Collective."""
        if self.storage and checkpoint and checkpoint.name not in broadcast_object_list([self.complete])[0]:
            marker = _read_marker(checkpoint)
            if "files" in marker:
                self._begin_upload(checkpoint.name, marker)

    # During the training

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Starts to upload the checkpoint in the background.

        First waits for the upload of the one before; if it fails now, it is not tried again. Collective.
        """
        if not self.storage:
            return
        began, running = time.monotonic(), self.upload or self.completion
        self._wait(give_up_after=0)
        waited = time.monotonic() - began
        if running and waited > 1:
            self.seconds_waited += waited
            print_once(f"Waited {waited:.0f} s for the upload of {running.name}; a larger --save_steps avoids that.")
        name = f"checkpoint-{state.global_step}"
        self.best = Path(state.best_model_checkpoint or "").name
        is_lost = self.owner is not None and self.owner.is_lost
        # All processes use the values of the first one, whose disk has the marker.
        marker, is_lost = broadcast_object_list([_read_marker(self.output_dir / name), is_lost])
        if not self.storage:  # the mirror was stopped in `_wait`
            return
        if is_lost:
            self._stop(name)
        else:
            self._begin_upload(name, marker)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._advance()

    def _begin_upload(self, name: str, marker: dict) -> None:
        own = {f"{name}/{file}": self.output_dir / name / file for file in marker["files"] if self._is_mine(file)}
        self._upload(Upload(name, own, marker))

    def _upload(self, upload: Upload) -> None:
        self.upload, storage = upload, self.storage
        upload.begin(lambda: upload.upload_files(storage))

    def _advance(self) -> bool:
        """Whether no process is uploading files. When all are done, the first one completes the checkpoint. Collective."""
        if self.upload is None:
            return True
        state = RUNNING if self.upload.thread.is_alive() else FAILED if self.upload.error else DONE
        if self.owner and self.owner.is_lost:
            state = TAKEN
        state = maximum(state, self.group)
        if state == RUNNING:
            return False
        upload, self.upload = self.upload, None
        if state == TAKEN:
            self._stop(upload.name)
        elif state == FAILED:
            self._record_failure(upload.name, next(filter(None, gather_object([upload.error]))))
        elif self.process.is_main_process and upload.marker is not None:
            self.completion = upload
            upload.begin(lambda: self._complete(upload))
        return True

    def _stop(self, name: str) -> None:
        """Uploads nothing any more."""
        self._record_failure(name, "another run has taken the mirror")
        self.storage = None

    def _complete(self, upload: Upload) -> None:
        """Uploads the marker of a checkpoint whose files are all there, and removes old checkpoints. In a thread."""
        marker = f"{upload.name}/{COMPLETION_MARKER}"
        try:
            retry(lambda: self._check_sizes(upload), math.inf, upload.give_up)
            retry(lambda: self.storage.write(marker, upload.marker), math.inf, upload.give_up)
            self.complete.insert(0, upload.name)
            self.uploaded += 1
            size = readable_size(sum(size for size, _ in upload.marker["files"].values()))
            print(f"{upload.name} ({size}) is in {self.storage.url} after {time.monotonic() - upload.began:.0f} s.", flush=True)
        except Exception as error:  # an upload never ends a run
            self._record_failure(upload.name, describe(error))
            return
        with contextlib.suppress(Exception):  # they are removed after the next upload
            retry(self._remove_old, math.inf, upload.give_up)

    def _check_sizes(self, upload: Upload) -> None:
        sizes = self.storage.sizes(upload.name)
        for name, (size, _) in upload.marker["files"].items():
            if sizes.get(name) != size:
                raise FileNotFoundError(f"{name} is not there after its upload: do all nodes write to the same place?")

    def _remove_old(self) -> None:
        """Removes what is older than the newest `save_total_limit` complete checkpoints, and incomplete ones."""
        if self.limit:
            self.complete = [name for place, name in enumerate(self.complete) if place < self.limit or name == self.best]
        for name in self.storage.checkpoints():
            if name not in self.complete:
                self.storage.remove_checkpoint(name)

    def _record_failure(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        print_once(f"warning: {name} is not in {self.storage.url}: {reason}. The run continues.")

    # After the training

    def _wait(self, give_up_after: float) -> None:
        """Waits until nothing is being uploaded. After these seconds a failed upload is not tried again. Collective."""
        began = time.monotonic()
        while self.upload is not None:
            if time.monotonic() - began >= give_up_after:
                self.upload.give_up.set()
            if not self._advance():
                time.sleep(0.1)
        if self.completion:
            self.completion.thread.join(give_up_after)
            self.completion.give_up.set()
            self.completion.thread.join()
            self.completion = None

    def finish(self) -> None:
        """Waits until the last checkpoint is in the mirror, or says that it is not. Collective."""
        running = self.upload or self.completion
        if running and self.storage:
            print_once(
                f"Uploading {running.name} to {self.storage.url}; until that is done, "
                f"{f'{self.complete[0]} is the newest there' if self.complete else 'no checkpoint is there'}."
            )
        self._wait(PATIENCE)

    def upload_model(self) -> None:
        """Uploads the files of a finished run, and prints what the mirror has. Collective."""
        if not self.storage:
            return
        self._upload(Upload("the model", finished_files(self.output_dir) if self.process.is_main_process else {}))
        url = self.storage.url
        self._wait(PATIENCE)
        if "the model" not in self.failed:
            print_once(f"The model and {len(self.complete)} checkpoint{'' if len(self.complete) == 1 else 's'} are in {url}")
        for name, reason in self.failed.items():
            print_once(f"warning: {name} was not uploaded: {reason}")

    def results(self) -> dict[str, Any]:
        """What train_results.json has about the mirror."""
        if not self.storage and not self.failed:
            return {}
        return {"mirror": {"uploaded": self.uploaded, "failed": self.failed, "seconds_waited": round(self.seconds_waited, 1)}}

    def close(self) -> None:
        """Waits for uploads, and lets other runs use the mirror. Collective."""
        self.finish()
        if self.owner:
            self.owner.end()
        if self.storage or self.failed:
            self.process.wait_for_everyone()  # the launcher kills a process that exits long after the others
        self.group = None


def finished_files(output_dir: Path) -> dict[str, Path]:
    """The files of a finished run by their names, `train_results.json` last. run.json is in the mirror from the start."""
    files = {path.name: path for path in sorted(output_dir.iterdir()) if path.is_file() and not path.name.startswith(".")}
    return {name: files[name] for name in sorted(files, key=RESULTS.__eq__) if name != RUN}


def _step(name: str) -> int:
    return int(name.split("-")[1])


def _read_marker(checkpoint: Path) -> dict:
    """The completion marker, {} if there is none or if it is damaged."""
    try:
        return read_json(checkpoint / COMPLETION_MARKER)
    except ValueError:
        return {}


def has_right_checksum(marker: dict) -> bool:
    content = {key: value for key, value in marker.items() if key != "checksum"}
    return "files" in marker and marker.get("checksum") == checksum_of_content(content)


def damaged_files(checkpoint: Path, files: dict[str, list]) -> list[str]:
    """The files that are missing, or have another size or checksum; `files` are those of a completion marker."""

    def is_damaged(name: str) -> bool:
        path, (size, checksum) = checkpoint / name, files[name]
        return not path.is_file() or path.stat().st_size != size or checksum_of_file(path) != checksum

    with ThreadPoolExecutor() as pool:
        return [name for name, is_it in zip(files, pool.map(is_damaged, files), strict=True) if is_it]
