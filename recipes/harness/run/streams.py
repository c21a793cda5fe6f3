"""Streams under several processes: none may run out before the others, and each goes on where it stopped reading."""

import json
from pathlib import Path

from harness.folder import read_json
from harness.launched import fail, say
from harness.nodes.signals import OUT_OF_TIME
from harness.patience import Lost
from harness.run import stream_state

import torch
import torch.distributed as dist
import transformers
from accelerate import skip_first_batches
from accelerate.utils import gather_object
from datasets import IterableDataset
from transformers import TrainerCallback


def keep_together(trainer):
    """Begins a training stream anew where it ends, so that all processes go on to the last step.

    Files differ in length: a process whose files are read would save or evaluate while the others still train, and all
    would wait for each other for ever. Ends the process with one line when a stream is to be evaluated, which must end.
    """
    if isinstance(trainer.eval_dataset, IterableDataset) and trainer.args.world_size > 1:
        fail(
            "eval_dataset is a stream, and processes whose files end at different times would wait for each other for ever: "
            "hold out a fixed number of rows, Dataset.from_list(list(stream.take(256)))"
        )
    if isinstance(trainer.train_dataset, IterableDataset):
        trainer.train_dataset = trainer.train_dataset.repeat(None)
        trainer.accelerator.dataloader_config.dispatch_batches = False  # each process reads for itself, also of a plain Trainer


class Place(TrainerCallback):
    """Keeps where each process is in a stream of `datasets`, in every checkpoint, and goes on there.

    When the hub is lost to one process, all stop before the same step, after a checkpoint.

    transformers would read the stream again from its beginning, and does so where the place is not known: with
    --dataloader_num_workers, whose processes do not tell it, and where a checkpoint is another number of processes'.
    """

    def __init__(self, trainer, checkpoint: Path | None, group=None):
        """`group` is one of all processes on the CPU, None for a process that is alone."""
        self.trainer, self.checkpoint, self.group, self.loader = trainer, checkpoint, group, None
        self.place, self.saved_at = None, int(checkpoint.name.split("-")[1]) if checkpoint else 0
        self.is_lost, self.reason = False, ""  # the hub, to any process; to this one
        self.places = (None, None)  # after the batch that trains, after the one that accelerate has read ahead
        self._file, self._processes = f"stream_{trainer.args.process_index}.json", trainer.args.world_size
        self._make, self._next = trainer.get_train_dataloader, trainer.get_batch_samples
        if isinstance(trainer.train_dataset, IterableDataset):
            trainer.get_batch_samples = self._get_batch_samples
        trainer.get_train_dataloader = self._get_train_dataloader
        transformers.trainer.skip_first_batches = self._skip_first_batches

    def _get_train_dataloader(self):
        loader = self._make()
        stream = getattr(loader.dataset, "dataset", loader.dataset)  # below accelerate's, where all read the same files
        if isinstance(stream, IterableDataset) and not loader.num_workers:
            stream_state.complete()
            collate, saved = loader.collate_fn, self._saved(self._file)

            def collate_and_look(rows):
                self.places = (self.places[1], stream.state_dict())
                return collate(rows)

            loader.base_dataloader.collate_fn = collate_and_look
            if saved.get("processes") == self._processes and _steps(saved["place"]) == _steps(stream.state_dict()):
                stream.load_state_dict(saved["place"])
                self.loader = loader
        return loader

    def _saved(self, file: str) -> dict:
        return read_json(self.checkpoint / file) if self.checkpoint else {}

    def _get_batch_samples(self, *arguments):
        """The batches of a step, on all processes or on none: then the run stops before it."""
        batches = [], None
        try:
            batches = self._next(*arguments)
        except Lost as lost:
            self.reason = str(lost)
        is_lost = torch.tensor(int(bool(self.reason)))
        if self.group:
            dist.all_reduce(is_lost, dist.ReduceOp.MAX, group=self.group)
        self.is_lost = bool(is_lost)
        if not self.is_lost:
            self.place = self.places[0]
            return batches
        args, state, control = self.trainer.args, self.trainer.state, self.trainer.control
        control.should_training_stop = control.should_log = True
        control.should_save = args.save_strategy != "no" and state.global_step > self.saved_at
        return [], None

    def leave(self):
        """Ends the process, after one line of them all, when the hub was lost."""
        if self.is_lost:
            reason = max(gather_object([self.reason]), key=len)
            going_on = f"The same command goes on from step {self.saved_at}." if self.saved_at else "There is no checkpoint yet."
            say(f"\nStopped at step {self.trainer.state.global_step}: {reason}. {going_on}")
            self.trainer.end()
            raise SystemExit(OUT_OF_TIME)

    def _skip_first_batches(self, loader, batches: int):
        if loader is self.loader:
            return loader  # it begins where it should
        self._explain(loader, batches)
        return skip_first_batches(loader, batches)

    def _explain(self, loader, batches: int):
        """Says what another number of processes reads twice or not at all."""
        before, now = self._saved("stream_0.json").get("processes", 0), self._processes
        if before not in (0, now):
            seen, passed = (batches * loader.batch_size * processes for processes in (before, now))
            outcome = "reads {:,} of these or more a second time" if passed < seen else "leaves out {:,} others or more"
            say(
                f"The stream's place is that of {before} processes, which have trained on {seen:,} rows. Each of these {now} "
                f"passes over the first {passed // now:,} rows of its own share, {passed:,} in all; the run "
                f"{outcome.format(abs(seen - passed))}. Reading up to there takes time."
            )

    def on_save(self, args, state, control, **kwargs):
        self.saved_at = state.global_step
        if self.place:
            try:
                place = json.dumps({"processes": self._processes, "place": self.place})
            except TypeError:  # a shuffled stream of what JSON cannot hold, pictures for one
                return
            Path(args.output_dir, f"checkpoint-{state.global_step}", self._file).write_text(place, "utf-8")


def _steps(place: dict) -> list[str]:
    """What is done to a row on its way through the stream, by the names of `datasets`."""
    return [place.get("type", ""), *(_steps(place["examples_iterable"]) if "examples_iterable" in place else [])]
