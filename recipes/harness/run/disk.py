"""The space on the disk of the output directory: checked before a run, and one message when it is full or gone."""

import errno
import shutil
from pathlib import Path
from typing import Any

from harness import folder
from harness.messages import UserError, die, last_line, readable_size

from transformers import PreTrainedModel

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE}
# What torch.save, sharded checkpoints and safetensors raise instead of an OSError.
DISK_MESSAGES = ("PytorchStreamWriter", "inline_container", "unexpected pos", "No space left", "File too large", "I/O error")


def check_disk_space(trainer: Any) -> None:
    """Raises UserError unless the disk has space for two checkpoints, for the best one if it is kept besides, and for the model.

    Otherwise the run is lost when the disk is full.
    """
    run = Path(trainer.args.output_dir)
    if not trainer.is_world_process_zero() and not run.is_dir():  # on another node, without checkpoints
        return
    checkpoint_size, model_size = estimated_sizes(trainer)
    wanted = 0
    if trainer.args.save_strategy != "no":
        wanted = 3 if trainer.args.metric_for_best_model else 2
    needed = max(0, wanted - len(folder.checkpoints(run))) * checkpoint_size + model_size
    free = shutil.disk_usage(run).free
    if free < needed:
        raise UserError(
            f"--output_dir: {run} has {readable_size(free)} free, this run needs {readable_size(needed)} for checkpoints and the "
            "model. Free some space, or pass a folder on another disk"
        )


def exit_if_disk_failed(error: Exception, trainer: Any) -> None:
    """Exits with one message if the output directory is full, cannot be written or is gone; returns for other errors."""
    run = Path(trainer.args.output_dir)
    # Nodes may have no folder without checkpoints, the first process has.
    has_disappeared = trainer.is_world_process_zero() and not (run / folder.RUN).is_file()
    is_disk_error = isinstance(error, OSError) and (error.errno in DISK_ERRORS or Path(str(error.filename)).is_relative_to(run))
    if not (has_disappeared or is_disk_error or any(message in str(error) for message in DISK_MESSAGES)):
        return
    reason = "it has disappeared"
    if not has_disappeared:
        reason = f"{last_line(error)} ({readable_size(shutil.disk_usage(run.parent).free)} of the disk are free)"
    message = f"{run} cannot be written at step {trainer.state.global_step}: {reason}. {folder.resume_hint(run)}"
    # A sharded checkpoint fails on every process; an OSError can be that of one process.
    die(message, folder.NOT_WRITABLE, is_of_one_process=is_disk_error)


def estimated_sizes(trainer: Any) -> tuple[int, int]:
    """Bytes of a checkpoint and of the final model, at least."""
    is_full_model = isinstance(trainer.model, PreTrainedModel)
    checkpoint = model = 0
    for weight in trainer.model.parameters():
        if weight.requires_grad or is_full_model:
            checkpoint += weight.nbytes
            model += weight.numel() * 2
        if weight.requires_grad and "adam" in trainer.args.optim:
            checkpoint += 2 * weight.numel() * (1 if "8bit" in trainer.args.optim else weight.itemsize)
    return checkpoint, model
