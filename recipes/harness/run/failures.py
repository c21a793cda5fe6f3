"""Known failures of a run, each with one message and an exit code: no memory, no disk space, a lost connection."""

import contextlib
import errno
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from harness import contexts, folder
from harness.launched import DEBUG_VARIABLE, UserError, last_signal, print_once, readable_size
from harness.nodes.network import exit_if_connection_lost

OUT_OF_MEMORY = 12  # exit code (ENOMEM)
HOST_ADVICE = "request more memory (SLURM: --mem), stop other programs, or use a config without fsdp_offload_params"
T = TypeVar("T")

# Functions that an error can pass through, and what the run was doing in them; the first that is found counts.
MOMENTS = {
    "_save_checkpoint": "saving a checkpoint",
    "evaluate": "evaluating",
    "generate_samples": "generating samples",
    "save_model": "saving the model",
    "compute_loss": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer step",
    "_clip_grad_norm": "clipping gradients",
    "_prepare_for_training": "wrapping the model",
    "_inner_training_loop": "preparing the batches",
}
MOMENTS_OF_A_STEP = (
    "in the forward pass",
    "in the backward pass",
    "in the optimizer step",
    "clipping gradients",
    "preparing the batches",
)
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE}
# What torch.save, sharded checkpoints and safetensors raise instead of an OSError.
DISK_MESSAGES = ("PytorchStreamWriter", "inline_container", "unexpected pos", "No space left", "File too large", "I/O error")


@contextlib.contextmanager
def only_report(what: str) -> Iterator[None]:
    """Prints an error of this block in one line: once the model is saved, nothing makes the run fail. `what`: what is lost."""
    try:
        yield
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        reason = (str(error).strip().splitlines() or [""])[-1][:300]
        print_once(f"warning: {what} failed, the model is saved: {type(error).__name__}: {reason}")


def exit_for_known_failure(error: Exception, trainer: Any = None) -> None:
    """Exits with one message if `error` is a known failure; returns if it is not. `trainer` is None before there is one."""
    exit_if_out_of_memory(error)
    if trainer is not None:
        exit_if_disk_failed(error, trainer)
        exit_if_connection_lost(error, trainer.state.global_step, folder.resume_hint(Path(trainer.args.output_dir)))


def exit_if_out_of_memory(error: Exception) -> None:
    """Exits with a message about memory if `error` is about the memory of the GPU or the host; otherwise returns."""
    text = str(error)
    if "out of memory" not in text and "can't allocate memory" not in text and not isinstance(error, MemoryError):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # if all processes run out of memory, the first one prints the message
    if not last_signal():
        print(f"\nerror: {_memory_message(error)}", file=sys.stderr, flush=True)
    os._exit(OUT_OF_MEMORY)  # other processes may never reach the end of a collective


def _memory_message(error: Exception) -> str:
    """The message: which device ran out of memory, what the run was doing, and which flags save most."""
    import torch
    from transformers import Trainer

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    functions = {frame.f_code.co_name for frame in frames}
    moment = next((words for name, words in MOMENTS.items() if name in functions), "loading the model")
    trainer = find_local(error, Trainer)
    if trainer is not None and not hasattr(trainer, "state"):  # its `__init__` has not got that far
        trainer = None
    done = trainer.state.global_step if trainer else 0
    step = ""
    if trainer and moment in MOMENTS_OF_A_STEP:
        step = f" of step {done + 1}"
    elif done:
        step = f" after step {done}"
    process = f"process {os.environ['RANK']}: " if "RANK" in os.environ else ""
    if torch.cuda.is_available() and _is_host_memory(error):
        return f"{process}the host ran out of memory {moment}{step}: {HOST_ADVICE}"
    advice = (
        " or ".join(_flags_that_save_memory(error, trainer, moment)) or "another config, which shards over more GPUs or offloads"
    )
    where = _gpu_memory() if torch.cuda.is_available() else "the host"
    return f"{process}{where} ran out of memory {moment}{step}. What saves most here: {advice}"


