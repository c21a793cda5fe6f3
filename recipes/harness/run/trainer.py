"""RunTrainer: what a run overrides in the trainer that a recipe has made, of whatever class."""

import functools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.compat.transformers import TrainerWithHooks, add_overrides
from harness.data.streams import StreamPosition
from harness.folder import step_of
from harness.messages import UserError
from harness.run.batches import AgreedReader
from harness.run.checkpoints import Checkpoints
from harness.run.marker import read_marker
from harness.run.progress import Progress
from harness.run.settings import RunSettings

import torch
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, Trainer


@dataclass
class Parts:
    """What the overrides of `RunTrainer` call. All of them are callbacks too."""

    position: StreamPosition
    reader: AgreedReader
    progress: Progress
    checkpoints: Checkpoints


class RunTrainer(TrainerWithHooks):
    """A trainer with the `parts` of a run."""

    parts: Parts
    is_first_step = True

    def get_train_dataloader(self) -> DataLoader:
        return keep_workers_after_sigterm(self.parts.position.divide(super().get_train_dataloader()))

    def get_eval_dataloader(self, *args: object, **kwargs: object) -> DataLoader:
        return keep_workers_after_sigterm(super().get_eval_dataloader(*args, **kwargs))

    def read_batches(self, iterator: Iterator, count: int) -> list[dict]:
        return self.parts.reader.read(iterator, count)

    def count_step(self, batches: list[dict], loss_tokens: torch.Tensor | None) -> None:
        """Raises UserError, on all processes, if no token of the first step counts in the loss."""
        if self.is_first_step and batches and loss_tokens is not None and not int(loss_tokens):
            raise UserError(
                "no token of the first step counts in the loss: either the answers begin after --max_length tokens, or nothing "
                "is marked as an answer. ./launch.sh --preview shows the rows"
            )
        self.is_first_step = False
        self.parts.progress.count(batches, loss_tokens)

    def log_fields(self, logs: dict) -> dict:
        return self.parts.progress.log_fields(logs)

    def before_checkpoint(self, checkpoint: Path) -> None:
        self.parts.checkpoints.before_save(checkpoint)


def add_parts(
    trainer: Trainer,
    group: ProcessGroup | None,
    checkpoint: Path | None,
    settings: RunSettings,
    original: PreTrainedConfig | None = None,
) -> Parts:
    """Makes a trainer a `RunTrainer` that resumes from `checkpoint`, None for a new run; returns its parts."""
    before = read_marker(checkpoint)["progress"] if checkpoint else {}
    progress, position = Progress(trainer, before), StreamPosition(trainer, checkpoint)
    reader = AgreedReader(trainer, group, position, step_of(checkpoint) if checkpoint else 0)
    trainer.parts = Parts(position, reader, progress, Checkpoints(trainer, progress, settings, original))
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
