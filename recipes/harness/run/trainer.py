"""RunTrainer: what a run overrides in the trainer that a recipe has made, of whatever class."""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compat.transformers import TrainerWithHooks, add_overrides
from harness.compat.trl import logged_metrics
from harness.data.streams import StreamPosition
from harness.folder import step_of
from harness.messages import UserError
from harness.run.batches import AgreedReader
from harness.run.checkpoints import Checkpoints
from harness.run.evaluation import Means, read_equally
from harness.run.generation import order_by_epoch, writes_answers
from harness.run.losses import Loss, changed, check_unit
from harness.run.marker import read_marker
from harness.run.parameters import count_parameters
from harness.run.progress import Progress
from harness.run.schedule import fit_schedule
from harness.run.sharding import HiddenBuffers, show_saved_buffers
from harness.run.stopping import StopAfterSignal, StoppedInEvaluation
from harness.run.weights import load_converted

import torch
from torch.distributed import ProcessGroup
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, Trainer
from transformers.trainer_utils import EvalLoopOutput
from trl import DistillationConfig


@dataclass
class Parts:
    """What a run adds to a trainer, and what is known only before the model is sharded."""

    checkpoint: Path | None  # that the run resumes from
    position: StreamPosition
    reader: AgreedReader
    progress: Progress
    checkpoints: Checkpoints
    stop: StopAfterSignal
    loss: Loss
    hidden: HiddenBuffers
    parameters: tuple[int, int]  # how many are trained, and how many there are

    @property
    def resumed_from(self) -> int:
        """The step of the checkpoint."""
        if self.checkpoint:
            return step_of(self.checkpoint)
        return 0