def _is_host_memory(error: Exception) -> bool:
    """Whether the host ran out of memory, not the GPU. `error` is from a machine with a GPU.

    Pinned memory is the host's, but CUDA allocates it, and says "CUDA error: out of memory" as for the GPU's. torch raises
    OutOfMemoryError when it allocates memory of the GPU. Only CUDA's own small allocations there, such as kernels, raise what
    pinned memory raises, and they succeed while the GPU has some memory free.
    """
    import torch

    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return True
    is_of_cuda = "CUDA error: out of memory" in str(error) and not isinstance(error, torch.OutOfMemoryError)
    return is_of_cuda and torch.cuda.mem_get_info()[0] > 256e6


def _gpu_memory() -> str:
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return f"the GPU ({total / 1e9:.1f} GB; peak {peak / 1e9:.1f} GB, {reserved / 1e9:.1f} GB reserved)"


def _flags_that_save_memory(error: Exception, trainer: Any, moment: str) -> list[str]:
    """The two flags that save most at this moment, of those that are not set yet."""
    from transformers import TrainingArguments
    from trl import ModelConfig

    args, model_args = find_local(error, TrainingArguments), find_local(error, ModelConfig)
    if trainer is not None:
        args, has_adapter = trainer.args, hasattr(trainer.model, "peft_config")
        is_4bit = bool(getattr(trainer.model, "is_loaded_in_4bit", False))
    elif args is not None and model_args is not None:
        has_adapter = model_args.use_peft
        is_4bit = model_args.load_in_4bit or Path(model_args.model_name_or_path).parent.name.endswith("quantized")
    else:
        return []
    rows, length = args.per_device_train_batch_size, getattr(args, "max_length", None) or 0
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    weights, activations = [], []
    if args.gradient_accumulation_steps > 1 and (context := contexts.current()) and context.config.could_reduce_each_batch:
        weights.append("fsdp_reduce_each_batch: true in a copy of the config")
    if not is_sharded:
        weights.append("the config " + ("4gpu_full_shard" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else "1x3090_offload"))
    if not has_adapter:
        weights.append("--use_peft --learning_rate 2e-4")
    elif not is_4bit and hasattr(args, "model_init_kwargs"):
        weights.append("--load_in_4bit")
    if moment == "evaluating":
        if args.per_device_eval_batch_size > 1:
            activations.append("--per_device_eval_batch_size 1")
    else:
        if not args.activation_checkpointing:
            activations.append("--activation_checkpointing true")
        if rows > 1:
            activations.append(f"--per_device_train_batch_size {rows // 2}")
    if length > 256:
        activations.append(f"--max_length {length // 2}")
    activations_first = moment in ("evaluating", "in the forward pass", "in the backward pass")
    return (activations + weights if activations_first else weights + activations)[:2]


