"""Where a run stops: after a signal (all processes after the same step), on NaN, or at its last step; what processes agree on."""

import datetime
import math
import signal
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from harness.launched import OUT_OF_TIME, last_signal
from harness.messages import UserError, print_once
from harness.run.metrics import logged_by_evaluations
from harness.run.sharding import local_tensor

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed import ProcessGroup
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def make_cpu_group(timeout: float) -> ProcessGroup | None:
    """A gloo group of all processes, in which they agree without waiting for a GPU; None for one process.

    `timeout` is the seconds that a process waits for the others.
    """
    if PartialState().num_processes == 1:
        return None
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))


def maximum(number: int, group: ProcessGroup | None) -> int:
    """The maximum of all processes' numbers. Collective."""
    if group is None:
        return number
    tensor = torch.tensor([number])
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor)


def all_failed(group: ProcessGroup | None) -> bool:
    """Whether all processes have failed. Only those call this that have; False if the others do not in time."""
    try:
        maximum(1, group)
        return True
    except RuntimeError:
        return False


class StoppedInEvaluation(Exception):
    """A process received a signal during an evaluation, which all processes have left."""


@dataclass(eq=False)
class StopAfterSignal(TrainerCallback):
    """Stops all processes after the step or the evaluation batch in which one of them received a signal, with a checkpoint."""

    trainer: Any  # a `RunTrainer`
    group: ProcessGroup | None
    signal: int = 0  # the one that all processes agreed on
    is_in_evaluation: bool = False  # it ended an evaluation, which the resumed run makes

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.signal = maximum(last_signal(), self.group)
        if self.signal and state.global_step < state.max_steps:
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
            control.should_evaluate = False  # there may be little time; see MissedEvaluation

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """transformers ends the epoch when the run stops, and a strategy "epoch" would evaluate, and save again."""
        if self.signal and (state.global_step < state.max_steps or self.is_in_evaluation):
            control.should_save = control.should_evaluate = False

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """An evaluation can take longer than there is time; `RunTrainer` catches what this raises."""
        if not self.trainer.may_leave_evaluation:  # such as one of a recipe's callback, or after the training
            return
        self.signal = maximum(last_signal(), self.group)
        if self.signal:
            self.is_in_evaluation = True
            raise StoppedInEvaluation

    def report_stop(self) -> int:
        """The exit code, after a message, if a signal stopped the run before its end; else 0."""
        state = self.trainer.state
        if not self.signal or (state.global_step >= state.max_steps and not self.is_in_evaluation):
            return 0
        saved = self.trainer.args.save_strategy != "no"
        hint = "the same command resumes there" if saved and state.global_step else "the same command starts again"
        print_once(f"\nStopped by {signal.Signals(self.signal).name} at step {state.global_step}; {hint}.")
        if saved and self.signal == signal.SIGUSR1:
            return OUT_OF_TIME
        return 128 + self.signal


@dataclass(eq=False)
class MissedEvaluation(TrainerCallback):
    """After a resume, makes the evaluation that StopAfterSignal left out at the step of the checkpoint.

    Without it, random numbers, a scheduler that depends on the loss, and the best checkpoint would be others than those of an
    uninterrupted run.
    """

    trainer: Any  # a `RunTrainer`

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """After the last step, no other step begins."""
        if state.global_step >= state.max_steps:
            self.on_step_begin(args, state, control)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Not earlier: the state of the random numbers is loaded just before the first step."""
        resumed_from = self.trainer.parts.resumed_from
        if not resumed_from or state.global_step != resumed_from:
            return
        if logged_by_evaluations(state.log_history, state.global_step):
            return
        if args.eval_strategy == "steps":
            is_due = state.global_step % state.eval_steps == 0 and state.global_step >= args.eval_delay
        else:
            is_due = args.eval_strategy == "epoch" and state.epoch == int(state.epoch) and state.epoch >= args.eval_delay
        if is_due:
            self.trainer.evaluate_step()
            if control.should_training_stop:  # of an EarlyStoppingCallback; transformers reads it only after another step
                raise LastStepReached


class LastStepReached(Exception):
    """The checkpoint that a run resumes from is its last step."""


class StopAtLastStep(TrainerCallback):
    """transformers checks whether it is done only after a step, so a run killed after its last step would train one more."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step >= state.max_steps:
            raise LastStepReached


class StopOnNan(TrainerCallback):
    """Ends a run whose loss or weights are NaN or infinite, before the checkpoint gets its completion marker."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs: object) -> None:
        loss = logs.get("loss", 0.0)
        if not math.isfinite(loss):
            self._stop(f"the loss is {loss}", state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **kwargs: object
    ) -> None:
        """Stops the run, on all processes, if a trained weight is NaN or infinite."""
        is_finite = all(map(math.isfinite, sums_of_trained(model)))
        if not all(gather_object([is_finite])):
            self._stop("some trained weights are NaN or infinite", state)

    def _stop(self, problem: str, state: TrainerState) -> None:
        raise UserError(
            f"{problem} at step {state.global_step}: try a lower --learning_rate or a longer --warmup_steps, in a new "
            "--output_dir"
        )


class StopIfUnchanged(TrainerCallback):
    """Ends a run, before its model is saved, if no trained weight has another value than at the start: it has taught nothing.

    Not a resumed run, whose last steps can be too small to change a weight.
    """

    first: list[float] | None = None  # the sums of the weights at the start

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **kwargs: object
    ) -> None:
        if not state.global_step:
            self.first = sums_of_trained(model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **kwargs: object
    ) -> None:
        """At the last step, before the best checkpoint is loaded."""
        if self.first is None or state.global_step < state.max_steps:
            return
        if not any(gather_object([sums_of_trained(model) != self.first])):
            raise UserError(
                "no trained weight has changed: the learning rate was 0 in each step (--learning_rate, --warmup_steps), each "
                "step overflowed in fp16, or the optimizer has other weights than the model"
            )


def sums_of_trained(model: torch.nn.Module) -> list[float]:
    """The sum of each trained weight, of this process's part of it."""
    trained = filter(attrgetter("requires_grad"), model.parameters())
    return [float(local_tensor(weight.detach()).sum(dtype=torch.float64)) for weight in trained]
