"""Changes to datasets."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from harness.compat.guards import changes, expected_names

import numpy
import pyarrow
from datasets import DatasetInfo, Features, IterableDataset
from pyarrow import parquet

with expected_names():
    from datasets.iterable_dataset import (
        ArrowExamplesIterable,
        BufferShuffledExamplesIterable,
        StepExamplesIterable,
        _BaseExamplesIterable,
    )


@changes("datasets.config:SLEEP_TIME_ON_THREADS_SHUTDOWN", "datasets.config:PYARROW_VERSION")
def end_streams_at_once() -> None:
    """Ends a stream that mixes Parquet files without a pause of five seconds.

    datasets sleeps whenever such a stream ends, because older versions of Arrow could hang.
    Upstream: apache/arrow#45214, fixed in Arrow 25 by apache/arrow#49943.
    Checked with: datasets 5.2.0.
    Remove when: datasets sleeps with older versions of Arrow only.
    """
    import datasets

    if datasets.config.PYARROW_VERSION.major > 24:
        datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


@changes(
    "datasets.iterable_dataset:BufferShuffledExamplesIterable._init_state_dict(self)",
    "datasets.iterable_dataset:BufferShuffledExamplesIterable.load_state_dict(self, state_dict)",
    "datasets.iterable_dataset:BufferShuffledExamplesIterable.iter_arrow",
    "datasets.iterable_dataset:BufferShuffledExamplesIterable.__init__(self, ex_iterable, buffer_size, generator)",
    "datasets.iterable_dataset:_BaseExamplesIterable.load_state_dict(self, state_dict)",
    "datasets.iterable_dataset:ArrowExamplesIterable.__init__"
    "(self, generate_tables_fn, kwargs, generate_more_kwargs_fn, sleep_on_threads_shutdown)",
    "datasets.iterable_dataset:ArrowExamplesIterable._iter_arrow(self)",
)
def complete_stream_state() -> None:
    """Makes `state_dict()` of streams exact, and resuming late in a file as fast as resuming early.

    The state of a shuffled stream does not hold the rows in its buffer: a resumed run fills the buffer with other rows. And a
    stream resumes in the middle of a Parquet file by reading the file from its beginning; here it starts at the row group.
    Upstream: huggingface/datasets#7901 with the open pull request #8408; for row groups #5380.
    Checked with: datasets 5.2.0.
    Remove when: these issues are closed.
    """
    shuffle = BufferShuffledExamplesIterable
    shuffle.iter_arrow, shuffle.load_state_dict = None, _BaseExamplesIterable.load_state_dict
    shuffle._init_state_dict, shuffle.__iter__ = _init_shuffle_state, _iterate_shuffled
    for name in ("__iter__", "_iter_arrow"):
        read = getattr(ArrowExamplesIterable, name)
        if read.__module__ != __name__:
            setattr(ArrowExamplesIterable, name, _starting_at_row_group(read))


class _Rows(tuple):
    """The rows in a shuffle buffer. `datasets` copies the whole state for every row it reads; these are never modified."""

    def __deepcopy__(self, memo: dict) -> "_Rows":
        return self


def _init_shuffle_state(self: BufferShuffledExamplesIterable) -> dict:
    """The state of a shuffled stream at its beginning. `_iterate_shuffled` keeps it up to date."""
    self._state_dict = {
        "examples_iterable": self.ex_iterable._init_state_dict(),
        "rows": None,  # the buffer; None while it must be filled
        "random": None,  # the random generator before it drew the order of these rows
        "yielded": 0,  # how many of them were yielded
        "type": type(self).__name__,
    }
    return self._state_dict


def _iterate_shuffled(self: BufferShuffledExamplesIterable) -> Iterator[tuple[str, dict]]:
    """Fills the buffer, yields half of it in random order, and fills it again."""
    state = self._state_dict or {"rows": None, "yielded": 0}
    random, source, rows = copy.deepcopy(self.generator), iter(self.ex_iterable), state["rows"] or ()
    if state["rows"] is not None:
        random.bit_generator.state = state["random"]
    while True:
        if state["rows"] is None:
            new_rows = (row for _, row in itertools.islice(source, self.buffer_size - len(rows)))
            rows = _Rows((*rows, *new_rows))
            state |= {"rows": rows, "random": random.bit_generator.state, "yielded": 0}
        order, is_last = random.permutation(len(rows)), len(rows) < self.buffer_size
        count = len(rows) if is_last else len(rows) - self.buffer_size // 2
        for index in order[state["yielded"] : count]:
            state["yielded"] += 1
            yield "", rows[index]
        if is_last:
            return
        rows, state["rows"] = [rows[index] for index in order[count:]], None


def _starting_at_row_group(read: Callable[[Any], Iterator]) -> Callable[[Any], Iterator]:
    """`read`, which then starts in the row group of a Parquet file where the stream stopped, not at the start of the file."""

    def read_from_row_group(self: ArrowExamplesIterable) -> Iterator:
        position = self._state_dict["shard_example_idx"] if self._state_dict else 0
        if position:
            self, generate, is_first_file = copy.copy(self), self.generate_tables_fn, True

            def generate_tables(**kwargs: Any) -> Iterator[tuple[str, pyarrow.Table]]:
                nonlocal is_first_file
                # Only Parquet files have row groups; a filter would change the number of rows.
                is_parquet = kwargs.get("row_groups_list") == [None]
                if is_first_file and is_parquet and generate.__self__.config.filters is None:
                    groups, skipped = _row_groups_from(kwargs["files"][0], position)
                    if skipped:
                        # `read` counts these rows as read before; it never looks into the table.
                        yield "", pyarrow.table({"skipped": pyarrow.nulls(skipped)})
                        kwargs["row_groups_list"] = [groups]
                is_first_file = False
                yield from generate(**kwargs)

            self.generate_tables_fn = generate_tables
        yield from read(self)

    return read_from_row_group


def _row_groups_from(file: str, row: int) -> tuple[list[int], int]:
    """The row groups of a file from the one with row number `row` on, and the number of rows before them."""
    from datasets.utils.file_utils import xopen

    with xopen(file, "rb") as opened:
        metadata = parquet.read_metadata(opened)
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    starts = [0, *itertools.accumulate(sizes)]
    index = next((index for index in range(len(sizes)) if starts[index + 1] > row), len(sizes))
    # datasets cuts tables by the size of the first row group it reads, so that one must have the size of the file's first.
    while index and (index == len(sizes) or sizes[index] != sizes[0]):
        index -= 1
    return [*range(index, len(sizes))], starts[index]


@changes(
    "datasets.iterable_dataset:_BaseExamplesIterable.load_state_dict(self, state_dict)",
    "datasets.iterable_dataset:_BaseExamplesIterable.shard_data_sources(self, num_shards, index, contiguous)",
    "datasets.iterable_dataset:StepExamplesIterable.__init__(self, ex_iterable, step, offset)",
    "datasets:IterableDataset.__init__(self, ex_iterable, info, split, formatting, distributed, token_per_repo_id)",
)
def mix_streams(streams: list[IterableDataset], weights: list[float], seed: int) -> IterableDataset:
    """A stream without end that takes rows from `streams`, of equal features, in turn, by `weights`, which sum up to 1.

    `interleave_datasets` gives all parts of a stream (`shard`) the same order, so that all micro-batches of a step would have
    rows of the same source at a time; has no more parts than the source with the fewest files; and needs a thread per source
    and part.
    Upstream: no issue found.
    Checked with: datasets 5.2.0.
    Remove when: interleaved streams can be divided into parts with orders of their own.
    """
    sources = [stream.repeat(None) for stream in streams]
    mixed = WeightedSources([source._ex_iterable for source in sources], weights, [seed])
    return IterableDataset(ex_iterable=mixed, info=DatasetInfo(features=streams[0].features))


class WeightedSources(_BaseExamplesIterable):
    """Takes every row from the source that is furthest behind its share. All sources are without end."""

    def __init__(self, ex_iterables: list[_BaseExamplesIterable], weights: list[float], seed: list[int]) -> None:
        super().__init__()
        self.ex_iterables, self.weights, self.seed = ex_iterables, weights, seed

    @property
    def is_typed(self) -> bool:
        return self.ex_iterables[0].is_typed

    @property
    def features(self) -> Features | None:
        return self.ex_iterables[0].features

    @property
    def num_shards(self) -> int:
        return max(source.num_shards for source in self.ex_iterables)

    def _init_state_dict(self) -> dict:
        sources = [source._init_state_dict() for source in self.ex_iterables]
        self._state_dict = {"taken": [0] * len(sources), "sources": sources, "type": type(self).__name__}
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[str, dict]]:
        """Rows of the sources in turn; how many were taken of each is in the state."""
        taken = list(self._state_dict["taken"]) if self._state_dict else [0] * len(self.ex_iterables)
        first = numpy.random.default_rng(self.seed).random(len(taken))  # parts begin with different sources
        iterators = [iter(source) for source in self.ex_iterables]
        while True:
            behind = [weight * (sum(taken) + 1) - count for weight, count in zip(self.weights, taken, strict=True)]
            index = int(numpy.argmax(first + behind))
            row = next(iterators[index], None)
            if row is None:
                return
            taken[index] += 1
            if self._state_dict:
                self._state_dict["taken"][index] += 1
            yield row

    def _with(self, sources: list[_BaseExamplesIterable], seed: list[int]) -> "WeightedSources":
        return WeightedSources(sources, self.weights, seed)

    def shuffle_data_sources(self, generator: numpy.random.Generator) -> "WeightedSources":
        return self._with([source.shuffle_data_sources(generator) for source in self.ex_iterables], self.seed)

    def reshard_data_sources(self) -> "WeightedSources":
        return self._with([source.reshard_data_sources() for source in self.ex_iterables], self.seed)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "WeightedSources":
        """A part of every source: some of its files, or every `num_shards`-th row of one with fewer files than parts."""
        parts = [
            source.shard_data_sources(num_shards, index, contiguous=contiguous)
            if source.num_shards >= num_shards
            else StepExamplesIterable(copy.deepcopy(source), step=num_shards, offset=index)  # each has a position of its own
            for source in self.ex_iterables
        ]
        return self._with(parts, [*self.seed, index])
