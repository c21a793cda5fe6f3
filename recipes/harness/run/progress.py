"""What is seen while a run trains: a line at every log, and the counters behind it and behind the results."""

import datetime
import os
import time

import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback


class Bars(ProgressCallback):
    """transformers' progress bars, without its dictionary at every log."""

    def on_log(self, args, state, control, **kwargs):
        pass


class Progress(TrainerCallback):
    """Counts tokens and seconds of training, over all parts of a run that was resumed, and prints a line at every log.

    `tokens` go through the model, padding included; `loss_tokens` are those the loss is on. `seconds` are spent in
    optimizer steps and in waiting for their data: no start, no evaluation, no checkpoint.
    """

    def __init__(self, trainer, before: dict):
        self.before = before  # what `so_far` said when the checkpoint was written
        self.tokens, self.loss_tokens, self.seconds = 0, 0, 0.0
        self.clock = None  # when it began to run; None while it stands
        self.first, self.ended = (0, time.monotonic()), None
        self.processes, self.logged, self.left = trainer.args.world_size, (0, 0.0), None
        self.gpus = Gpus()
        self._next, self._log = trainer.get_batch_samples, trainer.log
        trainer.get_batch_samples, trainer.log = self._get_batch_samples, self._complete_log
        trainer.remove_callback(PrinterCallback)
        if trainer.pop_callback(ProgressCallback):
            trainer.add_callback(Bars)

    def _get_batch_samples(self, *args, **kwargs):
        """The batches of an optimizer step; transformers counts the tokens of their loss anyway, over all processes."""
        batches, loss_tokens = self._next(*args, **kwargs)
        self.tokens += sum(batch["input_ids"].numel() for batch in batches)
        self.loss_tokens = self.loss_tokens + (loss_tokens if loss_tokens is not None else 0)
        return batches, loss_tokens

    def on_train_begin(self, args, state, control, **kwargs):
        self.first, self.ended = (state.global_step, time.monotonic()), None

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock = self.clock or time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        self.gpus.look()
        if control.should_log or control.should_evaluate or control.should_save:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the GPU's part of the steps so far belongs to them
            self._stand()
            self.clock = time.monotonic()
        step, began = self.first
        self.left = (time.monotonic() - began) / (state.global_step - step) * (state.max_steps - state.global_step)

    def on_epoch_end(self, args, state, control, **kwargs):
        self._stand()

    def _stand(self):
        if self.clock is not None:
            self.seconds += time.monotonic() - self.clock
        self.clock = None

    def on_evaluate(self, args, state, control, **kwargs):
        self.clock = time.monotonic()

    on_save = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        self.clock, self.ended = None, time.monotonic()

    def _complete_log(self, logs: dict, *args, **kwargs):
        """Adds speed and the node's GPUs to what is logged, for trackers and for the line."""
        if "loss" in logs:
            tokens, seconds = self.logged
            if self.seconds > seconds:
                logs["tokens_per_second"] = round((self.tokens - tokens) * self.processes / (self.seconds - seconds), 1)
            self.logged = self.tokens, self.seconds
            logs |= self.gpus.read()
        self._log(logs, *args, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and (line := line_of(logs or {}, state.global_step, state.max_steps, self.left)):
            tqdm.write(line)

    def so_far(self) -> dict:
        """Tokens over all processes and seconds, of the whole run; `runtime` is all of it, seconds too (collective)."""
        runtime = (self.ended or time.monotonic()) - self.first[1]
        counted = {"tokens": sum(gather_object([self.tokens])), "loss_tokens": int(self.loss_tokens)}
        counted |= {"seconds": self.seconds, "runtime": runtime}
        return {name: round(self.before.get(name, 0) + number, 3) for name, number in counted.items()}


class Gpus:
    """Utilization and used memory of the GPUs that this machine's processes train on, from NVML by way of torch."""

    def __init__(self):
        count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if torch.cuda.is_available() else 0
        self.count = count if os.environ.get("LOCAL_RANK", "0") == "0" else 0  # one process looks for all
        self.looks, self.of_run = [[] for _ in range(self.count)], [[] for _ in range(self.count)]  # (percent, bytes)

    def look(self):
        try:
            for index, looks in enumerate(self.looks):
                looks.append((torch.cuda.utilization(index), torch.cuda.device_memory_used(index)))
        except Exception:  # no NVML on this system, or not for this GPU: no reason to end a run
            self.looks = []

    def read(self) -> dict[str, float]:
        """Percent of the time since the last reading, and GB (1e9 bytes) in use by all programs, of every GPU."""
        found = {}
        for index, looks in enumerate(self.looks):
            if looks:
                self.of_run[index] += looks
                found[f"gpu_{index}_utilization"] = _percent(looks)
                found[f"gpu_{index}_memory_gb"] = _gigabytes(looks)
                looks.clear()
        return found

    def of_the_run(self) -> list[tuple[float, float]]:
        """Percent and most GB of the whole run, of every GPU; empty where nothing was seen."""
        return [(_percent(looks), _gigabytes(looks)) for looks in self.of_run if looks]


def _percent(looks: list) -> float:
    return round(sum(percent for percent, _ in looks) / len(looks), 1)


def _gigabytes(looks: list) -> float:
    return round(max(size for _, size in looks) / 1e9, 2)


def line_of(logs: dict, step: int, steps: int, left: float | None) -> str:
    """What a person reads of a log; '' of one that is for programs only. `left` is in seconds."""
    width = len(f"{steps:,}")
    start = f"step {step:{width},}/{steps:,}"
    if "eval_loss" in logs:
        return f"{start}  held-out loss {logs['eval_loss']:.4f}  in {logs.get('eval_runtime', 0):.0f} s"
    if "loss" not in logs:
        return ""
    parts = [start, f"loss {logs['loss']:7.4f}", f"lr {logs.get('learning_rate', 0):.2e}"]
    if "grad_norm" in logs:
        parts.append(f"grad {logs['grad_norm']:8.3f}")
    parts.append(f"{logs.get('tokens_per_second', 0):9,.0f} tokens/s")
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.max_memory_allocated() / 1e9:5.1f} GB")
    if busy := [f"{value:3.0f}" for name, value in logs.items() if name.endswith("_utilization")]:
        used = [f" {value:.1f}" for name, value in logs.items() if name.endswith("_memory_gb")]
        parts.append(f"GPU{''.join(busy)} %{''.join(used)} GB")
    if left is not None:
        parts.append(f"{datetime.timedelta(seconds=round(left))} left")
    return "  ".join(parts)
