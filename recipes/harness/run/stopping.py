"""When a run stops: after a signal or without the Hub, all processes after the same step; on NaN; at its last step."""

import datetime
import itertools
import math
import queue
import signal
import threading
from collections.abc import Iterator

from harness import signals
from harness.compat.huggingface_hub import HubLost
from harness.compat.torch import set_gloo_timeout
from harness.compat.transformers import install_batch_reader
from harness.data.streams import StreamPosition
from harness.launched import UserError, print_once
from harness.run.progress import Progress
from harness.run.sharding import local_tensor

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch.distributed import ProcessGroup
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

READ_AHEAD = 16  # steps of a stream at most; a step of 16,000 tokens has 1 MB


def make_cpu_group(timeout: float) -> ProcessGroup | None:
    """A gloo group of all processes, in which they agree without waiting for a GPU; None for one process.

    `timeout` is the seconds that a process waits for the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "gloo":
        set_gloo_timeout(timeout)
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))


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
        signals.set_handler(signals.record)  # until now a signal ends the process: there is nothing to save

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.signal = maximum(signals.last_signal(), self.group)
        if self.signal and state.global_step < state.max_steps:
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
            control.should_evaluate = False  # there may be little time

    def report_stop(self, trainer: Trainer) -> int:
        """The exit code, after a message, if a signal stopped the run before its last step; else 0."""
        if not self.signal or trainer.state.global_step >= trainer.state.max_steps:
            return 0
        saved = trainer.args.save_strategy != "no"
        hint = "the same command resumes there" if saved else "without a checkpoint"
        print_once(f"\nStopped by {signal.Signals(self.signal).name} at step {trainer.state.global_step}; {hint}.")
        return signals.OUT_OF_TIME if saved and self.signal == signal.SIGUSR1 else 128 + self.signal


class BatchReader(TrainerCallback):
    """Reads the micro-batches of every step: on all processes, or on none if the Hub is lost to one of them.

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
        self.trainer, self.position, self.progress = trainer, position, progress
        self.saved_step = resumed_from  # of the last checkpoint
        self.is_stream = isinstance(trainer.train_dataset, IterableDataset)
        self.group = group if self.is_stream else None
        self.error = ""  # why this process cannot read
        self.is_hub_lost = False  # to any process
        self.is_first_step = True
        self.steps: queue.Queue | None = None  # what `_read_step` returned for the next steps, or an error

    def install(self) -> None:
        install_batch_reader(self.trainer, self._read, self._counted)

    def _read_step(self, iterator: Iterator, count: int) -> tuple[list[dict], dict | None]:
        """The micro-batches of a step, and the position of the stream after them."""
        batches = list(itertools.islice(iterator, count))
        return batches, self.position.take_from(batches)

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

    def _next_step(self, iterator: Iterator, count: int) -> tuple[list[dict], dict | None]:
        if not self.is_stream:
            return self._read_step(iterator, count)
        if self.steps is None:
            state = self.trainer.state
            self.steps = self._read_ahead(iterator, count, state.max_steps - state.global_step)
        step = self.steps.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def _read(self, iterator: Iterator, count: int) -> list[dict]:
        batches, after = [], None
        try:
            batches, after = self._next_step(iterator, count)
        except HubLost as lost:
            self.error = str(lost)
        self.is_hub_lost = bool(maximum(int(bool(self.error)), self.group))
        if self.is_hub_lost:
            args, state, control = self.trainer.args, self.trainer.state, self.trainer.control
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no" and state.global_step > self.saved_step
            return []
        self.position.position = after
        return batches

    def _counted(self, batches: list[dict], loss_tokens: torch.Tensor | int | None) -> None:
        """Counts the step. Raises UserError, on all processes, if no token of the first step counts in the loss."""
        if self.is_first_step and batches and loss_tokens is not None and not int(loss_tokens):
            raise UserError(
                "no token of the first step counts in the loss: either the answers begin after --max_length tokens, or nothing "
                "is marked as an answer. ./launch.sh --preview shows the rows"
            )
        self.is_first_step = False
        self.progress.count(batches, loss_tokens)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.saved_step = state.global_step

    def report_lost_hub(self) -> int:
        """The exit code, after one message from all processes, if the Hub was lost; else 0. Collective."""
        if not self.is_hub_lost:
            return 0
        reason = max(gather_object([self.error]), key=len)
        hint = f"The same command resumes from step {self.saved_step}." if self.saved_step else "There is no checkpoint yet."
        print_once(f"\nStopped at step {self.trainer.state.global_step}: {reason}. {hint}")
        return signals.OUT_OF_TIME


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
        trained = [local_tensor(weight.detach()) for weight in model.parameters() if weight.requires_grad]
        is_finite = all(bool(weight.isfinite().all()) for weight in trained)
        if not all(gather_object([is_finite])):
            self._stop("some trained weights are NaN or infinite", state)

    def _stop(self, problem: str, state: TrainerState) -> None:
        raise RuntimeError(
            f"{problem} at step {state.global_step}: try a lower --learning_rate or a longer --warmup_steps, in a new "
            "--output_dir"
        )
