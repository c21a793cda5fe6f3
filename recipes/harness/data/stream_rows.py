"""Streams of rows: Parquet files in blocks, rows shuffled and mixed by weight. Their `state_dict` is exact and holds no rows."""

import functools
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness.hub import temporary_failure
from harness.messages import HubLost, UserError

import numpy
import xxhash
from datasets import DatasetInfo, Features, IterableDataset, NamedSplit, concatenate_datasets, config, interleave_datasets
from fsspec.core import url_to_fs
from huggingface_hub.utils import httpx
from pyarrow import ArrowException, RecordBatch, Schema, parquet, unify_schemas

MOST_PARTS = 16  # of a stream: the first step needs a batch of packed documents of each part
# A resumed run reads the current blocks again: fewer blocks are larger. More blocks open files and read footers more often.
BLOCKS_PER_FILE = 128
MOST_BLOCKS = 2**16
# Of so many files at most, spread over all, the footers are read at the start: for the columns, and so that no block is empty.
# With more files every part has some rows anyway.
FEW_FILES = 128
ROWS_AT_ONCE = 256  # rows of a Parquet file in memory as Python objects
BLOCKS_AT_ONCE = 4  # of a part: its rows come from so many blocks or files in turn
SHUFFLE_BUFFER = 1_000  # rows that are shuffled together, in all parts
SMALLEST_BUFFER = 250  # in one part
MOST_ROWS_OF_CYCLE = 1_000  # see `rows_of_cycle`

Block = tuple[str, int, int]  # a file, the number of the block, and how many blocks the file has


