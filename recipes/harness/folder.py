"""The output directory of a run: which run it belongs to, whether it may be used, whether the run is finished.

`run.json` is written by the first process, in `parse`. It names the recipe, config, model and dataset, and has the settings that
are not defaults, the command, and the name, size and modification time of each local file of the dataset, by which a changed file
is found.
`train_results.json` is written last and marks a finished run.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.messages import UserError, print_once
from harness.restarts import Changes, before_and_now, changed_settings, keep_settings, must_be_equal

from filelock import FileLock, Timeout

RUN = "run.json"
RESULTS = "train_results.json"
DATA = "data.json"  # what `load` read and skipped
PROMPT = "prompt.json"  # how a prompt for the model looks, see `run/prompts.py`
CONVERSATIONS, TEXTS, PROMPTS = "conversations", "texts", "prompts"  # what a run was trained on, in PROMPT
LOCK = ".lock"
HELD_OUT = "held_out.parquet"  # the rows that a run was evaluated on, as tokens, for --verify
COMPLETION_MARKER = "complete.json"  # in a checkpoint: every process has written its part
SHARDED = "pytorch_model_fsdp_0"  # the folder of the weights in a sharded checkpoint
CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,15}")
NOT_WRITABLE = 74  # exit code of a run that could not write into its output directory (EX_IOERR)
# The arguments that decide which rows a run trains on, and which it evaluates on.
CHOICE_OF_ROWS = (
    *("max_samples", "max_eval_samples", "dataset_streaming", "column_map", "chat_template_kwargs", "split_conversations"),
    "text_rows",
)
# The keys of run.json that may differ between two starts of a run, under the conditions of `check_same_run`.
MAY_DIFFER = ("config", "sharded", "recipe_digest", "data_files", "date", "commit", "teacher_commit", "command", "settings")
# What is there once a run has trained: such a folder belongs to its run.
TRAINED = ("checkpoint-*", "damaged-checkpoint-*", "*.safetensors", RESULTS)


class DamagedFile(UserError):
    """A JSON file of a run that cannot be read."""


def write_json(path: Path, content: dict) -> None:
    """Writes a file so that it is complete or missing, also after a power failure."""
    with draft_of(path) as draft:
        draft.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        sync(draft)
    sync(path.parent)


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A file to write, which is then moved to `path`: that is complete or missing, and a link there is replaced."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft{path.suffix}")
    draft.unlink(missing_ok=True)
    try:
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)


def remove_link(path: Path) -> None:
    """Removes a link to somewhere else, so that what is written next stays in this folder."""
    if path.is_symlink():
        path.unlink(missing_ok=True)


def read_json(path: Path, *keys: str) -> dict:
    """The content of a JSON file, {} if there is none. Raises DamagedFile if it is no object, or lacks one of `keys`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not content.keys() >= set(keys):
        raise DamagedFile(f"{path} is damaged: restore it from a copy, or delete it")
    return content