class RunTrainer(TrainerWithHooks):
    """A trainer with the `parts` of a run."""

    parts: Parts
    is_first_step = True
    means: Means | None = None  # of the evaluation that is going on

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        if writes_answers(self):
            order_by_epoch(loader)
        return keep_workers_after_sigterm(self.parts.position.divide(loader))

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        fit_schedule(self.args, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_eval_dataloader(self, *args: object, **kwargs: object) -> DataLoader:
        loader = super().get_eval_dataloader(*args, **kwargs)
        # Of several answers to a prompt TRL's loader keeps the groups together.
        is_of_transformers = getattr(super().get_eval_dataloader, "__func__", None) is Trainer.get_eval_dataloader
        has_single_rows = getattr(self.args, "num_generations_eval", 0) == 1 or isinstance(self.args, DistillationConfig)
        return keep_workers_after_sigterm(read_equally(self, loader) if is_of_transformers or has_single_rows else loader)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple:
        """The loss of a micro-batch as its share of the step's loss, in an evaluation the mean of the batch; see `Loss`."""
        loss = self.parts.loss
        options = {"return_outputs": True} if return_outputs else {}
        if loss.is_right:
            # DistillationTrainer calls a part of the model, around which accelerate has put no autocast.
            is_partial = isinstance(self.args, DistillationConfig)
            with self.accelerator.autocast() if is_partial else contextlib.nullcontext():
                return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **options)
        labels = loss.labels(inputs)  # before the loss takes them out
        tokens = loss.tokens(inputs)
        is_empty = tokens is not None and not int(tokens)
        check_unit(self, loss, tokens)
        if is_empty:  # a mean over no token is NaN, and FSDP needs all processes to compute
            inputs = inputs | {name: inputs[name].clamp(min=0) for name in ("labels", "shift_labels") if name in inputs}
        count = labels.ne(-100).sum().clamp(min=1) if loss.own and labels is not None else None
        # Otherwise transformers multiplies it by the number of processes, and passes the number to the model.
        with changed(self.args, "average_tokens_across_devices", False), changed(self, "model_accepts_loss_kwargs", False):
            found = super().compute_loss(model, inputs, num_items_in_batch=count, **options)
        value, *outputs = found if return_outputs else [found]
        if is_empty:
            value = value * 0
        elif self.model.training:
            value = loss.share_of_step(self, value, tokens, num_items_in_batch)
        if return_outputs:
            return (value, *outputs)
        return value

    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **options: Any
    ) -> EvalLoopOutput:
        """transformers logs the mean of the means of batches, and counts the rows that complete the last batch."""
        self.means = Means(self, dataloader)
        # The loss of a router depends on which rows are in a batch together.
        with changed(self, "gather_function", self.means.gather), changed(self, "aux_loss_enabled", False):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **options)
        loss = self.means.finish()
        self.means = None
        if f"{metric_key_prefix}_loss" in output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def prediction_step(self, model: torch.nn.Module, inputs: dict, *args: object, **kwargs: object) -> tuple:
        sizes = self.means.sizes(inputs)  # before the loss takes the labels out
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        self.means.add(sizes, loss)
        return loss, logits, labels

    def see_inputs(self, inputs: Any) -> None:
        if self.means is not None and isinstance(self.args, DistillationConfig):
            self.means.answer_tokens = inputs["completion_mask"].sum()

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list[dict], Any]:
        """transformers lets an exception of the data loader end one process, while the others wait for its number of tokens.

        Raises UserError, on all processes, if no token of the first step counts in the loss.
        """
        batches = self.parts.reader.read(epoch_iterator, num_batches)  # none on one process: none on all of them
        loss_tokens = self._get_num_items_in_batch(batches, device)  # gathered from all processes
        if self.is_first_step and batches and loss_tokens is not None and not int(loss_tokens):
            raise UserError(
                "no token of the first step counts in the loss: either the answers begin after --max_length tokens, or nothing "
                "is marked as an answer. ./launch.sh --preview shows the rows"
            )
        self.is_first_step = False
        self.parts.progress.count(batches, loss_tokens)
        if loss_tokens is not None:
            loss_tokens = loss_tokens.clamp(min=1)  # of a step without any: its loss is 0, and 0 / 0 would be NaN
        return batches, loss_tokens

    def log(self, logs: dict, *args: Any, **kwargs: Any) -> None:
        """A callback gets the logs after the state, and after the trackers, which were added first."""
        # Not a copy: the best checkpoint may be chosen by what SFTTrainer adds to it.
        logs.update(self.parts.progress.log_fields(logs))
        super().log(logs, *args, **kwargs)

    def evaluate_unless_stopped(self, evaluate: Callable, restore_random_numbers: Callable) -> dict[str, float] | None:
        """Leaves the evaluation after a signal, with a checkpoint as if it had not begun: the resumed run makes it.

        Raises StoppedInEvaluation if there is nothing to save: before the first step of this start.
        """
        self.is_evaluation_left = True
        logged = len(self.state.log_history)  # several evaluation datasets log one after the other
        try:
            return evaluate()
        except StoppedInEvaluation:
            self.means = None
            if self.state.global_step == self.parts.reader.saved_step:
                raise
            del self.state.log_history[logged:]
            logged_metrics(self).get("eval", {}).clear()  # of its batches, which TRL would log at the end of the run
            restore_random_numbers()
            self.control.should_training_stop = True
            self.control.should_save = self.args.save_strategy != "no"
            return None
        finally:
            self.is_evaluation_left = False

    def load_weights(self, checkpoint: Path) -> bool:
        show_saved_buffers(self.parts.hidden)
        return load_converted(self.model, checkpoint)

    def before_checkpoint(self, checkpoint: Path) -> None:
        self.parts.checkpoints.before_save(checkpoint)


def add_parts(
    trainer: Trainer,
    group: ProcessGroup | None,
    checkpoint: Path | None,
    original: PreTrainedConfig | None = None,
    loss: Loss | None = None,
    hidden: HiddenBuffers | None = None,
) -> Parts:
    """Makes a trainer a `RunTrainer` that resumes from `checkpoint`, None for a new run; returns its parts."""
    progress = Progress(trainer, read_marker(checkpoint)["progress"] if checkpoint else {})
    position = StreamPosition(trainer, checkpoint)
    trainer.parts = Parts(
        checkpoint,
        position,
        AgreedReader(trainer, group, position),
        progress,
        Checkpoints(trainer, progress, original),
        StopAfterSignal(trainer, group),
        loss or Loss(),
        hidden or [],
        count_parameters(trainer.model),
    )
    trainer.parts.reader.saved_step = trainer.parts.resumed_from
    add_overrides(trainer, RunTrainer)
    return trainer.parts


def keep_workers_after_sigterm(loader: DataLoader) -> DataLoader:
    """Makes the workers of a loader ignore SIGTERM. They still exit with the process that started them.

    A worker exits when it gets SIGTERM, and then torch raises RuntimeError in the training process, at any line. So a SIGTERM to
    a whole process group would end a run before it can write its checkpoint.
    """
    base = getattr(loader, "base_dataloader", loader)  # accelerate's loader contains torch's
    base.worker_init_fn = functools.partial(_ignore_sigterm, base.worker_init_fn)
    return loader


def _ignore_sigterm(initialize: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if initialize:
        initialize(worker)