def open_parquet(files: list[str], split: str = "train", info: DatasetInfo | None = None) -> IterableDataset:
    """A stream of the rows of Parquet files, paths or URLs (hf://…). Rows without a column of other files have null there.

    Of more than FEW_FILES the columns are those of every second (third …) file, and of `info`.

    Its shards are blocks: each has some row groups of a file, so that a resumed run does not read a file from its beginning.
    `info`: of the dataset, with its features if they are known.
    """
    with ThreadPoolExecutor(16) as pool:
        some = files[:: math.ceil(len(files) / FEW_FILES)]
        footers = dict(zip(some, pool.map(_read_footer, some), strict=True))
    schemas = [schema for _, schema in footers.values()]
    if info and info.features:
        schemas.insert(0, info.features.arrow_schema)
    features = features_of_files(schemas)
    most = max(1, min(BLOCKS_PER_FILE, MOST_BLOCKS // len(files)))
    blocks: list[Block] = []
    for file in files:
        groups, _ = footers.get(file, (most, None))
        count = max(1, min(most, groups))
        for number in range(count):
            blocks.append((file, number, count))
    stream = IterableDataset.from_generator(
        read_blocks, features=features, gen_kwargs={"blocks": blocks}, split=NamedSplit(str(split))
    )
    stream.info.splits = info and info.splits
    return stream


def features_of_files(schemas: Iterable[Schema]) -> Features:
    """The columns of all files. A file can lack some of them, or have only nulls or whole numbers in one."""
    return Features.from_arrow_schema(unify_schemas(list(schemas), promote_options="permissive"))


def _open(file: str) -> Any:
    """A file, for a reader that asks for large ranges itself."""
    files, path = url_to_fs(file)
    return files.open(path, "rb", cache_type="none")


@functools.cache
def _read_footer(file: str) -> tuple[int, Schema]:
    """How many row groups a file has, and its columns."""
    with _open(file) as opened:
        metadata = parquet.read_metadata(opened)
    return metadata.num_row_groups, metadata.schema.to_arrow_schema()


def read_blocks(blocks: list[Block]) -> Iterator[dict[str, Any]]:
    """The rows of blocks of Parquet files. Raises UserError for a file that cannot be read.

    If the Hub fails longer than huggingface_hub waits (about 23 seconds), the block is opened again, as often and after as many
    seconds as `datasets` does with files of other formats. Then HubLost is raised: the run stops with a checkpoint.
    """
    for block in blocks:
        given = 0  # batches of the block
        failures = 0  # since the last batch
        while True:
            try:
                for batch in itertools.islice(_batches(*block), given, None):
                    given += 1
                    failures = 0
                    yield from batch.to_pylist()
                break
            except (ArrowException, OSError, httpx.HTTPError) as error:
                reason = temporary_failure(error)
                if not reason:
                    raise UserError(f"{block[0]} cannot be read: {error}: download or write it again, or leave it out") from error
                failures += 1
                if failures > config.STREAMING_READ_MAX_RETRIES:
                    raise HubLost(f"the Hub does not answer: {reason}") from error
                print(f"Waiting for the Hub ({reason}): try {failures} of {config.STREAMING_READ_MAX_RETRIES}.", flush=True)
                time.sleep(config.STREAMING_READ_RETRY_INTERVAL)


def _batches(file: str, number: int, of: int) -> Iterator[RecordBatch]:
    """The rows of a block."""
    count, _ = _read_footer(file)
    groups = list(range(count * number // of, count * (number + 1) // of))
    if groups:
        with _open(file) as opened:
            table = parquet.ParquetFile(opened, pre_buffer=True)
            for group in groups:
                yield from table.iter_batches(ROWS_AT_ONCE, row_groups=[group])


def shuffle(rows: IterableDataset, seed: int) -> IterableDataset:
    """Rows from BLOCKS_AT_ONCE blocks (or files) in turn, which come in random order, and shuffled again among the next ones.

    A buffer of `IterableDataset.shuffle` would be lost at a resume; a batch of `map` is read and shuffled again.
    """
    size = max(SMALLEST_BUFFER, SHUFFLE_BUFFER // rows.num_shards)
    in_turn = rows.shuffle(seed, buffer_size=1, max_buffer_input_shards=BLOCKS_AT_ONCE)
    return in_turn.map(_permute, batched=True, batch_size=size, features=rows.features, fn_kwargs={"seed": seed})


def _permute(rows: dict[str, list], seed: int) -> dict[str, list]:
    """Rows in an order that depends on the seed and the first row: all parts of a stream have the same seed."""
    first = json.dumps([values[0] for values in rows.values()], default=lambda value: type(value).__name__)
    generator = numpy.random.default_rng([seed, xxhash.xxh3_64_intdigest(first.encode())])
    order = generator.permutation(len(next(iter(rows.values()))))
    return {name: [values[index] for index in order] for name, values in rows.items()}


def mix_streams(streams: list[IterableDataset], weights: list[float], seed: int) -> IterableDataset:
    """A stream without end of the rows of `streams`, of equal features, by `weights`, which sum up to 1.

    A cycle has a fixed number of rows of each stream, in random order. A stream that ends starts again. Every part has rows of
    all streams.
    """
    parts = min(MOST_PARTS, max(stream.num_shards for stream in streams))
    counts = rows_of_cycle(weights)
    batches = [_divide(stream, parts).repeat(None).batch(count) for stream, count in zip(streams, counts, strict=True)]
    settings = {"fn_kwargs": {"seed": seed}, "features": streams[0].features}
    return interleave_datasets(batches).map(_join, batched=True, batch_size=len(streams), **settings)


def _divide(stream: IterableDataset, parts: int) -> IterableDataset:
    """A stream that can be read in so many parts. If it has fewer files, part n has every row with a number n modulo `parts`."""
    if stream.num_shards >= parts:
        return stream
    of_parts = [{"part": part, "parts": parts} for part in range(parts)]
    return concatenate_datasets([stream.filter(_is_of_part, with_indices=True, fn_kwargs=of_part) for of_part in of_parts])


def _is_of_part(row: dict, index: int, part: int, parts: int) -> bool:
    return index % parts == part


def _join(batches: dict[str, list[list]], seed: int) -> dict[str, list]:
    return _permute({name: list(itertools.chain(*lists)) for name, lists in batches.items()}, seed)


def rows_of_cycle(weights: list[float]) -> list[int]:
    """How many rows of each stream a cycle of a mixture has: the smallest numbers that are the weights to within 0.5 %."""
    for size in range(len(weights), MOST_ROWS_OF_CYCLE):
        counts = [round(size * weight) for weight in weights]
        if all(abs(count - size * weight) <= 0.005 * size * weight for count, weight in zip(counts, weights, strict=True)):
            return counts
    return [max(1, round(MOST_ROWS_OF_CYCLE * weight)) for weight in weights]
