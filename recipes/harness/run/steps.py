"""The steps of a run: their batches are read, their tokens and seconds counted, one line is printed per log, and they end.

A run ends after a signal or without the Hub (all processes after the same step), on NaN, or at its last step.
"""

import datetime
import itertools
import math
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator

from harness.compat.torch import keep_data_workers_after_sigterm
from harness.compat.transformers import evaluate_step, install_batch_reader, install_log_fields
from harness.data.streams import StreamPosition
from harness.hub import HubLost
from harness.launched import OUT_OF_TIME, UserError, last_signal, print_once, record_signal, set_signal_handler
from harness.run.sharding import local_tensor

import psutil
import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch.distributed import ProcessGroup
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

READ_AHEAD = 16  # steps of a stream at most; a step of 16,000 tokens has 1 MB


class BarWithoutLogs(ProgressCallback):
    """transformers' progress bar. Its `on_log` would print the logs a second time, as a dictionary."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        pass


class Progress(TrainerCallback):
    """Counts tokens and seconds of a run, including its parts before a resume, and prints a line at every log.

    `tokens` go through the model, padding included; `loss_tokens` count in the loss. `seconds` are spent in optimizer steps
    and in waiting for their data, without start, evaluations and checkpoints.
    """

    def __init__(self, trainer: Trainer, before: dict) -> None:
        """`before`: what `so_far` returned when the checkpoint was written, {} for a new run."""
        self.trainer, self.before = trainer, before
        self.tokens, self.loss_tokens, self.seconds = 0, 0, 0.0  # of this start; `before` has those of earlier ones
        self.running_since: float | None = None  # None during evaluations and checkpoints
        self.first_step, self.began, self.ended = 0, time.monotonic(), None  # set by `on_train_begin` and `on_train_end`
        self.steps_began: float | None = None  # when the first step began; `began` is before an evaluation that precedes it
        self.logged_tokens, self.logged_seconds = 0, 0.0  # `tokens` and `seconds` at the last log
        self.seconds_left: float | None = None
        self.gpus = GpuMonitor()

    def install(self) -> None:
        install_log_fields(self.trainer, self._fields)
        self.trainer.remove_callback(PrinterCallback)
        if self.trainer.pop_callback(ProgressCallback):
            self.trainer.add_callback(BarWithoutLogs)

    def count(self, batches: list[dict], loss_tokens: torch.Tensor | int | None) -> None:
        """To be called with the batches of every step, and the tokens in the loss over all processes."""
        self.tokens += sum(batch["input_ids"].numel() for batch in batches)
        self.loss_tokens = self.loss_tokens + (loss_tokens if loss_tokens is not None else 0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.first_step, self.began, self.ended = state.global_step, time.monotonic(), None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.running_since is None:
            self.running_since = time.monotonic()
        if self.steps_began is None:
            self.steps_began = self.running_since

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.gpus.sample()
        self._log_with_checkpoint(args, state, control)
        if control.should_log or control.should_evaluate or control.should_save:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the GPU's work for the steps so far is part of them
            self._pause()
            self.running_since = time.monotonic()
        steps = state.global_step - self.first_step
        self.seconds_left = (time.monotonic() - self.steps_began) / steps * (state.max_steps - state.global_step)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._log_with_checkpoint(args, state, control)
        self._pause()

    def _log_with_checkpoint(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Logs at every checkpoint and at the last step: a logged loss is the mean since the last log, which a resume forgets."""
        if args.logging_strategy != "no" and (control.should_save or state.global_step >= state.max_steps):
            control.should_log = True

    def _pause(self) -> None:
        if self.running_since is not None:
            self.seconds += time.monotonic() - self.running_since
        self.running_since = None

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step > self.first_step:  # not before the first step
            self.running_since = time.monotonic()

    on_save = on_evaluate

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.running_since, self.ended = None, time.monotonic()

    def _fields(self, logs: dict) -> dict[str, float]:
        """Speed, used host memory, this node's GPUs since the last log; in fp16 the gradient scaler's scale."""
        if "loss" not in logs:
            return {}
        scaler = self.trainer.accelerator.scaler
        fields = {"loss_scale": scaler.get_scale()} if scaler else {}
        tokens, seconds = self.tokens - self.logged_tokens, self.seconds - self.logged_seconds
        if seconds > 0:
            fields["tokens_per_second"] = round(tokens * self.trainer.args.world_size / seconds, 1)
        self.logged_tokens, self.logged_seconds = self.tokens, self.seconds
        memory = psutil.virtual_memory()
        fields["host_gb"] = round((memory.total - memory.available) / 1e9, 1)  # of all programs on this node
        return fields | self.gpus.read()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict | None = None,
        **kwargs: object,
    ) -> None:
        line = format_logs(logs or {}, state.global_step, state.max_steps, self.seconds_left)
        if line and state.is_world_process_zero:
            tqdm.write(line)

    def so_far(self) -> dict[str, float]:
        """Tokens on all processes and seconds of the whole run. Collective. `runtime` is in seconds and includes everything."""
        counted = {
            "tokens": sum(gather_object([self.tokens])),
            "loss_tokens": int(self.loss_tokens),
            "seconds": self.seconds,
            "runtime": (self.ended or time.monotonic()) - self.began,
        }
        return {name: round(self.before.get(name, 0) + number, 3) for name, number in counted.items()}


