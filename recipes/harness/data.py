"""The data of a run, in the shapes people have: where it lies, what its rows are, what is held out of them."""

import glob
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path

from harness import hub, shapes
from harness.launched import fail, say

import datasets
import numpy as np
import trl
from datasets import Dataset, IterableDataset, load_dataset
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE

FILES_AT_ONCE, BUFFER = 4, 1_000  # of a stream: how many files its rows come from in turn, how many of these are shuffled
FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt")

if datasets.config.PYARROW_VERSION.major > 24:
    # Without it a stream that mixes Parquet files sleeps five seconds whenever it is left, for a crash of older versions of
    # Arrow (apache/arrow issue 45214).
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


@dataclass
class DataArguments(trl.ScriptArguments):
    """TRL's ScriptArguments and the budgets that Hugging Face's own scripts add to them."""

    max_tokens: int | None = field(
        default=None, metadata={"help": "Train on this many tokens; sets max_steps. Meant for packed data."}
    )
    max_samples: int | None = field(default=None, metadata={"help": "Train on this many documents at most."})
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows an optimizer step trains on, over all processes; sets gradient_accumulation_steps."},
    )
    max_eval_samples: int = field(default=256, metadata={"help": "Documents held out for evaluation, never trained on."})
    profile: bool = field(default=False, metadata={"help": "Show what some steps in the middle spend their time on."})

    # No flags: `parse` knows them.
    takes = ()  # the shapes a recipe takes, the one it likes best first; () for rows as they are
    named = ""  # what the person calls the data set, where a stand-in takes its place
    given = frozenset()  # names of the arguments that a person gave
    text_field, seed = "text", 0

    def load(self, keep=None) -> tuple[Dataset | IterableDataset, Dataset]:
        """Rows to train on and rows to evaluate on, in the first shape of `takes` that they have.

        They are `{text_field: str}`, `{"messages": [{"role", "content"}, …]}`, `{"prompt", "completion"}` (texts, or lists of
        messages) or `{"instruction", "input", "output"}`; without `takes`, whatever they are. Rows without a text or an answer
        are left out, and so are those of which `keep(row)`, when it is given, says no.

        Of a split for evaluation the first `max_eval_samples` rows are taken. Where there is none, as many are held out of
        the training split, a tenth of it at most; what they say is not trained on, wherever it comes again.
        """
        splits = self.splits(self.dataset_streaming)
        train, test = splits[self.dataset_train_split], splits.get(self.dataset_test_split)
        shape, columns, _ = self._shape(train)
        settings = {"shape": shape, "text_field": self.text_field}
        train, test = (rows.filter(keep) if keep and rows is not None else rows for rows in (train, test))
        if test is None:
            train, held_out = (_hold_out_of_stream if self.dataset_streaming else _hold_out)(train, self.max_eval_samples)
        else:
            held_out = list(test.take(self.max_eval_samples))
        held_out = [shapes.convert(row, **settings) for row in held_out if shapes.convert(row, **settings)]
        if test is None:
            say(
                f"{self.named} has no split {self.dataset_test_split}: {len(held_out)} rows of {self.dataset_train_split} are "
                "held out for evaluation, never trained on."
            )
        but = {str(row) for row in held_out} if test is None else set()
        train = train.filter(_is_wanted, fn_kwargs=settings | {"but": but})
        if not list(train.take(1)):
            fail(f"no row of {self.named} is left to train on: they have no text or answer, or say what is held out")
        if self.max_samples and not self.dataset_streaming:
            train = train.take(self.max_samples)
        train = train.map(shapes.convert, fn_kwargs=settings, remove_columns=columns)
        if self.dataset_streaming:
            train = train.shuffle(self.seed, buffer_size=BUFFER, max_buffer_input_shards=FILES_AT_ONCE)
            train = train.take(self.max_samples) if self.max_samples else train
        return train, Dataset.from_list(held_out)

    def check(self) -> list[dict]:
        """The first rows to train on. Ends the process with one line unless every split that will be used is there, with rows
        that the recipe takes."""
        for name in ("max_samples", "max_eval_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                fail(f"--{name} is {getattr(self, name)}, expected 1 or more")
        is_here = self.path().exists()
        if HF_HUB_OFFLINE and self.dataset_streaming and not is_here:
            return []  # only `datasets` knows what its cache holds
        splits = self.splits(streaming=is_here or not HF_HUB_OFFLINE)
        there = f"{self.named} has the split{'s' * (len(splits) > 1)} {', '.join(splits)}"
        if self.dataset_train_split not in splits:
            fail(f"{there}, none called {self.dataset_train_split}: choose one with --dataset_train_split")
        if self.dataset_test_split not in splits and "dataset_test_split" in self.given:
            fail(f"{there}, none called {self.dataset_test_split}: without --dataset_test_split some rows are held out")
        if self.dataset_test_split == self.dataset_train_split:
            fail(f"{self.dataset_train_split} would be trained on and evaluated: choose another --dataset_test_split")
        if self.dataset_test_split in splits:
            self._shape(splits[self.dataset_test_split])
        return self._shape(splits[self.dataset_train_split])[2]

    def splits(self, streaming: bool) -> dict:
        """All splits of the data set: of an id of the hub, a folder, or one file. Ends the process when it cannot be opened."""
        path = self.path()
        if not path.exists() and (self.dataset_name[:1] in ("/", ".", "~") or path.suffix in FILES):
            fail(f"there is no file or folder {self.dataset_name}")
        if self.dataset_config and path.is_file():
            fail(
                f"--dataset_config {self.dataset_config} chooses among those of a folder or of the hub; {self.named} is one file"
            )
        with hub.errors("data set", self.named):
            if path.is_file():
                getLogger("huggingface_hub.repocard").setLevel(ERROR)  # a README beside the file says nothing of it
                return load_dataset(str(path.parent), data_files=glob.escape(path.name), streaming=streaming)
            if not path.exists() and not HF_HUB_OFFLINE:
                HfApi().dataset_info(self.dataset_name)  # says at once what is unknown, or that nobody answers
            return load_dataset(str(path) if path.exists() else self.dataset_name, self.dataset_config, streaming=streaming)

    def path(self) -> Path:
        return Path(self.dataset_name).expanduser().absolute()

    def _shape(self, rows) -> tuple[str, list[str], list[dict]]:
        """The shape that the first rows have, of those the recipe takes, the names of their columns, and the rows in it."""
        with hub.errors("data set", self.named):
            first = list(rows.take(20))
        if not first:
            fail(f"data set {self.named} has no rows in {rows.split}")
        for shape in self.takes:
            if fitting := [new for row in first if (new := shapes.convert(row, shape, self.text_field))]:
                return shape, list(first[0]), fitting
        if self.takes:
            wanted = " or ".join(shapes.SHAPES[shape][1] for shape in self.takes)
            fail(f"data set {self.named} {shapes.lacks(first, self.takes, self.text_field)}; this recipe takes {wanted}")
        return "", [], first


def _is_wanted(row: dict, shape: str, text_field: str, but: set[str]) -> bool:
    row = shapes.convert(row, shape, text_field)
    return row is not None and str(row) not in but


def _hold_out(rows: Dataset, count: int) -> tuple[Dataset, list[dict]]:
    parts = rows.train_test_split(test_size=_at_most_a_tenth(len(rows), count), seed=0)
    return parts["train"], list(parts["test"])


def _hold_out_of_stream(rows: IterableDataset, count: int) -> tuple[IterableDataset, list[dict]]:
    """Takes the first rows of the last part of the last file, which is furthest from what is read first.

    Parquet has parts, row groups. Where there is one file of one part, all rows are neighbours, and a tenth may be held out.
    """
    last = rows.shard(rows.num_shards, rows.num_shards - 1).reshard()
    parts = last.num_shards
    last = last.shard(parts, parts - 1)
    if rows.num_shards * parts > 1:
        return rows, list(last.take(count))
    some = list(last.take(10 * count))
    order = np.random.default_rng(0).permutation(len(some))
    return rows, [some[index] for index in order[: _at_most_a_tenth(len(some), count)]]


def _at_most_a_tenth(rows: int, count: int) -> int:
    if rows < 2:
        fail("a data set of one row leaves nothing to evaluate on: name a split with --dataset_test_split")
    return min(count, max(1, rows // 10))
