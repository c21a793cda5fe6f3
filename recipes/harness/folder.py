"""The output directory of a run: the names of what it contains, and how its JSON files are read and written.

`run.json` is written by the first process, in `parse`, see start/claim.py. `train_results.json` is written last and marks a
finished run.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from harness.messages import DamagedFile

RUN = "run.json"
RESULTS = "train_results.json"
DATA = "data.json"  # what `load` read and skipped
PROMPT = "prompt.json"  # how a prompt for the model looks, see `prompt_of` in run/training.py
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


def has_trained(folder: Path) -> bool:
    """Whether there is something of a run that another run must not replace."""
    return bool(trained_files(folder))


def trained_files(folder: Path) -> list[Path]:
    return [path for pattern in TRAINED for path in folder.glob(pattern)]