class GpuMonitor:
    """Utilization and used memory of the GPUs of this node, from NVML. The first process of a node samples all of them."""

    def __init__(self) -> None:
        is_monitor = torch.cuda.is_available() and os.environ.get("LOCAL_RANK", "0") == "0"
        count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_monitor else 0
        self.samples: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # (percent, bytes) since the last `read`
        self.all_samples: list[list[tuple[int, int]]] = [[] for _ in range(count)]

    def sample(self) -> None:
        try:
            for index, samples in enumerate(self.samples):
                samples.append((torch.cuda.utilization(index), torch.cuda.device_memory_used(index)))
        except Exception:  # NVML is missing, or does not support this GPU: a run does not need it
            self.samples = []

    def read(self) -> dict[str, float]:
        """Of every GPU the mean utilization in percent and the maximum memory in GB (1e9 bytes) since the last call."""
        found = {}
        for index, samples in enumerate(self.samples):
            if samples:
                self.all_samples[index] += samples
                percent, gigabytes = _summary(samples)
                found |= {f"gpu_{index}_utilization": percent, f"gpu_{index}_memory_gb": gigabytes}
                samples.clear()
        return found

    def whole_run(self) -> list[tuple[float, float]]:
        """Mean percent and maximum GB of every GPU over the whole run, [] without samples."""
        return [_summary(samples) for samples in self.all_samples if samples]


def _summary(samples: list[tuple[int, int]]) -> tuple[float, float]:
    percent = sum(percent for percent, _ in samples) / len(samples)
    return round(percent, 1), round(max(size for _, size in samples) / 1e9, 2)


def evaluation_losses(logs: dict) -> dict[str, float]:
    """The losses of evaluation datasets by label; "" for `eval_loss`. SFTTrainer's `eval_aux_loss` is that of a router."""
    found = {name: re.fullmatch(r"eval_(?:(.+)_)?loss", name) for name in logs if name != "eval_aux_loss"}
    return {match[1] or "": logs[name] for name, match in found.items() if match}


def format_logs(logs: dict, step: int, steps: int, seconds_left: float | None) -> str:
    """The line for a person, "" for logs without a loss."""
    start = f"step {step:{len(f'{steps:,}')},}/{steps:,}"
    if "eval_loss" in logs and "eval_runtime" not in logs:
        return f"{start}  evaluation loss {logs['eval_loss']:.4f}, mean of all datasets"
    for label, loss in evaluation_losses(logs).items():
        dataset, prefix = (f" of {label}", f"{label}_") if label else ("", "")
        return f"{start}  evaluation loss{dataset} {loss:.4f}  in {logs.get(f'eval_{prefix}runtime', 0):.0f} s"
    if "loss" not in logs:
        return ""
    parts = [start, f"loss {logs['loss']:7.4f}", f"lr {logs.get('learning_rate', 0):.2e}"]
    if "grad_norm" in logs:
        parts.append(f"grad {logs['grad_norm']:8.3f}")
    parts.append(f"{logs.get('tokens_per_second', 0):9,.0f} tokens/s")
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.max_memory_allocated() / 1e9:5.1f} GB")
    if "host_gb" in logs:
        parts.append(f"host {logs['host_gb']:.1f} GB")
    percents = [f"{value:3.0f}" for name, value in logs.items() if name.endswith("_utilization")]
    if percents:
        used = [f" {value:.1f}" for name, value in logs.items() if name.endswith("_memory_gb")]
        parts.append(f"GPU{''.join(percents)} %{''.join(used)} GB")
    if seconds_left is not None:
        parts.append(f"{datetime.timedelta(seconds=round(seconds_left))} left")
    return "  ".join(parts)


