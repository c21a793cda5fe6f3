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
from pathlib import Path

from harness.messages import UserError, print_once
from harness.restarts import ALL_SETTINGS, before_and_now, changed_settings, keep_settings, must_be_equal

from filelock import FileLock, Timeout

RUN = "run.json"
RESULTS = "train_results.json"
DATA = "data.json"  # what `load` read and skipped
PROMPT = "prompt.json"  # how a prompt for the model looks, see `run/prompts.py`
CONVERSATIONS = "conversations"  # what a run was trained on, in PROMPT
TEXTS = "texts"
PROMPTS = "prompts"
LOCK = ".lock"
HELD_OUT = "held_out.parquet"  # the rows that a run was evaluated on, as tokens, for --verify
COMPLETION_MARKER = "complete.json"  # in a checkpoint: every process has written its part
SHARDED = "pytorch_model_fsdp_0"  # the folder of the weights in a sharded checkpoint
CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,15}")
NOT_WRITABLE = 74  # exit code of a run that could not write into its output directory (EX_IOERR)
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
    if CHECKPOINT.fullmatch(name):
        return folder / name
    return None


def resume_hint(folder: Path) -> str:
    """The end of every message about a run that stopped."""
    checkpoint = newest_complete_checkpoint(folder)
    if checkpoint:
        return f"The same command resumes from {checkpoint}."
    return "No checkpoint was written yet."


def lock_of(folder: Path) -> FileLock:
    """The lock of an output directory, which is not acquired yet."""
    return FileLock(folder / LOCK)


def acquire(lock: FileLock) -> None:
    """Locks an output directory, which it makes, until `lock` is released, or this process ends.

    Raises UserError if another run has locked it: two runs would overwrite each other's checkpoints.
    """
    folder = Path(lock.lock_file).parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"--output_dir: another run is writing into {folder}: wait for it, stop it, or choose another folder"
        ) from error


def write_run(folder: Path, before: dict, identity: dict) -> None:
    """Writes run.json into a locked folder. Prints what is different from `before`, the content that it had.

    `identity`: the new content. Afterwards it says what this start uses.
    """
    if newest_complete_checkpoint(folder):
        for message in keep_settings(before, identity):
            print_once(message)
    if not has_trained(folder):
        (folder / DATA).unlink(missing_ok=True)  # of a start that has trained nothing
    elif before.get("recipe_digest") != identity["recipe_digest"]:
        print_once(f"{identity['recipe']}.py has changed since {folder} was last trained; the run resumes with the new version.")
    if before != identity:
        write_json(folder / RUN, identity)


def delete_training(folder: Path) -> None:
    """Deletes what a rehearsal in its default folder has trained."""
    for path in [*trained_files(folder), folder / "adapter_config.json"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def has_trained(folder: Path) -> bool:
    """Whether there is something of a run that another run must not replace."""
    return bool(trained_files(folder))


def trained_files(folder: Path) -> list[Path]:
    return [path for pattern in TRAINED for path in folder.glob(pattern)]


def check_same_run(folder: Path, before: dict, identity: dict) -> None:
    """Raises UserError, with the differences, unless `folder` is free, or its run is the one that `identity` describes.

    Otherwise two runs would be mixed, or rows that a run is evaluated on would be trained on. `before`: the content of its
    run.json.
    """
    if not before and any(not path.name.startswith((LOCK, f".{RUN}.")) for path in folder.iterdir()):
        raise UserError(f"--output_dir: {folder} has files that are not from a run: choose an empty or new folder")
    if not before or not has_trained(folder):
        return
    problem = ""
    if changes := must_be_equal(before, identity):
        old, new = before_and_now(changes)
        problem = f"it holds a run with {old}, this run has {new}"
    else:
        old, new = ({(name, size) for name, size, _ in run["data_files"]} for run in (before, identity))
        if names := sorted({name for name, _ in old ^ new}):
            problem = f"{', '.join(names)} of the dataset has changed since the run began"
    if problem:
        raise UserError(
            f"--output_dir: {folder}: {problem}: pass the same values, choose another --output_dir, or move that folder away"
        )


def finished_results(folder: Path, max_steps: int, num_train_epochs: float) -> dict:
    """The results of the run in `folder` if it has trained as far as is asked for now, else {}."""
    results = read_json(folder / RESULTS, "global_step", "epoch", "final_loss")
    if not results:
        return {}
    is_finished = results["global_step"] >= max_steps if max_steps > 0 else (results["epoch"] or 0) >= num_train_epochs
    stopped_early = results.get("stopped_early_of") == [max_steps, num_train_epochs]  # by a callback of the recipe
    if is_finished or stopped_early:
        return results
    return {}


def exit_if_finished(folder: Path, identity: dict, max_steps: int, num_train_epochs: float) -> None:
    """Exits with code 0 if the run has trained as far as is asked for. Raises UserError if it has not and cannot resume.

    Also raises UserError if it is finished with other settings than `identity` has.
    """
    if results := finished_results(folder, max_steps, num_train_epochs):
        loss = "" if results["final_loss"] is None else f", final loss {results['final_loss']:.4f}"
        flag = "--max_steps" if max_steps > 0 else "--num_train_epochs"
        end = f"{folder} is finished: {results['global_step']} steps{loss}."
        if changes := changed_settings(read_json(folder / RUN), identity, ALL_SETTINGS):  # they would train nothing
            before, now = before_and_now(changes)
            raise UserError(
                f"--output_dir: {end} It was trained with {before}, this run has {now}: choose another --output_dir to train "
                "with that"
            )
        print_once(f"{end}\nTo train further: a larger {flag}. To start over: another --output_dir, or rm -r {folder}")
        sys.exit(0)
    if (folder / RESULTS).exists() and not list(folder.glob("checkpoint-*")):
        raise UserError(
            f"--output_dir: {folder} is finished and its checkpoints were deleted, so it cannot resume: train its model with "
            f"--model_name_or_path {folder} and another --output_dir"
        )
