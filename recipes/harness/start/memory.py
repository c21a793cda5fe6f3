"""A process that ran out of memory: one line with the moment, the peak, and the flags that help most."""

import os
import sys
import time
import traceback

from harness.nodes import signals

EXIT_CODE = 12  # ENOMEM
asked = {}  # the arguments of this run, once `parse` knows them: "args", "model", "in_4bit", "sharded"

# A function that an error went through, and what was going on then; the first of them that it did counts.
MOMENTS = {
    "_save_checkpoint": "a checkpoint was saved",
    "evaluate": "the model was evaluated",
    "sample": "the samples were made",
    "save": "the model was saved",
    "compute_loss": "the forward pass ran",
    "backward": "the backward pass ran",
    "step": "the optimizer stepped",
    "_clip_grad_norm": "the gradients were clipped",
    "_inner_training_loop": "a step was prepared",
}


def explain(error: Exception):
    """Ends the process with one line when `error` says that memory ran out; returns when it says something else."""
    if "out of memory" in str(error) or "can't allocate memory" in str(error) or isinstance(error, MemoryError):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(3)  # where all run out, the first one speaks
        if not signals.received:
            print(f"\nerror: {_line(error)}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)  # the others may wait for this one for ever


def _line(error: Exception) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = {frame.f_code.co_name for frame in frames}
    moment = next((words for name, words in MOMENTS.items() if name in names), "the model was loaded")
    trainers = [frame.f_locals.get("self") for frame in frames if hasattr(frame.f_locals.get("self"), "accelerator")]
    done = trainers[0].state.global_step if trainers else 0
    in_step = moment.endswith(("ran", "stepped", "clipped", "prepared"))
    step = f" in step {done + 1}" if trainers and in_step else f" after step {done}" * (done > 0)
    flags = " or ".join(_flags(moment)) or "another config, which shards over more GPUs or offloads"
    return f"{_where(error)} ran out of memory while {moment}{step}. What helps most here: {flags}"


def _where(error: Exception) -> str:
    import torch

    rank = f"process {os.environ['RANK']}: " if "RANK" in os.environ else ""
    if not torch.cuda.is_available() or "can't allocate memory" in str(error) or isinstance(error, MemoryError):
        return f"{rank}the host"
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return f"{rank}the GPU ({total / 1e9:.1f} GB; peak {peak / 1e9:.1f} GB, {reserved / 1e9:.1f} GB reserved)"


def _flags(moment: str) -> list[str]:
    """The two flags that free most at this moment, of those that are not set yet."""
    args, model = asked.get("args"), asked.get("model")
    if args is None:
        return []
    rows, length = args.per_device_train_batch_size, getattr(args, "max_length", None) or 0
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    weights = [f"the config {'4gpu_full_shard' if several else '1x3090_offload'}"] * (not asked["sharded"])
    weights += ["--use_peft --learning_rate 2e-4"] * (not model.use_peft)
    weights += ["--load_in_4bit"] * (model.use_peft and not asked["in_4bit"] and hasattr(args, "model_init_kwargs"))
    activations = ["--activation_checkpointing true"] * (not args.activation_checkpointing)
    activations += [f"--per_device_train_batch_size {rows // 2}"] * (rows > 1)
    shorter = [f"--max_length {length // 2}"] * (length > 256)
    if "evaluated" in moment:
        activations = ["--per_device_eval_batch_size 1"] * (args.per_device_eval_batch_size > 1)
    activations += shorter
    return (activations + weights if "pass" in moment or "evaluated" in moment else weights + activations)[:2]
