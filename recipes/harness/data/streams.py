"""Streams: the same rows in every optimizer step on any number of processes, and a resumed run reads on where it stopped.

An optimizer step has `slots` micro-batches on all processes together: global_batch_size / per_device_train_batch_size. Process
`r` of `W` computes the slots `r, r + W, …` in turn, which is its gradient accumulation. A stream is divided into parts, each with
its own blocks, order and packing, and slot `s` reads from part `s % parts`. So the rows of a step depend on the number of
slots, not of processes, and the position of a run is one position per part, which any number of processes can read.

An epoch of data in memory has the same rows on any number of processes too, see `fill_last_step`.
"""

import contextlib
import itertools
import json
import logging
import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.data.stream_rows import MOST_PARTS
from harness.data.turns import IGNORED
from harness.folder import read_json, step_of
from harness.messages import DamagedFile, UserError, print_once

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

PACKED_ROWS = 128  # that a batch of documents fills: packing them separately leaves less than 1 % more of the rows empty
MOST_DOCUMENTS = 1_000  # per batch, as SFTTrainer packs data in memory


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
        trainer.train_dataset = trainer.train_dataset.repeat(None)
        trainer.accelerator.dataloader_config.dispatch_batches = False  # every process reads for itself; SFTTrainer sets it too


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    divisor = max(1, min(number, limit))
    while number % divisor:
        divisor -= 1
    return divisor


def fill_last_step(trainer: Trainer, with_empty_rows: bool = True) -> None:
    """Adds rows to a training set in memory, so that its epochs consist of complete steps.

    accelerate repeats rows so that all processes have as many full micro-batches: how many, and which rows a run sees twice,
    depends on the number of processes. `with_empty_rows`: the added rows have no labels but IGNORED. Where the collator makes the
    labels, they have one token, which has no loss because it follows no other. Otherwise the first rows are repeated: a loss of
    the recipe's own can be a mean over rows, in which one without a token would be NaN.
    """
    rows = trainer.train_dataset
    args = trainer.args
    writes_text = hasattr(trainer.model, "can_generate") and trainer.model.can_generate()
    is_known = isinstance(rows, Dataset) and "input_ids" in rows.column_names and writes_text
    missing = 0
    if is_known and len(rows):
        missing = -len(rows) % (slots_of_step(args) * args.train_batch_size)
    if not missing or args.dataloader_drop_last:
        return
    if not with_empty_rows:
        repeated = rows.select([index % len(rows) for index in range(missing)])
        trainer.train_dataset = concatenate_datasets([rows, repeated])
        return
    row = rows[0]
    tokens = len(row["input_ids"])
    if "labels" in row:
        row["labels"] = [IGNORED] * tokens
    else:
        for name, value in row.items():
            if isinstance(value, list) and len(value) == tokens:
                row[name] = value[:1]
        if "seq_lengths" in row:
            row["seq_lengths"] = [1]
    trainer.train_dataset = concatenate_datasets([rows, Dataset.from_list([row] * missing, features=rows.features)])


def documents_per_batch(stream: IterableDataset, max_length: int, strategy: str) -> int:
    """How many documents of a stream to pack at once, from the lengths of its first ones: about PACKED_ROWS rows.

    `stream`: tokenized, not packed. All processes and all starts of a run get the same number, on which the packed rows depend.
    """
    rows = 0
    tokens = 0
    for row in stream.take(64):
        length = len(row["input_ids"])
        rows += 1
        tokens += min(length, max_length) if strategy == "bfd" else length  # which truncates
    mean = tokens / max(1, rows)
    return min(MOST_DOCUMENTS, math.ceil(PACKED_ROWS * max_length / max(1, mean)))


def slots_of_step(args: TrainingArguments) -> int:
    """The micro-batches of an optimizer step on all processes together."""
    return args.gradient_accumulation_steps * args.world_size


class MicroBatches(torch.utils.data.IterableDataset):
    """The micro-batches of one process, lists of rows, without end.

    The micro-batches of a step, on all processes together, are numbered: each number is a slot. Slot n has rows of the part
    n mod `parts`. A part that several processes need (where there are fewer parts than processes) is read by each of them.
    """

    def __init__(self, stream: IterableDataset, rows: int, slots: int, parts: int, processes: int, process: int) -> None:
        """`rows` per micro-batch; `stream` has no end."""
        self.rows = rows
        self.slots = slots
        self.parts = parts
        self.own_slots = range(process, slots, processes)
        self.streams: dict[int, IterableDataset] = {}
        self.saved_parts = []
        for part in sorted({slot % parts for slot in self.own_slots}):
            self.streams[part] = stream.shard(parts, part)
            # The first slot of a part has the part's number. The process that has this slot saves the position of the part.
            if part in self.own_slots:
                self.saved_parts.append(part)
        self.skipped_steps = 0  # whose rows are read and dropped before the first micro-batch
        self.states: deque[dict[int, dict]] = deque()  # the states of `saved_parts` after every step that was read, by part

    def __iter__(self) -> Iterator[list[dict]]:
        """Also reads the micro-batches of other processes in its parts, all those of a step before it yields the last one."""
        sources = {part: iter(stream) for part, stream in self.streams.items()}
        for step in itertools.count():
            micro_batch = None
            for slot in range(self.slots):
                if slot % self.parts not in sources:
                    continue
                rows = self._read(sources[slot % self.parts])
                if step < self.skipped_steps or slot not in self.own_slots:
                    continue
                if micro_batch is not None:
                    yield micro_batch
                micro_batch = rows
            if micro_batch is not None:
                self.states.append({part: self.streams[part].state_dict() for part in self.saved_parts})
                yield micro_batch

    def _read(self, source: Iterator[dict]) -> list[dict]:
        rows = list(itertools.islice(source, self.rows))
        if len(rows) < self.rows:
            raise UserError(
                f"--dataset_name: the stream is split into {self.parts} shards, and one has no row to train on: pass a larger "
                "--max_samples, or --dataset_streaming false"
            )
        return rows


