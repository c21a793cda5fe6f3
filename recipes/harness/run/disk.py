"""Room on the disk: asked for before a run, missed in the middle of one."""

import errno
import os
import shutil
import sys
import time
from pathlib import Path

from harness import marks
from harness.folder import RUN, UNWRITABLE, checkpoints, latest
from harness.launched import fail

from transformers import PreTrainedModel

ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE}
# What torch's zip writer, its sharded checkpoints and safetensors make of an OSError.
PHRASES = ("PytorchStreamWriter", "inline_container", "unexpected pos", "No space left", "File too large", "I/O error")


def _sizes(trainer) -> tuple[int, int]:
    """Bytes of a checkpoint, and of the model at the end, at least."""
    is_whole = isinstance(trainer.model, PreTrainedModel)
    saved = [weight for weight in trainer.model.parameters() if weight.requires_grad or is_whole]
    optimizer = str(trainer.args.optim).lower()
    moments = 2 if "adam" in optimizer and "8bit" not in optimizer else 0
    one = sum(weight.numel() * weight.element_size() * (1 + moments * weight.requires_grad) for weight in saved)
    return one, sum(weight.numel() * 2 for weight in saved)


def check(trainer, checkpoint: Path | None):
    """Ends the process with one line unless there is room for two checkpoints and the model."""
    folder, (one, model) = Path(trainer.args.output_dir), _sizes(trainer)
    one = marks.size(checkpoint) if checkpoint else one
    count = 0 if trainer.args.save_strategy == "no" else 2
    missing = max(0, count - len(checkpoints(folder)))
    needed, free = missing * one + model, shutil.disk_usage(folder).free
    if free < needed:
        fail(
            f"{folder} has {_mb(free)} free, and this run needs {_mb(needed)}: {missing} checkpoint{'s' * (missing != 1)} of "
            f"{_mb(one)} and a model of {_mb(model)}. Make room, or give an --output_dir on another disk"
        )


def explain(error: Exception, trainer):
    """Ends the process with one line when `error` says that the run's folder cannot be written; returns when it is another."""
    folder, kept = Path(trainer.args.output_dir), latest(Path(trainer.args.output_dir))
    is_gone, text = not (folder / RUN).is_file(), str(error).strip()
    is_here = isinstance(error, OSError) and (error.errno in ERRORS or str(error.filename).startswith(str(folder)))
    if not is_gone and not is_here and not any(phrase in text for phrase in PHRASES):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0" and not is_here:
        time.sleep(3)  # a sharded checkpoint fails on every process, of which the first speaks
    reason = "it has disappeared" if is_gone else text.split("\n")[-1][:200]
    needed = max(_sizes(trainer)[0], marks.size(kept) if kept else 0)
    free = 0 if is_gone else shutil.disk_usage(folder).free
    free += sum(marks.size(path) for path in checkpoints(folder) if marks.is_cut_short(path))  # which the next start removes
    if not is_gone and free < needed:
        reason = f"the disk is full: for a checkpoint of {_mb(needed)}, {_mb(needed - free)} are missing"
    going_on = f"Then the same command goes on from {kept}." if kept else "No checkpoint was written yet."
    print(
        f"\nerror: {folder} cannot be written at step {trainer.state.global_step}: {reason}. {going_on}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(UNWRITABLE)  # the others may wait for this one for ever


def _mb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
