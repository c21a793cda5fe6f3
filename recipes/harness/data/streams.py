"""Streams on several processes: none ends before the others, and each resumes at the row where it stopped reading."""

import json
from pathlib import Path

from harness.compat.datasets import complete_stream_state
from harness.compat.transformers import install_batch_skipping, install_train_dataloader
from harness.folder import COMPLETION_MARKER, read_json, step_of
from harness.launched import UserError, print_once

from accelerate import skip_first_batches
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def repeat_stream(trainer: Trainer) -> None:
    """Repeats a training stream from its start when it ends, so that all processes train until the last step.

    Files differ in length: a process that has read its files would save or evaluate while the others still train, and all
    would wait for each other without end. For the same reason a stream for evaluation raises UserError.
    """
    if isinstance(trainer.eval_dataset, IterableDataset) and trainer.args.world_size > 1:
        raise UserError(
            "eval_dataset is a stream, and processes whose files end at different times would wait for each other without end: "
            "hold out a fixed number of rows, Dataset.from_list(list(stream.take(256)))"
        )
    if isinstance(trainer.train_dataset, IterableDataset):
        complete_stream_state()  # before a stream is made whose state is saved
        trainer.train_dataset = trainer.train_dataset.repeat(None)
        trainer.accelerator.dataloader_config.dispatch_batches = False  # every process reads for itself; SFTTrainer sets it too


class StreamPosition(TrainerCallback):
    """Saves each process's position in the training stream in every checkpoint, as stream_N.json, and resumes there.

    transformers reads a stream again from its beginning. It still does so where the position is not known: with
    --dataloader_num_workers, whose processes do not report it, and in a checkpoint of another number of processes.
    """

    def __init__(self, trainer: Trainer, checkpoint: Path | None) -> None:
        self.trainer, self.checkpoint = trainer, checkpoint
        self.processes = trainer.args.world_size
        self.file = f"stream_{trainer.args.process_index}.json"
        self.restored: DataLoader | None = None
        self.position: dict | None = None  # after the batches of the current step, set by `BatchReader`
        self.after_batches: tuple[dict | None, dict | None] = (None, None)  # the current one; accelerate has read one ahead

    def install(self) -> None:
        """To be called before `trainer.train`."""
        install_train_dataloader(self.trainer, self._follow)
        install_batch_skipping(self._skip)

    def _skip(self, loader: DataLoader, count: int) -> DataLoader:
        """A loader without its first `count` batches; one whose stream was restored is there already."""
        return loader if loader is self.restored else skip_first_batches(loader, count)

    def _follow(self, loader: DataLoader) -> None:
        """Restores the position of the loader's stream, and records the position after every batch."""
        stream = getattr(loader.dataset, "dataset", loader.dataset)  # accelerate wraps it where all processes read the same files
        if not isinstance(stream, IterableDataset):
            return
        saved = read_json(self.checkpoint / self.file) if self.checkpoint else {}
        if not loader.num_workers:
            complete_stream_state()
            collate = loader.collate_fn

            def collate_and_record(rows: list[dict]) -> dict:
                self.after_batches = (self.after_batches[1], stream.state_dict())
                return collate(rows)

            loader.base_dataloader.collate_fn = collate_and_record
            if saved.get("processes") == self.processes and _operations(saved["place"]) == _operations(stream.state_dict()):
                stream.load_state_dict(saved["place"])
                self.restored = loader
                return
        if self.checkpoint:
            self._explain_skipping(loader)

    def _explain_skipping(self, loader: DataLoader) -> None:
        """Prints how many rows are trained on twice or never, if the checkpoint was saved by another number of processes."""
        before = read_json(self.checkpoint / COMPLETION_MARKER)["geometry"]
        if before.get("world_size", self.processes) == self.processes:
            return
        steps, args = step_of(self.checkpoint), self.trainer.args
        rows_per_step = before["per_device_train_batch_size"] * before["gradient_accumulation_steps"] * before["world_size"]
        trained = steps * rows_per_step
        skipped = steps * loader.batch_size * args.gradient_accumulation_steps * self.processes
        if skipped == trained:
            outcome = "but not always the same rows, because the files are divided differently"
        elif skipped < trained:
            outcome = f"so at least {trained - skipped:,} are trained on twice"
        else:
            outcome = f"so at least {skipped - trained:,} others are never trained on"
        print_once(
            f"The checkpoint was saved by a run on {before['world_size']} processes, which trained on {trained:,} rows. This run "
            f"on {self.processes} reads the stream from its beginning, which takes time, and skips {skipped:,} rows, {outcome}."
        )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.position is None:
            return
        try:
            text = json.dumps({"processes": self.processes, "place": self.position})
        except TypeError:  # the buffer of a shuffled stream holds rows that JSON cannot represent, such as images
            return
        Path(args.output_dir, f"checkpoint-{state.global_step}", self.file).write_text(text, "utf-8")


def _operations(position: dict) -> list[str]:
    """The names of the operations of a stream (map, shuffle, repeat …), from the last one to the source."""
    rest = _operations(position["examples_iterable"]) if "examples_iterable" in position else []
    return [position.get("type", ""), *rest]