def sync(path: Path) -> None:
    """Waits until a file, or the list of names of a folder, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders of a run, complete or not, the newest first."""
    found = [path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def newest_complete_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that has a completion marker. `run/checkpoints.py` also compares checksums."""
    return next((path for path in checkpoints(folder) if (path / COMPLETION_MARKER).is_file()), None)


def best_checkpoint(folder: Path, saved: object) -> Path | None:
    """The best checkpoint of a run in `folder`. `saved`: what trainer_state.json has of it, a path of where the run was then.

    None if there is none, or if it is not a path of a checkpoint.
    """
    name = Path(saved).name if isinstance(saved, str) else ""
    return folder / name if CHECKPOINT.fullmatch(name) else None


def resume_hint(folder: Path) -> str:
    """The end of every message about a run that stopped."""
    checkpoint = newest_complete_checkpoint(folder)
    return f"The same command resumes from {checkpoint}." if checkpoint else "No checkpoint was written yet."


def date_of(run: dict) -> datetime | None:
    """When a run was started for the first time. `run`: the content of run.json, or {}."""
    return datetime.fromisoformat(run["date"]) if "date" in run else None


def lock_of(folder: Path) -> FileLock:
    """The lock of an output directory, which is not acquired yet."""
    return FileLock(folder / LOCK)


def acquire(lock: FileLock) -> None:
    """Locks an output directory until `lock` is released, or this process ends. Raises UserError if another run has locked it."""
    folder = Path(lock.lock_file).parent
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"--output_dir: another run is writing into {folder}: wait for it, stop it, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written ({error.strerror}): choose another folder") from error


def check_output_dir(folder: Path, identity: dict, is_default: bool) -> None:
    """Raises UserError if the folder belongs to another run, or if another process is writing into it. Writes nothing but a lock.

    `identity` is the content of run.json for the run that is about to start. `is_default`: no --output_dir was given.
    """
    existing = _read_run(folder)
    if existing:
        lock = lock_of(folder)
        acquire(lock)
        lock.release()
    check_same_run(folder, existing, identity, is_default)


def claim_output_dir(lock: FileLock, identity: dict, is_default: bool) -> None:
    """Locks a folder that passed `check_output_dir`, and writes run.json into it. Safe if two runs start at the same time.

    Prints what is different from the run that the folder has; `identity` then says what this start uses of it.
    Raises UserError if another run is writing into the folder.
    """
    folder = Path(lock.lock_file).parent
    messages = []
    try:
        delete_replaced_rehearsal(lock, identity, is_default)
        folder.mkdir(parents=True, exist_ok=True)
        acquire(lock)
        written = _read_run(folder)
        check_same_run(folder, written, identity, is_default)
        if newest_complete_checkpoint(folder):
            messages = keep_settings(written, identity)
        is_same = _is_same_run(written, identity)
        if written and not is_same and not has_trained(folder):
            (folder / DATA).unlink(missing_ok=True)  # of a run that has trained nothing
        if written != identity:
            write_json(folder / RUN, identity)
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written ({error.strerror}): choose another folder") from error
    if written.get("recipe_digest", identity["recipe_digest"]) != identity["recipe_digest"] and has_trained(folder):
        messages.append(
            f"{identity['recipe']}.py has changed since {folder} was last trained; the run resumes with the new version."
        )
    for message in messages:
        print_once(message)


def delete_replaced_rehearsal(lock: FileLock, identity: dict, is_default: bool) -> None:
    """Deletes a rehearsal that the default folder has, if this run replaces it, while no other start can."""
    folder = Path(lock.lock_file).parent
    if not is_replaced_rehearsal(folder, identity, is_default):
        return
    acquire(lock)
    if is_replaced_rehearsal(folder, identity, is_default):  # still
        shutil.rmtree(folder)
        print_once(f"The earlier rehearsal in {folder} was deleted: it is another one, or was finished with other settings.")
    lock.release()


def has_trained(folder: Path) -> bool:
    """Whether there is something of a run that another run must not replace."""
    return any(next(folder.glob(pattern), None) for pattern in TRAINED)


def _read_run(folder: Path) -> dict:
    try:
        return read_json(folder / RUN, "recipe", "config", "tiny", "data_files")
    except DamagedFile as error:
        raise UserError(f"--output_dir: {error}, or choose another folder") from error


def is_replaced_rehearsal(folder: Path, identity: dict, is_default: bool) -> bool:
    """Whether a rehearsal in the default folder is deleted: it is another one, or it ended with other settings.

    Not if a real run is in a folder below it.
    """
    existing = _read_run(folder) if is_default and identity["tiny"] else {}
    if not existing or not all(read_json(file).get("tiny") for file in folder.rglob(RUN)):
        return False
    return not _is_same_run(existing, identity) or bool(changed_settings(read_json(folder / RESULTS), identity))


def _is_same_run(existing: dict, identity: dict) -> bool:
    """Whether two run.json are equal, but for their dates, the places of files that were moved, and what may change."""
    keys = (existing.keys() | identity.keys()) - {"date", "commit", "teacher_commit", "command", "settings", "data_files"}
    is_same = all(_means_the_same(existing.get(key), identity.get(key)) for key in keys)
    same_files = _names_and_sizes(existing) == _names_and_sizes(identity)
    return is_same and same_files and not must_be_equal(existing, identity)


def _means_the_same(before: Any, now: Any) -> bool:
    """Whether two values are equal, or the path that a run has recorded can be that of a file that was moved since.

    It is also another one on another machine.
    """
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(map(_means_the_same, before, now))
    are_paths = all(isinstance(path, str) and path.startswith("/") for path in (before, now))
    return before == now or (are_paths and Path(before).name == Path(now).name and not Path(before).exists())


def _names_and_sizes(run: dict) -> set[tuple[str, int]]:
    """Those of the local files of the dataset."""
    return {(name, size) for name, size, _ in run.get("data_files", [])}


def different_values(existing: dict, identity: dict) -> Changes:
    """What must be equal in two run.json and is not, by its flag or its name in run.json. What one lacks is not compared."""
    settings = must_be_equal(existing, identity)
    compared = {key: (existing.get(key, now), now) for key, now in identity.items() if key not in MAY_DIFFER} | settings
    flags = {*settings, *CHOICE_OF_ROWS}
    return {f"--{key}" if key in flags else key: pair for key, pair in compared.items() if not _means_the_same(*pair)}


def check_same_run(folder: Path, existing: dict, identity: dict, is_default: bool) -> None:
    """Raises UserError, with all differences, unless `folder` is free, or its run is the one that `identity` describes.

    `existing`: the content of its run.json.
    """
    if is_replaced_rehearsal(folder, identity, is_default):
        return
    if not existing:
        if folder.is_dir() and any(not path.name.startswith((LOCK, f".{RUN}.")) for path in folder.iterdir()):
            raise UserError(f"--output_dir: {folder} has files that are not from a run: choose an empty or new folder")
        return
    if not has_trained(folder):
        return
    differences = different_values(existing, identity)
    problems = []
    if differences:
        before, now = before_and_now(differences)
        problems.append(f"it holds a run with {before}, this run has {now}")
    changed_files = []
    if not differences.keys() & {"dataset", "datasets"}:  # otherwise these are the files of two datasets
        changed_files = sorted({name for name, _ in _names_and_sizes(existing) ^ _names_and_sizes(identity)})
    for name in changed_files:
        problems.append(f"{name} of {identity['dataset']} has changed since the run began")
    if list(folder.glob("checkpoint-*")) and existing.get("sharded") != identity["sharded"]:
        kinds = {True: "FSDP", False: "unsharded"}
        problems.append(
            f"it holds {kinds[not identity['sharded']]} checkpoints of {existing['config']}, which {identity['config']} "
            f"({kinds[identity['sharded']]}) cannot resume"
        )
    if problems:
        chooses_rows = changed_files or any(name.removeprefix("--") in CHOICE_OF_ROWS for name in differences)
        reason = ". Evaluation rows might be trained on" if chooses_rows else ""
        choose = "pass the same values, choose another --output_dir, or move that folder away"
        raise UserError(f"--output_dir: {folder}: {'; '.join(problems)}{reason}: {choose}")


def finished_results(folder: Path, max_steps: int, num_train_epochs: float) -> dict:
    """The results of the run in `folder` if it has trained as far as is asked for now, else {}."""
    results = read_json(folder / RESULTS, "global_step", "epoch", "final_loss")
    if not results:
        return {}
    is_finished = results["global_step"] >= max_steps if max_steps > 0 else (results["epoch"] or 0) >= num_train_epochs
    stopped_early = results.get("stopped_early_of") == [max_steps, num_train_epochs]  # by a callback of the recipe
    return results if is_finished or stopped_early else {}


def exit_if_finished(folder: Path, identity: dict, max_steps: int, num_train_epochs: float) -> None:
    """Exits with code 0 if the run has trained as far as is asked for. Raises UserError if it has not and cannot resume.

    Also raises UserError if it is finished with other settings than `identity` has.
    """
    if results := finished_results(folder, max_steps, num_train_epochs):
        loss = "" if results["final_loss"] is None else f", final loss {results['final_loss']:.4f}"
        end = f"{folder} is finished: {results['global_step']} steps{loss}."
        if changes := changed_settings(results, identity):  # they would train nothing
            before, now = before_and_now(changes, "--")
            raise UserError(
                f"--output_dir: {end} It was trained with {before}, this run has {now}: choose another --output_dir to train "
                "with that"
            )
        flag = "--max_steps" if max_steps > 0 else "--num_train_epochs"
        further = f"To train further: the same command with a larger {flag}."
        print_once(f"{end}\n{further} To start over: another --output_dir, or rm -r {folder}")
        sys.exit(0)
    if (folder / RESULTS).exists() and not list(folder.glob("checkpoint-*")):
        raise UserError(
            f"--output_dir: {folder} is finished and its checkpoints were deleted, so it cannot resume: train its model with "
            f"--model_name_or_path {folder} and another --output_dir"
        )
