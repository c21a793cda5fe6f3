"""Streams: the same rows in every optimizer step on any number of processes, and a resumed run reads on where it stopped.

An optimizer step has `slots` micro-batches on all processes together: global_batch_size / per_device_train_batch_size. Process
`r` of `W` computes the slots `r, r + W, …` in turn, which is its gradient accumulation. A stream is divided into parts, each with
its own files, shuffle buffer and packing, and slot `s` reads from part `s % parts`. So the rows of a step depend on the number of
slots, not of processes, and the position of a run is one position per part, which any number of processes can read.

An epoch of data in memory has the same rows on any number of processes too, see `fill_last_step`.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compat.datasets import WeightedSources, complete_stream_state
from harness.compat.transformers import install_batch_skipping, install_train_dataloader
from harness.folder import read_json, step_of
from harness.launched import UserError, print_once

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

MOST_PARTS = 16  # of a stream: the first step needs a shuffle buffer and a batch of packed documents of each part
PACKED_ROWS = 128  # that a batch of documents fills: packing them separately leaves less than 1 % more of the rows empty
MOST_DOCUMENTS = 1_000  # per batch, as SFTTrainer packs data in memory
PLACE_INTERVAL = 32  # steps: how often a process of --dataloader_num_workers sends its place, with a thousand rows of the buffer
POSITIONS = "positions"  # a key in the last micro-batch of a step, until `StreamPosition.take_from` removes it


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


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(divisor for divisor in range(1, max(1, min(number, limit)) + 1) if number % divisor == 0)


def fill_last_step(trainer: Trainer) -> None:
    """Adds rows without loss to a training set in memory, so that its epochs consist of complete steps.

    accelerate repeats rows so that all processes have as many full micro-batches: how many, and which rows a run sees twice,
    depends on the number of processes. The added rows have no labels but -100. Where the collator makes the labels, they have one
    token, which has no loss because it follows no other.
    """
    rows, args = trainer.train_dataset, trainer.args
    counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None  # else a mean per micro-batch
    is_known = isinstance(rows, Dataset) and "input_ids" in rows.column_names and trainer.model.can_generate()
    if not is_known or not counts_tokens or args.dataloader_drop_last or not len(rows):
        return
    row = rows[0]
    tokens = len(row["input_ids"])
    if "labels" in row:
        row["labels"] = [-100] * tokens
    else:
        row = {name: value[:1] if isinstance(value, list) and len(value) == tokens else value for name, value in row.items()}
        row |= {"seq_lengths": [1]} if "seq_lengths" in row else {}
    missing = -len(rows) % (slots_of_step(args) * args.train_batch_size)
    if missing:
        trainer.train_dataset = concatenate_datasets([rows, Dataset.from_list([row] * missing, features=rows.features)])


def documents_per_batch(stream: IterableDataset, max_length: int, strategy: str) -> int:
    """How many documents of a stream to pack at once, from the lengths of its first ones: about PACKED_ROWS rows.

    `stream`: tokenized, not packed. All processes and all starts of a run get the same number, on which the packed rows depend.
    """
    lengths = [len(row["input_ids"]) for row in stream.take(64)]
    if strategy == "bfd":  # which truncates
        lengths = [min(length, max_length) for length in lengths]
    mean = sum(lengths) / max(1, len(lengths))
    return min(MOST_DOCUMENTS, math.ceil(PACKED_ROWS * max_length / max(1, mean)))


def slots_of_step(args: TrainingArguments) -> int:
    """The micro-batches of an optimizer step on all processes together."""
    return args.gradient_accumulation_steps * args.world_size


@dataclass
class PartPosition:
    """How far a run has read one part of a stream. `of`: the number of parts."""

    of: int
    rows: int = 0  # read by all steps so far, packed ones if rows are packed
    place: dict | None = None  # the state of the stream after `place_rows` rows; None: its beginning
    place_rows: int = 0  # 0 without a place

    def after(self, newer: "PartPosition | None") -> "PartPosition":
        """`newer`, with the place of this one if `newer` has none."""
        if newer is None or newer.place is not None or self.place is None:
            return newer or self
        return PartPosition(newer.of, newer.rows, self.place, self.place_rows)


class MicroBatches(torch.utils.data.IterableDataset):
    """The micro-batches of one process, as `(rows, positions)`, without end.

    The micro-batches of a step, on all processes together, are numbered: each number is a slot. Slot n has rows of the part
    n mod (number of parts).

    `positions` is {} but for the last micro-batch of a step (in each worker of a DataLoader): there it has the positions after
    the step of the parts that this process saves, those whose first slot it has.

    A part that several processes need (where there are fewer parts than processes) is read by each of them.
    """

    def __init__(
        self,
        stream: IterableDataset,
        rows: int,
        slots: int,
        positions: list[PartPosition],
        processes: int,
        process: int,
    ) -> None:
        """`rows` per micro-batch; `positions`: where to start, one per part; `stream` has no end."""
        self.rows, self.slots, self.positions = rows, slots, positions
        self.own_slots = list(range(process, slots, processes))
        parts = sorted({slot % len(positions) for slot in self.own_slots})
        self.parts = {part: stream.shard(len(positions), part) for part in parts}

    def __iter__(self) -> Iterator[tuple[list[dict], dict[int, PartPosition]]]:
        """Yields, for each slot of this process, its rows and, with the last slot of a step, the positions to store."""
        worker = torch.utils.data.get_worker_info()
        own_slots = self.own_slots[worker.id :: worker.num_workers] if worker else self.own_slots
        parts = len(self.positions)
        sources = {part: self._rows_of(part) for part in {slot % parts for slot in own_slots}}
        # The first slot of a part has the part's number. The process that has this slot stores the position of the part.
        stored = [part for part in sources if part in own_slots]
        for step in itertools.count():
            has_place = worker is None or step % PLACE_INTERVAL == 0
            next_slot = {part: part for part in sources}  # of each part, the first slot that was not read yet
            for slot in own_slots:
                part = slot % parts
                self._read(sources[part], (slot - next_slot[part]) // parts)  # skips the slots of other processes
                rows = self._read(sources[part], 1)
                next_slot[part] = slot + parts
                positions = {}
                if slot == own_slots[-1]:
                    for skipped, source in sources.items():  # the rest of the step is for other processes too
                        self._read(source, len(range(next_slot[skipped], self.slots, parts)))
                    positions = {part: self._position_after(step + 1, part, has_place) for part in stored}
                yield rows, positions

    def _position_after(self, steps: int, part: int, has_place: bool) -> PartPosition:
        """The position of a part after `steps` steps, which were read just now."""
        parts = len(self.positions)
        rows = self.positions[part].rows + steps * self.rows * len(range(part, self.slots, parts))
        if not has_place:  # a resumed run reads on to it from an older place, see `PartPosition.after`
            return PartPosition(parts, rows)
        return PartPosition(parts, rows, self.parts[part].state_dict(), rows)

    def _rows_of(self, part: int) -> Iterator[dict]:
        """The rows of a part from its position on.

        The stream's saved state (`place`) can be older than the position: the rows between the two are read and dropped.
        """
        stream, start = self.parts[part], self.positions[part]
        if start.place is not None:
            stream.load_state_dict(start.place)
        # `iter(stream)` would divide the part's files among the workers of a DataLoader.
        rows = ({name: values[0] for name, values in batch.items()} for batch in stream.iter(batch_size=1))
        return itertools.islice(rows, start.rows - start.place_rows, None)

    def _read(self, source: Iterator[dict], micro_batches: int) -> list[dict]:
        rows = list(itertools.islice(source, micro_batches * self.rows))
        if len(rows) < micro_batches * self.rows:
            raise UserError(
                f"--dataset_name: the stream is read in {len(self.positions)} parts, and one of them has no row to train on: "
                "pass a larger --max_samples, or --dataset_streaming false"
            )
        return rows


class StreamPosition(TrainerCallback):
    """Divides the training stream among the processes, and saves its position in every checkpoint, as stream_PART.json.

    transformers and accelerate divide the files among the processes, and read a stream again from its beginning.
    """

    def __init__(self, trainer: Trainer, checkpoint: Path | None) -> None:
        self.trainer, self.checkpoint = trainer, checkpoint
        self.loader: DataLoader | None = None
        self.newest: dict[int, PartPosition] = {}  # of the parts that this process saves, after the step read last
        self.position: dict[int, PartPosition] | None = None  # after the current step, set by `BatchReader`

    def install(self) -> None:
        """To be called before `trainer.train`."""
        install_train_dataloader(self.trainer, self._divide)
        install_batch_skipping(self._skip)

    def _skip(self, loader: DataLoader, count: int) -> DataLoader:
        """A loader without its first `count` batches; a stream starts at its position."""
        return loader if loader is self.loader else skip_first_batches(loader, count)

    def _divide(self, loader: DataLoader) -> DataLoader:
        """A loader of the micro-batches of this process, for one that reads a stream; any other as it is."""
        stream, args = self.trainer.train_dataset, self.trainer.args
        if not isinstance(stream, IterableDataset):
            return loader
        complete_stream_state()
        slots, rows = slots_of_step(args), args.train_batch_size
        positions = self._find_positions(stream, slots, rows)
        dataset = MicroBatches(stream, rows, slots, positions, args.world_size, args.process_index)
        self.newest = {part: positions[part] for part in dataset.parts if part in dataset.own_slots}
        workers = largest_divisor(args.gradient_accumulation_steps, loader.num_workers) if loader.num_workers else 0
        if workers < loader.num_workers:
            print_once(
                f"--dataloader_num_workers {loader.num_workers}: {workers} per process, a divisor of gradient_accumulation_steps "
                f"({args.gradient_accumulation_steps})."
            )
        divided = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_with_positions(loader.collate_fn),
            num_workers=workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor if workers else None,
            persistent_workers=loader.persistent_workers and workers > 0,
            multiprocessing_context=loader.multiprocessing_context if workers else None,
        )
        self.loader = prepare_data_loader(
            divided,
            device=self.trainer.accelerator.device,
            num_processes=1,  # it is divided already
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
            non_blocking=self.trainer.accelerator.non_blocking,
        )
        return self.loader

    def _find_positions(self, stream: IterableDataset, slots: int, rows: int) -> list[PartPosition]:
        """Where to start reading each part: where the checkpoint was, else at the beginning. Collective with a checkpoint.

        Without a shared disk a process sees the files of its own parts only, which are enough.
        """
        args, parts = self.trainer.args, largest_divisor(slots, min(stream.num_shards, MOST_PARTS))
        if not self.checkpoint:
            return [PartPosition(parts)] * parts
        files = {int(path.stem.split("_")[1]): path for path in self.checkpoint.glob("stream_*.json")}
        saved_parts = read_json(files[min(files)]).get("of", 0) if files else 0
        needed = {slot % saved_parts for slot in range(args.process_index, slots, args.world_size)} if saved_parts else set()
        is_found = 0 < saved_parts <= min(stream.num_shards, slots) and needed <= files.keys()
        if all(gather_object([is_found])):
            saved = {part: PartPosition(**read_json(files[part])) for part in needed}
            return [self._position_of(saved.get(part, PartPosition(saved_parts)), stream) for part in range(saved_parts)]
        steps = step_of(self.checkpoint)
        print_once(
            f"warning: {self.checkpoint} does not have the position in this stream, so the stream is read from its beginning, "
            f"and {steps * slots * rows:,} rows are skipped, but not always those that were trained on"
        )
        return [PartPosition(parts, steps * rows * len(range(part, slots, parts))) for part in range(parts)]

    def _position_of(self, saved: PartPosition, stream: IterableDataset) -> PartPosition:
        """A saved position, without its place if the stream now has other operations: then the rows are read again."""
        if saved.place is not None and _operations(saved.place) != _operations(stream.state_dict()):
            return PartPosition(saved.of, saved.rows)
        return saved

    def take_from(self, batches: list[dict]) -> dict[int, PartPosition] | None:
        """Removes the positions from the micro-batches of a step; returns those after the step, None for data in memory."""
        found = {}
        for batch in batches:
            found |= batch.pop(POSITIONS, {})
        self.newest = {part: before.after(found.get(part)) for part, before in self.newest.items()}
        return self.newest or None

    def rows_taken(self) -> list[int] | None:
        """How many rows this process has read of each source of a mixed stream, [] without one, None if it is not known."""
        places = [position.place for position in (self.position or {}).values() if position.place]
        counts = [found for place in places if (found := _taken(place)) != []]
        return None if None in counts else [sum(numbers) for numbers in zip(*counts, strict=True)]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        for part, position in (self.position or {}).items():
            try:
                text = json.dumps(vars(position))
            except TypeError:  # the buffer of a shuffled stream holds rows that JSON cannot represent, such as images
                text = json.dumps(vars(PartPosition(position.of, position.rows)))
            Path(args.output_dir, f"checkpoint-{state.global_step}", f"stream_{part}.json").write_text(text, "utf-8")


def _with_positions(collate: Callable[[list[dict]], dict]) -> Callable[[tuple], dict]:
    def collate_rows(micro_batch: tuple[list[dict], dict[int, PartPosition]]) -> dict[str, Any]:
        rows, positions = micro_batch
        batch = collate(rows)
        if positions:
            batch[POSITIONS] = positions
        return batch

    return collate_rows


def _operations(position: dict) -> list[str]:
    """The names of the operations of a stream (map, shuffle, repeat …), from the last one to the source."""
    sources = [position["examples_iterable"]] if "examples_iterable" in position else position.get("sources", [])
    return [position.get("type", ""), *(name for source in sources for name in _operations(source))]


def _taken(position: dict) -> list[int] | None:
    """The rows read of each source of a mixed stream, from the position of a part; [] without a mixed stream.

    None for a mixed stream with --max_samples that has begun again, and with it the counts.
    """
    if position.get("type") == WeightedSources.__name__:
        return position["taken"]
    found = _taken(position["examples_iterable"]) if "examples_iterable" in position else []
    return None if found and position.get("repeat_index") else found
