"""--mirror URL: the checkpoints and the model of a run also in a bucket, or wherever else fsspec can write.

The mirror has what the output directory has: `checkpoint-N/…`, each with its completion marker, and at the end the files of the
model, `train_results.json` last. `run.json` says which run it is, and `heartbeat.json`, rewritten every few seconds, who writes.

Each process uploads its own files of a checkpoint in a thread. That of the first process waits until the mirror has all of them,
with their sizes, and uploads the marker. Nodes without a shared folder have only their own files of a checkpoint; the mirror has
all, and a start brings them to every node.

What comes from a mirror is not trusted: its JSON files must have the types that are expected, and names stay in a checkpoint.
"""

import contextlib
import math
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from harness import folder
from harness.exchange import gather_values, value_of_first
from harness.folder import COMPLETION_MARKER, RESULT_TYPES, RESULTS, RUN, DamagedFile, read_json
from harness.messages import UserError, plural, print_once, readable_size
from harness.nodes.variables import seconds_of_silence
from harness.restarts import keep_settings
from harness.run.agreement import maximum
from harness.run.checkpoints import belongs_to
from harness.run.marker import (
    begin_writing,
    delete,
    is_incomplete,
    parse_marker,
    path_in,
    read_marker,
    write_marker,
    wrong_files,
)
from harness.run.settings import RunSettings
from harness.run.storage import PATIENCE, Storage, at_start, describe, retry

from accelerate import PartialState
from torch.distributed import ProcessGroup
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

HEARTBEAT = "heartbeat.json"
MAX_SILENCE = 3600  # seconds; NODE_SILENCE is 60
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux: another one on every machine, and after every start of it
MODEL = "the model"  # the name of an upload that is not a checkpoint's
TAKEN = "another run has taken the mirror"
T = TypeVar("T")


def check(url: str, identity: dict, output_dir: Path) -> tuple[dict, datetime | None]:
    """Returns the results of the run in the mirror, {} if it is not finished, and when it was first started. Writes nothing.

    Raises UserError if the mirror has another run, or if a run writes there. `identity`: the content of run.json.
    """
    storage = Storage(url)
    if storage.folder and storage.folder.is_relative_to(output_dir.absolute()):
        raise UserError(f"--mirror: {url} is in the output directory, so both would be lost together: pass another URL")
    run = at_start(storage, lambda: storage.read(RUN, folder.RUN_TYPES), patience=10)
    results = at_start(storage, lambda: storage.read(RESULTS, RESULT_TYPES))
    has_checkpoints = bool(at_start(storage, storage.checkpoints))
    if run and (has_checkpoints or results):
        folder.check_same_run("--mirror", url, run, identity, has_checkpoints, is_copy=True)
        if has_checkpoints and not folder.newest_complete_checkpoint(output_dir):
            for message in keep_settings(run, identity):  # the newest of the mirror is downloaded
                print_once(message)
    Heartbeat(storage, output_dir).wait_for_silence()
    return results, folder.date_of(run)


def claim(url: str, identity: dict, output_dir: Path) -> None:
    """Writes run.json and a heartbeat into a mirror that passed `check`. Raises UserError if they cannot be written."""
    storage = Storage(url)
    at_start(storage, Heartbeat(storage, output_dir).write, patience=10)
    at_start(storage, lambda: storage.write(RUN, identity))


