"""The run's folder: whose it is, whether it may be used, whether its run is finished.

`run.json` is written before the first process starts and names the recipe, config, model and data;
`train_results.json` is written last and marks a finished run.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from harness.launched import Launched, fail, say

from filelock import FileLock, Timeout

RUN = "run.json"
RESULTS = "train_results.json"
LOCK = ".lock"
UNWRITABLE = 74  # exit code of a run that could not write into its folder (EX_IOERR)
# Of what `run.json` says, under conditions of their own.
MAY_CHANGE = ("config", "sharded", "recipe_digest", "data_digest", "max_samples", "max_eval_samples")
MARK = "complete.json"  # in a checkpoint: every process has written its part


def write_json(path: Path, content: dict):
    """Writes so that the file is whole or not there, also when the power fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    draft.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def sync(path: Path):
    """Waits until a file or the names in a folder are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_json(path: Path) -> dict:
    """The content of a file of `write_json`, {} when there is none."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def lock(folder: Path) -> FileLock:
    """Takes the folder for one run, which holds the lock as long as it lives; fails when another run does."""
    held = FileLock(folder / LOCK)
    try:
        held.acquire(timeout=0)
    except Timeout:
        fail(f"another run is writing into {folder}: wait for it, stop it, or choose another --output_dir")
    except OSError as error:
        fail(f"{folder} cannot be written ({error.strerror}): choose another --output_dir")
    return held


def default(launched: Launched, script: str) -> str:
    """`outputs/RECIPE`, or `outputs/tiny/RECIPE` for a rehearsal."""
    return str(Path("outputs", *(["tiny"] if launched.tiny else []), Path(launched.recipe or script).stem))


def check(folder: Path, identity: dict, is_default: bool):
    """Fails when `folder` belongs to something else, or another run is in it. Writes nothing.

    A rehearsal in its default folder steps aside for one that would not be its continuation: with another config, of a recipe
    or of data that have changed.
    """
    if folder.exists() and not folder.is_dir():
        fail(f"{folder} is a file: give a folder as --output_dir")
    there = _owner(folder)
    if there:
        lock(folder).release()
    _compare(folder, there, identity, is_default)


def _owner(folder: Path) -> dict:
    """What `run.json` says, {} when there is none."""
    try:
        return read_json(folder / RUN)
    except ValueError:
        fail(f"{folder / RUN} is damaged, so nobody knows whose run that is: choose another --output_dir")


def _compare(folder: Path, there: dict, identity: dict, is_default: bool):
    if _steps_aside(there, identity, is_default):
        there = {}
    elif not there and folder.is_dir() and any(not path.name.startswith((LOCK, f".{RUN}.")) for path in folder.iterdir()):
        fail(f"{folder} holds files that are not a run of this project: choose an empty or new --output_dir")
    for key in (key for key in identity if there and key not in MAY_CHANGE):
        if there.get(key) != identity[key]:
            fail(
                f"{folder} holds a run with {key} {there.get(key)}, this one has {key} {identity[key]}: "
                "choose another --output_dir, or move that folder away"
            )
    begun = (folder / RESULTS).exists() or next(folder.glob("checkpoint-*"), None)
    for key in ("max_samples", "max_eval_samples"):
        if begun and there.get(key, identity[key]) != identity[key]:
            fail(
                f"{folder} holds a run with --{key} {there[key]}, this one has {identity[key]}, so other rows would be held out "
                "or trained on: give the same, or choose another --output_dir"
            )
    if begun and there.get("data_digest", identity["data_digest"]) != identity["data_digest"]:
        fail(
            f"{folder} holds a run on {identity['dataset']} as it was: its rows have changed since, and what was held out may "
            "be trained on. Choose another --output_dir, or move that folder away"
        )
    if there and there["sharded"] != identity["sharded"] and list(folder.glob("checkpoint-*")):
        kinds = {True: "FSDP", False: "unsharded"}
        fail(
            f"{folder} holds {kinds[there['sharded']]} checkpoints of {there['config']}, which {identity['config']} "
            f"({kinds[identity['sharded']]}) cannot continue: choose another --output_dir"
        )


def _steps_aside(there: dict, identity: dict, is_default: bool) -> bool:
    is_other = any(there.get(key, identity[key]) != identity[key] for key in ("config", "recipe_digest", "data_digest"))
    return bool(there.get("tiny")) and identity["tiny"] and is_default and is_other


def claim(folder: Path, identity: dict, is_default: bool):
    """Makes `folder`, which `check` let pass, the folder of this run: of one, also when two begin at the same moment."""
    there = _owner(folder)
    try:
        if _steps_aside(there, identity, is_default):
            aside = folder.with_name(f"{folder.name}.{there['config']}")
            if read_json(aside / RUN).get("tiny"):
                shutil.rmtree(aside)
            folder.rename(aside)
            say(f"The rehearsal with {there['config']} that was in {folder} is now in {aside}.")
            there = {}
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        _compare(folder, _owner(folder), identity, is_default)
        if read_json(folder / RUN) != identity:
            write_json(folder / RUN, identity)
        held.release()
    except OSError as error:
        fail(f"{folder} cannot be written ({error.strerror}): choose another --output_dir")
    if there.get("recipe_digest", identity["recipe_digest"]) != identity["recipe_digest"]:
        say(f"{identity['recipe']}.py has changed since the last start of the run in {folder}, which goes on as it says now.")


def finished(folder: Path, max_steps: int, num_train_epochs: float) -> dict:
    """The results of the run in `folder` if it already went as far as is asked now, else {}."""
    results = read_json(folder / RESULTS)
    if not results:
        return {}
    if max_steps > 0:
        return results if results["global_step"] >= max_steps else {}
    return results if results["epoch"] >= num_train_epochs else {}


def end_if_finished(folder: Path, max_steps: int, num_train_epochs: float):
    """Ends the process when the run in `folder` went as far as is asked, or cannot go on."""
    if results := finished(folder, max_steps, num_train_epochs):
        flag = "--max_steps" if max_steps > 0 else "--num_train_epochs"
        say(
            f"{folder} is finished: {results['global_step']} steps, final loss {results['final_loss']:.4f}.\n"
            f"To go on: the same command with a larger {flag}. To start over: another --output_dir, or rm -r {folder}"
        )
        sys.exit(0)
    if (folder / RESULTS).exists() and not list(folder.glob("checkpoint-*")):
        fail(
            f"{folder} is finished and its checkpoints are gone, so it cannot go on: train its model further with "
            f"--model_name_or_path {folder} and another --output_dir"
        )


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that has a mark."""
    return next((path for path in checkpoints(folder) if (path / MARK).is_file()), None)


def checkpoints(folder: Path) -> list[Path]:
    """What is called a checkpoint in `folder`, whole or not, the newest first."""
    there = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(there, key=step, reverse=True)


def step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])