def make_cpu_group(timeout: float) -> ProcessGroup | None:
    """A gloo group of all processes, in which they agree without waiting for a GPU; None for one process.

    `timeout` is the seconds that a process waits for the others. If the default group is a gloo group, it gets this timeout too:
    transformers passes `ddp_timeout` to NCCL only.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    limit = datetime.timedelta(seconds=timeout)
    if dist.get_backend() == "gloo":
        dist.group.WORLD.set_timeout(limit)
    return dist.new_group(backend="gloo", timeout=limit)


def maximum(number: int, group: ProcessGroup | None) -> int:
    """The maximum of all processes' numbers. Collective."""
    if group is None:
        return number
    tensor = torch.tensor([number])
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor)


class StopAfterSignal(TrainerCallback):
    """Stops all processes after the step in which one of them received SIGTERM or SIGUSR1, with a checkpoint."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.signal = 0  # the one that all processes agreed on

    def install(self) -> None:
        set_signal_handler(record_signal)  # until now a signal ends the process: there is nothing to save
        keep_data_workers_after_sigterm()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.signal = maximum(last_signal(), self.group)
        if self.signal and state.global_step < state.max_steps:
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
            control.should_evaluate = False  # there may be little time; see MissedEvaluation

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """transformers ends the epoch when the run stops, and a strategy "epoch" would evaluate, and save again."""
        if self.signal and state.global_step < state.max_steps:
            control.should_save = control.should_evaluate = False

    def report_stop(self, trainer: Trainer) -> int:
        """The exit code, after a message, if a signal stopped the run before its last step; else 0."""
        if not self.signal or trainer.state.global_step >= trainer.state.max_steps:
            return 0
        saved = trainer.args.save_strategy != "no"
        hint = "the same command resumes there" if saved else "without a checkpoint"
        print_once(f"\nStopped by {signal.Signals(self.signal).name} at step {trainer.state.global_step}; {hint}.")
        return OUT_OF_TIME if saved and self.signal == signal.SIGUSR1 else 128 + self.signal


class MissedEvaluation(TrainerCallback):
    """After a resume, makes the evaluation that StopAfterSignal left out at the step of the checkpoint.

    Without it, random numbers, a scheduler that depends on the loss, and the best checkpoint would be others than those of an
    uninterrupted run.
    """

    def __init__(self, trainer: Trainer, resumed_from: int) -> None:
        self.trainer, self.resumed_from = trainer, resumed_from

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Not earlier: the state of the random numbers is loaded just before the first step."""
        if not self.resumed_from or state.global_step != self.resumed_from:
            return
        entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
        if any(name.startswith("eval_") for entry in entries for name in entry):
            return
        if args.eval_strategy == "steps":
            is_due = state.global_step % state.eval_steps == 0 and state.global_step >= args.eval_delay
        else:
            is_due = args.eval_strategy == "epoch" and state.epoch == int(state.epoch) and state.epoch >= args.eval_delay
        if is_due:
            evaluate_step(self.trainer)