def find_local(error: Exception, kind: type[T]) -> T | None:
    """The first local variable of this type in the frames of an error's traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, kind):
                return value
    return None


def check_metric_is_computed(trainer: Any) -> None:
    """Raises UserError if no evaluation computes `metric_for_best_model`: transformers would only notice when it saves."""
    name = (trainer.args.metric_for_best_model or "").removeprefix("eval_")
    is_own_class = type(trainer).__module__.split(".")[0] not in ("transformers", "trl")  # which may compute other metrics
    if not name or trainer.compute_metrics or is_own_class or trainer.args.eval_strategy == "no":
        return
    labels = [f"{label}_" for label in trainer.eval_dataset] if isinstance(trainer.eval_dataset, dict) else []
    metrics = ("loss", "runtime", "samples_per_second", "steps_per_second")
    known = [f"{label}{metric}" for label in ("", *labels) for metric in metrics]
    if type(trainer).__module__.startswith("trl."):  # SFTTrainer adds metrics without a label
        known += ["mean_token_accuracy", "entropy", "num_tokens", "aux_loss"]
    if name not in known:
        losses = ", ".join(f"eval_{label}loss" for label in ("", *labels))
        raise UserError(f"--metric_for_best_model {trainer.args.metric_for_best_model} is not computed: pass {losses}")


def check_disk_space(trainer: Any, checkpoint: Path | None) -> None:
    """Raises UserError unless the disk has space for two checkpoints, for the best one if it is kept besides, and for the model.

    `checkpoint`: the one that the run resumes from; its size is exact.
    """
    run = Path(trainer.args.output_dir)
    checkpoint_size, model_size = estimated_sizes(trainer)
    if checkpoint:
        checkpoint_size = folder_size(checkpoint)
    wanted = 0
    if trainer.args.save_strategy != "no":
        wanted = 3 if trainer.args.metric_for_best_model else 2
    missing = max(0, wanted - len(folder.checkpoints(run)))
    needed, free = missing * checkpoint_size + model_size, shutil.disk_usage(run).free
    if free < needed:
        raise UserError(
            f"--output_dir: {run} has {readable_size(free)} free, this run needs {readable_size(needed)}: {missing} "
            f"checkpoint{'' if missing == 1 else 's'} of {readable_size(checkpoint_size)} and a model of "
            f"{readable_size(model_size)}. Free some space, or pass a folder on another disk"
        )


def exit_if_disk_failed(error: Exception, trainer: Any) -> None:
    """Exits with one message if the output directory is full, cannot be written or is gone; returns for other errors."""
    from harness.run.marker import is_incomplete

    run = Path(trainer.args.output_dir)
    text = str(error).strip()
    has_disappeared = not (run / folder.RUN).is_file()
    is_disk_error = isinstance(error, OSError) and (error.errno in DISK_ERRORS or Path(str(error.filename)).is_relative_to(run))
    is_disk_message = any(message in text for message in DISK_MESSAGES)
    if not (has_disappeared or is_disk_error or is_disk_message):
        return
    if os.environ.get("LOCAL_RANK", "0") != "0" and not is_disk_error:
        # A sharded checkpoint fails on every process: the first one prints the message. An OSError can be that of one process.
        time.sleep(3)
    if has_disappeared:
        reason = "it has disappeared"
    else:
        newest = folder.newest_complete_checkpoint(run)
        needed = max(estimated_sizes(trainer)[0], folder_size(newest) if newest else 0)
        # The next start deletes incomplete checkpoints.
        incomplete = sum(folder_size(path) for path in folder.checkpoints(run) if is_incomplete(path))
        free = shutil.disk_usage(run).free + incomplete
        reason = text.split("\n")[-1][:200]
        if free < needed:
            reason = f"the disk is full: a checkpoint needs {readable_size(needed)}, {readable_size(needed - free)} are missing"
    _exit(
        f"{run} cannot be written at step {trainer.state.global_step}: {reason}. {folder.resume_hint(run)}", folder.NOT_WRITABLE
    )


def _exit(message: str, code: int) -> NoReturn:
    print(f"\nerror: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # other processes may never reach the end of a collective


def estimated_sizes(trainer: Any) -> tuple[int, int]:
    """Bytes of a checkpoint and of the final model, at least."""
    from transformers import PreTrainedModel

    is_full_model = isinstance(trainer.model, PreTrainedModel)
    saved = [weight for weight in trainer.model.parameters() if weight.requires_grad or is_full_model]
    moments = 2 if "adam" in trainer.args.optim else 0
    checkpoint = 0
    for weight in saved:
        moment_size = 1 if "8bit" in trainer.args.optim else weight.element_size()
        checkpoint += weight.numel() * (weight.element_size() + moments * moment_size * weight.requires_grad)
    return checkpoint, sum(weight.numel() * 2 for weight in saved)


def folder_size(path: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