@dataclass(eq=False)
class StreamPosition(TrainerCallback):
    """Divides the training stream among the processes, and saves its position in every checkpoint, as stream_PART.json.

    transformers and accelerate divide the files among the processes, and read a stream again from its beginning.
    """

    trainer: Trainer
    checkpoint: Path | None  # that the run resumes from
    stream: dict[str, Any] = field(default_factory=dict)  # what another stream has not: its shards and its state at the start
    micro_batches: MicroBatches | None = None  # None for data in memory
    loader: DataLoader | None = None  # of a stream; starts at its position
    # Of the parts that this process saves, after the current step; set by `AgreedReader`.
    states: dict[int, dict] = field(default_factory=dict)

    def divide(self, loader: DataLoader) -> DataLoader:
        """A loader of the micro-batches of this process, for one that reads a stream; any other as it is."""
        stream = self.trainer.train_dataset
        if not isinstance(stream, IterableDataset):
            return loader
        if loader.num_workers:
            print_once(f"--dataloader_num_workers {loader.num_workers} has no effect: a thread reads a stream ahead.")
        self.micro_batches = self._open(stream)
        self.loader = prepare_data_loader(
            DataLoader(self.micro_batches, batch_size=None, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory),
            device=self.trainer.accelerator.device,
            num_processes=1,  # it is divided already
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
            non_blocking=self.trainer.accelerator.non_blocking,
        )
        return self.loader

    def _open(self, stream: IterableDataset) -> MicroBatches:
        """The micro-batches of this process from where the checkpoint was, else from the beginning. Collective with a checkpoint.

        A process needs the positions of its own parts only. A step must read all parts, so it needs as many slots.
        """
        args = self.trainer.args
        slots = slots_of_step(args)
        self.stream = {"shards": stream.num_shards, "start": json.loads(json.dumps(stream.state_dict()))}

        def divided_by(parts: int) -> MicroBatches:
            return MicroBatches(stream, args.train_batch_size, slots, parts, args.world_size, args.process_index)

        parts = largest_divisor(slots, min(stream.num_shards, MOST_PARTS))
        if not self.checkpoint:
            return divided_by(parts)
        saved_parts, states = _read_states(self.checkpoint, self.stream)
        is_complete = 0 < saved_parts <= min(stream.num_shards, slots)
        micro_batches = divided_by(saved_parts if is_complete else parts)
        if all(gather_object([is_complete and micro_batches.streams.keys() <= states.keys()])):
            logging.getLogger("datasets.iterable_dataset").setLevel(logging.ERROR)  # its warning is about buffers of many rows
            for part, of_part in micro_batches.streams.items():
                of_part.load_state_dict(states[part])
            return micro_batches
        micro_batches = divided_by(parts)
        micro_batches.skipped_steps = step_of(self.checkpoint)
        print_once(
            f"warning: {self.checkpoint} does not have the position in this stream, or not for so few micro-batches per step "
            "(--global_batch_size / --per_device_train_batch_size). The stream is read from its beginning, and "
            f"{micro_batches.skipped_steps * slots * args.train_batch_size:,} rows are skipped: not always those that were "
            "trained on. If an earlier version began this run, it may have trained on rows that are held out for evaluation now."
        )
        return micro_batches

    def states_after_next_step(self) -> dict[int, dict]:
        """To be called once for every step that was read: the states after it; {} for data in memory."""
        if self.micro_batches:
            return self.micro_batches.states.popleft()
        return {}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        for part, state_of_part in self.states.items():
            position = {"parts": self.micro_batches.parts, "stream": self.stream, "state": state_of_part}
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", f"stream_{part}.json")
            path.write_text(json.dumps(position), "utf-8")


def _read_states(checkpoint: Path, stream: dict) -> tuple[int, dict[int, dict]]:
    """In how many parts the stream was read, and their states, as far as they are on this disk; (0, {}) for another stream."""
    counts = set()
    states = {}
    for path in checkpoint.glob("stream_*.json"):
        number = re.fullmatch(r"stream_(\d{1,9})\.json", path.name)
        with contextlib.suppress(DamagedFile):  # or one of an earlier version
            position = read_json(path, "parts", "stream", "state")
            if number and position.get("stream") == stream:
                counts.add(position["parts"])
                states[int(number[1])] = position["state"]
    if len(counts) == 1:
        return (counts.pop(), states)
    return (0, {})