class BatchReader(TrainerCallback):
    """Reads the micro-batches of every step: on all processes, or on none if one of them cannot read a stream any further.

    A stream is read ahead, in a thread, so that no GPU waits for the tokenizer: packing takes many documents at once.
    """

    def __init__(
        self,
        trainer: Trainer,
        group: ProcessGroup | None,
        position: StreamPosition,
        progress: Progress,
        resumed_from: int,
    ) -> None:
        self.trainer, self.stream_position, self.progress = trainer, position, progress
        self.saved_step = resumed_from  # of the last checkpoint
        self.is_stream = isinstance(trainer.train_dataset, IterableDataset)
        self.group = group if self.is_stream else None
        self.error = ""  # why this process cannot read
        self.exit_code = 0  # of the run, if one of the processes cannot read
        self.is_first_step = True
        self.steps: queue.Queue | None = None  # what `_read_step` returned for the next steps, or an error

    def install(self) -> None:
        install_batch_reader(self.trainer, self._read_on_all_processes, self._count_step)

    def _read_step(self, iterator: Iterator, count: int) -> tuple[list[dict], dict]:
        """The micro-batches of a step, and the states of a stream after them."""
        batches = list(itertools.islice(iterator, count))
        return batches, self.stream_position.states_after_next_step()

    def _read_ahead(self, iterator: Iterator, count: int, steps: int) -> queue.Queue:
        """Calls `_read_step` for all steps in a thread, which does not keep the process from exiting."""
        read_steps = queue.Queue(READ_AHEAD)

        def read() -> None:
            try:
                for _ in range(steps):
                    read_steps.put(self._read_step(iterator, count))
            except BaseException as error:
                read_steps.put(error)

        threading.Thread(target=read, name="read ahead", daemon=True).start()
        return read_steps

    def _next_step(self, iterator: Iterator, count: int) -> tuple[list[dict], dict]:
        """What `_read_step` returns for the next step. A thread reads the steps of a stream ahead; its errors are raised here."""
        if not self.is_stream:
            return self._read_step(iterator, count)
        if self.steps is None:
            state = self.trainer.state
            self.steps = self._read_ahead(iterator, count, state.max_steps - state.global_step)
        step = self.steps.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def _read_on_all_processes(self, iterator: Iterator, count: int) -> list[dict]:
        """The micro-batches of the next step. Collective, see `install_batch_reader`.

        If one process lost the Hub or met a row of a stream that it cannot read, all of them get [] and stop training, with a
        checkpoint if there is progress to save.
        """
        batches, states, code = [], {}, 0
        try:
            batches, states = self._next_step(iterator, count)
        except (HubLost, UserError) as error:
            if not self.is_stream:
                raise
            self.error, code = str(error), OUT_OF_TIME if isinstance(error, HubLost) else 2
        self.exit_code = maximum(code, self.group)
        if self.exit_code:
            self.trainer.control.should_training_stop = self.trainer.control.should_log = True
            self.on_epoch_end(self.trainer.args, self.trainer.state, self.trainer.control)
            return []
        self.stream_position.states = states
        return batches

    def _count_step(self, batches: list[dict], loss_tokens: torch.Tensor | int | None) -> None:
        """Adds the step to the progress. Raises UserError, on all processes, if no token of the first step counts in the loss."""
        if self.is_first_step and batches and loss_tokens is not None and not int(loss_tokens):
            raise UserError(
                "no token of the first step counts in the loss: either the answers begin after --max_length tokens, or nothing "
                "is marked as an answer. ./launch.sh --preview shows the rows"
            )
        self.is_first_step = False
        self.progress.count(batches, loss_tokens)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.saved_step = state.global_step

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """transformers ends the epoch when the run stops. Then nothing is evaluated, and saved only what is not saved yet."""
        if self.exit_code:
            control.should_evaluate = False
            control.should_save = args.save_strategy != "no" and state.global_step > self.saved_step

    def report_stop(self) -> int:
        """The exit code, after one message from all processes, if one of them could not read; else 0. Collective."""
        if not self.exit_code:
            return 0
        reason = max(gather_object([self.error]), key=len)
        hint = "There is no checkpoint yet"
        if self.saved_step:  # a file that was mended has changed, so the same command would be refused
            resumes = self.exit_code == OUT_OF_TIME
            hint = f"The same command resumes from step {self.saved_step}" if resumes else f"Step {self.saved_step} is saved"
        kind = "" if self.exit_code == OUT_OF_TIME else "error: "
        print_once(f"\n{kind}Stopped at step {self.trainer.state.global_step}: {reason}. {hint}.")
        return self.exit_code


class LastStepReached(Exception):
    """The checkpoint that a run resumes from is its last step."""


class StopAtLastStep(TrainerCallback):
    """transformers checks whether it is done only after a step, so a run killed after its last step would train one more."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step >= state.max_steps:
            raise LastStepReached


class StopOnNan(TrainerCallback):
    """Ends a run whose loss or weights are NaN or infinite, before the checkpoint gets its completion marker."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict | None = None,
        **kwargs: object,
    ) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            self._stop(f"the loss is {loss}", state)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        """Stops the run, on all processes, if a trained weight is NaN or infinite."""
        trained = [local_tensor(weight.detach()) for weight in model.parameters() if weight.requires_grad]
        is_finite = all(bool(weight.isfinite().all()) for weight in trained)
        if not all(gather_object([is_finite])):
            self._stop("some trained weights are NaN or infinite", state)

    def _stop(self, problem: str, state: TrainerState) -> None:
        raise RuntimeError(
            f"{problem} at step {state.global_step}: try a lower --learning_rate or a longer --warmup_steps, in a new "
            "--output_dir"
        )
