"""Failures of a run: a known one ends it with one message and an exit code, one after the training is only reported."""

import contextlib
import errno
import os
import shutil
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import folder
from harness.messages import DEBUG_VARIABLE, UserError, die, kind_and_line, last_line, print_once, readable_size
from harness.nodes.network import exit_if_connection_lost

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE}
# What torch.save, sharded checkpoints and safetensors raise instead of an OSError.
DISK_MESSAGES = ("PytorchStreamWriter", "inline_container", "unexpected pos", "No space left", "File too large", "I/O error")

OUT_OF_MEMORY = 12  # exit code (ENOMEM)
GPU_ADVICE = (
    "`nvidia-smi` shows what else is on the GPU, `./launch.sh --plan` with the same recipe, config and flags what needs it, and "
    "which changes save most"
)
HOST_ADVICE = "request more memory (SLURM: --mem), stop other programs, or use a config without fsdp_offload_params"


def exit_for_known_failure(error: Exception, trainer: Any = None) -> None:
    """Exits with one message if `error` is a known failure; returns if it is not. `trainer` is None before there is one."""
    exit_if_out_of_memory(error, trainer)
    if "Expected to have finished reduction in the prior iteration" in str(error):
        raise UserError(
            "a part of the model gets no gradient, and DDP waits for it: pass --ddp_find_unused_parameters true, or freeze it in "
            "the recipe"
        ) from error
    if isinstance(error, KeyError) and "metric_for_best_model" in str(error):
        raise UserError(f"--metric_for_best_model: {error}") from error
    if trainer is None:
        exit_if_connection_lost(error)
    else:
        raise_if_of_reward(error, trainer)
        exit_if_disk_failed(error, trainer)
        exit_if_connection_lost(error, trainer.state.global_step, folder.resume_hint(Path(trainer.args.output_dir)))


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


def raise_if_of_reward(error: Exception, trainer: Any) -> None:
    """Raises UserError if a reward function of GRPOTrainer or RLOOTrainer has failed."""
    frames = traceback.extract_tb(error.__traceback__)
    if not any(frame.name == "_calculate_rewards" for frame in frames):  # TRL's
        return
    names = trainer.reward_func_names
    places = [f"{frame.name} ({Path(frame.filename).name}, line {frame.lineno})" for frame in frames if frame.name in names]
    hint = folder.resume_hint(Path(trainer.args.output_dir)) if trainer.state.global_step else ""
    raise UserError(
        f"the reward function {', '.join(places or names)} fails: {kind_and_line(error)} (--debug shows the "
        f"traceback). It must accept **others, and return a list with one number for each completion. {hint}"
    ) from error


def raise_if_of_library(error: Exception, recipe: str) -> None:
    """Raises UserError, in one line, if a library raised the error. For errors before or in the first step.

    An error that the recipe's own code or this project's has raised keeps its traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if frame.filename == recipe]
    libraries = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    if own and frames[-1].filename.startswith(libraries):
        place = f"{Path(recipe).name}, line {own[-1]}"
        raise UserError(f"{place}: {kind_and_line(error)} (--debug shows the traceback)") from error


@contextlib.contextmanager
def only_report(what: str) -> Iterator[None]:
    """Prints an error of this block in one line: once the model is saved, nothing makes the run fail. `what`: what is lost.

    For work in which no process waits for another.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        print_once(f"warning: {what} failed, the model is saved: {kind_and_line(error)}")


@contextlib.contextmanager
def only_report_if_all(what: str, group: Any) -> Iterator[None]:
    """As `only_report`, for collective work, if all processes of the `group` fail. If only some do, the others wait for them.

    `group`: of all processes, with a short timeout.
    """
    from harness.run.stopping import all_failed  # here, because a launcher imports this module before torch

    try:
        yield
    except Exception as error:
        if all_failed(group):
            with only_report(what):
                raise
            return
        print(f"warning: {what} failed in process {os.environ['RANK']}, the model is saved; the run ends.", flush=True)
        raise error


def exit_if_out_of_memory(error: Exception, trainer: Any = None) -> None:
    """Exits with a message about memory if `error` is about the memory of the GPU or the host; otherwise returns."""
    text = str(error)
    if not ("out of memory" in text or "can't allocate memory" in text or isinstance(error, MemoryError)):
        return
    process = f"process {os.environ['RANK']}: " if "RANK" in os.environ else ""
    moment = f"at step {trainer.state.global_step}" if trainer is not None else "before the training"
    advice = GPU_ADVICE
    if "CUDA error" in text:  # also of pinned memory, which is the host's
        advice = f"if it is the GPU's, {GPU_ADVICE}; if it is the host's, {HOST_ADVICE}"
    elif "cuda" not in text.lower():
        advice = HOST_ADVICE
    die(f"{process}out of memory {moment}: {last_line(error)}: {advice}", OUT_OF_MEMORY)