def exit_if_finished(url: str, uploaded: dict, identity: dict, training_args: TrainingArguments) -> None:
    """Exits with code 0 if the finished run is in the mirror or in the output directory; the mirror then has it too.

    Raises UserError if it was trained with other settings.

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
        folder.check_settings_of_finished("--mirror", url, uploaded, identity)
        print_once(
            f"The run in {url} is finished: {folder.describe_end(uploaded)}. Its model is there. To train further: the same "
            "command with more steps"
        )
        sys.exit(0)


class Heartbeat:
    """A file in the mirror that the run rewrites every few seconds, so that another run is refused."""

    def __init__(self, storage: Storage, output_dir: Path) -> None:
        boot = BOOT_ID.read_text() if BOOT_ID.is_file() else ""
        # The run of an output directory, which is locked, need not wait for its own silence when it was killed.
        self.run = f"{boot.strip()} {platform.node()} {output_dir.absolute()}"
        self.storage, self.silence = storage, min(seconds_of_silence(), MAX_SILENCE)
        self.is_taken = False  # by another run, because nothing was heard of this one
        self.has_ended = threading.Event()
        self.thread = threading.Thread(target=self._rewrite, name="heartbeat of the mirror", daemon=True)

    def read(self) -> dict[str, Any]:
        """That of another run, {} if there is none. Raises UserError if no run can have written it."""
        beat = self.storage.read(HEARTBEAT, {"run": str, "host": str, "silence": int, "written": float})
        if beat and not 0 < beat["silence"] <= MAX_SILENCE:
            raise DamagedFile(
                f"{self.storage.url}/{HEARTBEAT} is damaged: silence is {beat['silence']}, expected up to {MAX_SILENCE} seconds: "
                "delete it if no run uses the mirror"
            )
        return beat if beat and beat["run"] != self.run else {}

    def write(self) -> None:
        content = {"run": self.run, "host": platform.node(), "silence": self.silence, "written": time.time()}
        self.storage.write(HEARTBEAT, content)

    def wait_for_silence(self) -> None:
        """Raises UserError if another run writes to the mirror; waits until that is certain.

        A run that ended by itself has removed its heartbeat. That of one that was killed no longer changes.
        """
        last = at_start(self.storage, self.read)
        if not last:
            return
        print_once(
            f"{self.storage.url} was last used by {_host(last)}: waiting {last['silence']} s for a sign that it still runs."
        )
        deadline = time.monotonic() + last["silence"]
        while time.monotonic() < deadline:
            time.sleep(min(2.0, last["silence"] / 8))
            now = at_start(self.storage, self.read)
            if now and now != last:
                raise self._in_use(now)

    def begin(self) -> None:
        """Raises UserError if another run was faster."""
        if beat := self.read():
            raise self._in_use(beat)
        self.write()
        self.thread.start()

    def _rewrite(self) -> None:
        while not self.has_ended.wait(self.silence / 4) and not self.is_taken:
            with contextlib.suppress(Exception):  # the mirror cannot be reached now; uploads say so
                self.is_taken = bool(self.read())
                if not self.is_taken:
                    self.write()

    def end(self) -> None:
        self.has_ended.set()
        self.thread.join(PATIENCE)
        if not self.is_taken:
            with contextlib.suppress(Exception):  # the next run waits for the silence of this one
                self.storage.remove(HEARTBEAT)

    def _in_use(self, beat: dict) -> UserError:
        return UserError(
            f"--mirror: {_host(beat)} is writing to {self.storage.url}: wait for it, stop it, or pass another URL (and "
            "--output_dir)"
        )


def _host(beat: dict) -> str:
    return f"a run on {re.sub(r'[^a-zA-Z0-9_.-]', '?', beat['host'])[:80] or 'another machine'}"


@dataclass
class Transfer:
    """What one process uploads or downloads in the background. All processes have one at a time, or none has."""

    name: str  # of the checkpoint, or MODEL
    work: Callable[["Transfer"], None]
    is_sending: bool = True  # its own files; afterwards the first process waits for those of the others
    error: Exception | None = None
    give_up: threading.Event = field(default_factory=threading.Event)  # what fails is not tried again
    all_sent: threading.Event = field(default_factory=threading.Event)  # all processes have
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"transfer of {self.name}", daemon=True)
        self.thread.start()  # as a daemon it keeps no process from exiting

    def _run(self) -> None:
        try:
            self.work(self)
        except Exception as error:  # of any library; it never ends a run
            self.error = error
        self.is_sending = False


class Mirror(TrainerCallback):
    """Uploads every complete checkpoint and the model, and brings the newest and the best back. Does nothing without --mirror."""

    def __init__(self, trainer: Trainer, group: ProcessGroup | None, settings: RunSettings) -> None:
        """Raises UserError for options that need all files of a checkpoint on every node. `group`: see `make_cpu_group`."""
        self.output_dir, self.group = Path(trainer.args.output_dir), group
        limit, self.best = trainer.args.save_total_limit, ""
        self.limit = limit if limit and limit > 0 else math.inf
        url, self.process = settings.mirror, PartialState()
        self.storage = Storage(url) if url else None  # None as well if another run has taken the mirror
        self.has_own_disk = settings.separate_disks
        self.transfer: Transfer | None = None
        # Of the first process: the complete checkpoints in the mirror, the newest first; what failed, with the reason.
        self.heartbeat: Heartbeat | None = None
        self.complete: list[str] = []
        self.failed: dict[str, str] = {}
        self.uploaded, self.seconds_waited = 0, 0.0
        if self.has_own_disk and trainer.args.load_best_model_at_end:
            raise UserError(
                "--load_best_model_at_end reads a checkpoint of which every node has only its part: pass an --output_dir that "
                "all nodes share, or leave out the flag"
            )

    def _on_first_process(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """What `action` returns in the first process, and the message of its error, on all processes. Collective."""
        result, error = None, ""
        if self.process.is_main_process:
            try:
                result = action()
            except Exception as problem:  # of any library
                error = str(problem) if isinstance(problem, UserError) else describe(problem)
        return tuple(value_of_first([result, error]))

    def _at_start(self, action: Callable[[], T]) -> T:
        """What `action` returns in the first process, on all processes. Raises UserError on all if it fails. Collective."""
        result, error = self._on_first_process(lambda: at_start(self.storage, action))
        if error:
            raise UserError(error)
        return result

    def _is_mine(self, name: str) -> bool:
        return belongs_to(name, self.process, self.process.is_main_process)

    # Before the training

    def pull(self) -> None:
        """Brings the newest complete checkpoint of the mirror, and the best one, into the output directory of every disk.

        Collective. Files that are there already are kept if their checksums are right. Damaged checkpoints are skipped. Nothing
        is pulled if the output directory has a newer complete one.
        """
        if not self.storage:
            return
        self._at_start(self._begin)
        in_mirror, on_disk, damaged = self._at_start(self._list)
        pulled = ""
        for name in sorted(in_mirror | on_disk, key=_step, reverse=True):
            if name not in in_mirror:
                if not self._is_on_disks(name, on_disk[name]["files"]):
                    continue  # `find_checkpoint` says why
                self.best = self._read_best(name)  # the upload removes the old ones but this
                reason = self._begin_upload(name)
                if not reason:
                    damaged.pop(name, None)  # what the mirror had was removed
                if not self.has_own_disk:
                    break
                errors = [reason] if reason else [error for _, error in self._wait(PATIENCE)]
                if errors:  # the nodes need each other's files
                    raise UserError(f"--mirror: {name} cannot be uploaded to {self.storage.url}: {errors[-1]}")
            if damage := self._download(name, (on_disk | in_mirror)[name]):
                damaged[name] = damage
            else:
                pulled = name
                break
        if pulled:
            self.best = self._read_best(pulled)
            if damage := self._download_best(in_mirror, on_disk):
                damaged[self.best] = damage
        self._at_start(lambda: self._skip(damaged, is_error=not pulled and (self.has_own_disk or not on_disk)))
        if self.has_own_disk and self.process.is_local_main_process:
            for path in folder.checkpoints(self.output_dir):
                if not pulled or folder.step_of(path) > _step(pulled):
                    print_once(f"{path} was deleted: its files on other nodes are lost.")
                    delete(path)
        self.process.wait_for_everyone()

    def _begin(self) -> None:
        self.heartbeat = Heartbeat(self.storage, self.output_dir)
        self.heartbeat.begin()

    def _list(self) -> tuple[dict[str, dict], dict[str, dict], dict[str, str]]:
        """The markers of the mirror and of this disk, and which of the mirror's are damaged."""
        in_mirror, on_disk, damaged = {}, {}, {}
        for name in self.storage.checkpoints():
            try:
                in_mirror[name] = parse_marker(self.storage.fs.cat_file(f"{name}/{COMPLETION_MARKER}"))
            except (FileNotFoundError, NotADirectoryError):  # its upload did not end, or it is a file
                continue
            except DamagedFile as error:
                damaged[name] = str(error)
        for path in folder.checkpoints(self.output_dir):
            with contextlib.suppress(OSError, DamagedFile):  # `find_checkpoint` deals with them
                on_disk[path.name] = read_marker(path)
        self.complete = list(in_mirror)
        return in_mirror, on_disk, damaged

    def _is_on_disks(self, name: str, files: dict[str, list]) -> bool:
        """Whether every process has its files of a checkpoint on its disk, undamaged. Collective."""
        own = {file: entry for file, entry in files.items() if self._is_mine(file)}
        return not any(gather_values(bool(wrong_files(self.output_dir / name, own))))

    def _read_best(self, name: str) -> str:
        """The name of the best checkpoint when `name` was written, "" for none. Collective."""

        def read() -> str:
            state = read_json(self.output_dir / name / TRAINER_STATE_NAME)
            best = folder.best_checkpoint(self.output_dir, state.get("best_model_checkpoint"))
            return best.name if best else ""

        return self._on_first_process(read)[0] or ""  # of a damaged file, `find_checkpoint` says what is wrong

    def _download_best(self, in_mirror: dict[str, dict], on_disk: dict[str, dict]) -> str:
        """Brings the best checkpoint to every disk. Returns what is wrong with it in the mirror, "" for nothing. Collective."""
        if not self.best or (self.best in on_disk and not self.has_own_disk):
            return ""
        damage = self._download(self.best, in_mirror[self.best]) if self.best in in_mirror else ""
        if damage and self._downloads() and is_incomplete(self.output_dir / self.best):
            delete(self.output_dir / self.best)
        if damage or self.best not in in_mirror | on_disk:
            reason = damage or f"it is not in {self.storage.url}"
            print_once(f"warning: {self.best}, the best checkpoint, is lost: {reason}. The run continues without it.")
        return damage

    def _downloads(self) -> bool:
        return self.process.is_local_main_process if self.has_own_disk else self.process.is_main_process

    def _download(self, name: str, marker: dict) -> str:
        """Brings a checkpoint to every disk. Returns what is wrong with it in the mirror, "" for nothing. Collective."""
        downloads = self._downloads()
        self.transfer = Transfer(name, lambda _: self._download_lacking(name, marker) if downloads else None)
        errors = self._wait(math.inf)
        for is_damage, error in errors:
            if not is_damage:
                raise UserError(f"--mirror: {name} cannot be downloaded from {self.storage.url}: {error}")
        return errors[0][1] if errors else ""

    def _download_lacking(self, name: str, marker: dict) -> None:
        """Brings the files of a checkpoint that this disk lacks. Raises DamagedFile if they are not those of the marker."""
        checkpoint, files = self.output_dir / name, marker["files"]
        if any(path.is_symlink() for path in (checkpoint, *checkpoint.rglob("*"))):
            delete(checkpoint)  # nothing is written through a link
        lacking = {file: files[file] for file in wrong_files(checkpoint, files)}
        with contextlib.suppress(FileNotFoundError, DamagedFile):
            if not lacking and read_marker(checkpoint) == marker:
                return
        size = readable_size(sum(size for size, _ in lacking.values()))
        print_once(f"Downloading {name} from {self.storage.url}: {len(lacking)} of {len(files)} files, {size}.")
        begin_writing(checkpoint)
        for file in lacking:
            try:
                retry(lambda file=file: self.storage.download(f"{name}/{file}", checkpoint / file), PATIENCE)
            except FileNotFoundError as error:
                raise DamagedFile(f"{file} is missing") from error
        if wrong := wrong_files(checkpoint, lacking):
            raise DamagedFile(next(iter(wrong.values())))
        write_marker(checkpoint, {key: value for key, value in marker.items() if key != "checksum"})

    def _skip(self, damaged: dict[str, str], is_error: bool) -> None:
        """Removes the markers of damaged checkpoints, which will be written again. Raises UserError if there are no others."""
        if damaged and is_error:
            reasons = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
            raise UserError(
                f"--mirror: no checkpoint in {self.storage.url} is complete ({reasons}). Nothing was deleted: restore one from a "
                "copy, or start over with another URL and another --output_dir"
            )
        for name, problem in damaged.items():
            print_once(f"{name} in {self.storage.url} is damaged: {problem}. It is skipped.")
            self.storage.remove(f"{name}/{COMPLETION_MARKER}")
        self.complete = [name for name in self.complete if name not in damaged]

    # During the training

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Starts to upload the checkpoint in the background.

        First waits for the upload of the one before; if it fails now, it is not tried again. Collective.
        """
        if not self.storage:
            return
        before, began = self.transfer, time.monotonic()
        self._finish_upload(give_up_after=0)
        waited = time.monotonic() - began
        if before and waited > 1:
            self.seconds_waited += waited
            print_once(f"Waited {waited:.0f} s for the upload of {before.name}; a larger --save_steps avoids that.")
        self.best = Path(state.best_model_checkpoint or "").name
        self._begin_upload(f"checkpoint-{state.global_step}")

    def _begin_upload(self, name: str) -> str:
        """Starts to upload a checkpoint or the model. Returns the reason if it cannot. Collective.

        All processes use the marker of the first one, on its disk.
        """

        def prepare() -> dict:
            if self.heartbeat.is_taken:
                raise RuntimeError(TAKEN)
            if name == MODEL:
                return {"files": {}}
            retry(lambda: self.storage.remove_checkpoint(name), PATIENCE)  # an earlier start may have left other files
            return read_marker(self.output_dir / name)

        marker, reason = self._on_first_process(prepare)
        if reason:
            self._record_failure(name, reason)
            self.storage = None if reason == TAKEN else self.storage
            return reason
        files = finished_files(self.output_dir) if name == MODEL and self.process.is_main_process else {}

        def send(transfer: Transfer) -> None:
            own = {f"{name}/{file}": path_in(self.output_dir / name, file) for file in marker["files"] if self._is_mine(file)}
            for target, path in (own | files).items():
                what = f"The upload of {name} to {self.storage.url}"
                retry(lambda path=path, target=target: self.storage.upload(path, target), math.inf, transfer.give_up, what)
            transfer.is_sending = False
            if self.process.is_main_process and name != MODEL:
                self._complete(transfer, marker)

        self.transfer = Transfer(name, send)
        return ""

    def _complete(self, transfer: Transfer, marker: dict) -> None:
        """Uploads the marker once the files of all processes are in the mirror, and removes old checkpoints."""
        while True:
            all_sent = self.process.num_processes == 1 or transfer.all_sent.is_set()
            sizes = retry(lambda: self.storage.sizes(transfer.name), math.inf, transfer.give_up)
            lacking = next((name for name, (size, _) in marker["files"].items() if sizes.get(name) != size), None)
            if lacking is None:
                break
            if all_sent:
                raise FileNotFoundError(f"{lacking} is not there after its upload: do all nodes write to the same place?")
            transfer.all_sent.wait(5)
        if self.heartbeat.is_taken:
            raise RuntimeError(TAKEN)
        retry(lambda: self.storage.write(f"{transfer.name}/{COMPLETION_MARKER}", marker), math.inf, transfer.give_up)
        self.uploaded += 1
        complete = [transfer.name, *self.complete]
        self.complete = [name for place, name in enumerate(complete) if place < self.limit or name == self.best]
        size, seconds = readable_size(sum(size for size, _ in marker["files"].values())), time.monotonic() - transfer.began
        print(f"{transfer.name} ({size}) is in {self.storage.url} after {seconds:.0f} s.", flush=True)
        with contextlib.suppress(Exception):  # what remains is removed after the next upload
            for name in set(self.storage.checkpoints()) - set(self.complete):
                self.storage.remove_checkpoint(name)

    def _wait(self, give_up_after: float) -> list[tuple[bool, str]]:
        """Waits until nothing is transferred. After these seconds what fails is not tried again. Collective.

        Returns the errors of all processes: whether it is a damaged file, and the message.
        """
        transfer, began = self.transfer, time.monotonic()
        if transfer is None:
            return []
        while state := maximum(2 if transfer.is_sending else int(transfer.thread.is_alive()), self.group):
            if state == 1:
                transfer.all_sent.set()
            if time.monotonic() - began >= give_up_after:
                transfer.give_up.set()
            time.sleep(0.1)  # in between; a collective that lasts as long as the transfer would exceed its time limit
        self.transfer, error = None, transfer.error
        found = gather_values(error and (isinstance(error, DamagedFile), describe(error)))
        return [problem for problem in found if problem]

    def _finish_upload(self, give_up_after: float) -> None:
        """Waits for the upload in progress, and records it if it has failed. Collective."""
        name = self.transfer.name if self.transfer else ""
        if errors := self._wait(give_up_after):
            self._record_failure(name, errors[-1][1])  # the first process may only know that a file is missing

    def _record_failure(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        print_once(f"warning: {name} is not in {self.storage.url}: {reason}. The run continues.")

    # After the training

    def finish(self) -> None:
        """Waits until the last checkpoint is in the mirror, or says that it is not. Collective."""
        if self.transfer and self.transfer.thread.is_alive():
            newest = f"{self.complete[0]} is the newest there" if self.complete else "no checkpoint is there"
            print_once(f"Uploading {self.transfer.name} to {self.storage.url}; until that is done, {newest}.")
        self._finish_upload(PATIENCE)

    def upload_model(self) -> None:
        """Uploads the files of a finished run, and prints what the mirror has. Collective."""
        if not self.storage:
            return
        url = self.storage.url
        self._begin_upload(MODEL)
        self._finish_upload(PATIENCE)
        if MODEL not in self.failed:
            print_once(f"The model and {plural(len(self.complete), 'checkpoint')} are in {url}")
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
        if self.heartbeat:
            self.heartbeat.end()
        if self.storage or self.failed:
            self.process.wait_for_everyone()  # the launcher kills a process that exits long after the others
        self.group = None


def finished_files(output_dir: Path) -> dict[str, Path]:
    """The files of a finished run by their names, `train_results.json` last. run.json is in the mirror from the start."""
    found = [path for path in sorted(output_dir.iterdir()) if path.is_file() and not path.is_symlink()]
    files = {path.name: path for path in found if not path.name.startswith(".") and path.name != RUN}
    return {name: files[name] for name in sorted(files, key=RESULTS.__eq__)}


def _step(name: str) -> int:
    return folder.step_of(Path(name))
