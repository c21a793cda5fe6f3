"""Streams on several processes: none ends before the others, and each resumes at the row where it stopped reading."""

import itertools
import json
import random
import sys
from types import SimpleNamespace

from harness.data import stream_rows, streams
from harness.data.stream_rows import open_parquet, shuffle
from harness.data.streams import StreamPosition, fill_last_step, repeat_stream

import pyarrow
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from conftest import ROOT
from datasets import Dataset, load_dataset
from pyarrow import parquet
from runs import begin_at, history, losses, read
from torch.utils.data import DataLoader, RandomSampler
from trl import pack_dataset

RECIPE = "qwen2_fineweb_edu"


def test_stream_is_repeated(build_trainer):
    """Processes read files of different length; each has rows as long as the others need."""
    trainer = build_trainer(RECIPE, "--max_length", "4096")
    repeat_stream(trainer)
    rows = sum(1 for _, _ in zip(trainer.train_dataset, range(90), strict=False))
    assert rows == 90  # the tiny dataset fills about forty rows of this length


def test_stream_as_eval_dataset_is_refused(error_of):
    stream = Dataset.from_list([{"text": "a"}]).to_iterable_dataset()
    trainer = SimpleNamespace(train_dataset=stream, eval_dataset=stream, args=SimpleNamespace(world_size=2))
    assert "Dataset.from_list" in error_of(repeat_stream, trainer)


FILES = (37, 21, 25)  # documents in each; a row group has 8


@pytest.fixture(scope="module", params=["parquet", "json"])
def documents(request, tmp_path_factory):
    """A function that opens a stream of three files: documents of 1 to 60 numbers. Those of Parquet files have 12 blocks."""
    folder, generator = tmp_path_factory.mktemp(request.param), random.Random(0)
    for file, rows in enumerate(FILES):
        rows = [
            {"id": 100 * file + row, "input_ids": [generator.randrange(99) for _ in range(row % 60 + 1)]} for row in range(rows)
        ]
        if request.param == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{file}.parquet", row_group_size=8)
        else:
            (folder / f"{file}.json").write_text("\n".join(map(json.dumps, rows)))
    if request.param == "parquet":
        return lambda: open_parquet(sorted(map(str, folder.iterdir())))
    return lambda: load_dataset(request.param, data_files=f"{folder}/*", split="train", streaming=True)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """A part has several of them."""
    monkeypatch.setattr(stream_rows, "SMALLEST_BUFFER", 10)
    monkeypatch.setattr(stream_rows, "SHUFFLE_BUFFER", 10)


def packed(documents, is_shuffled):
    stream = documents().filter(lambda row: row["id"] != 3)
    stream = shuffle(stream, 1) if is_shuffled else stream
    stream = stream.map(lambda row: {"labels": row["input_ids"]}, remove_columns="id")
    return pack_dataset(stream, 64, "bfd_split", {"batch_size": 7}).repeat(None)


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
def test_stream_resumes_at_any_row(documents, is_shuffled):
    """Between the rows of a packed batch, in the middle of a buffer, at the ends of files and of the stream."""
    stream, rows, positions = packed(documents, is_shuffled), [], []
    for row in itertools.islice(stream, 110):  # the files fill about forty such rows
        rows.append(row)
        positions.append(json.dumps(stream.state_dict()))
    assert rows[40:80] != rows[:40]
    for number in range(0, 100, 7):
        again = packed(documents, is_shuffled)
        again.load_state_dict(json.loads(positions[number]))
        assert list(itertools.islice(again, 9)) == rows[number + 1 : number + 10], number


SLOTS, ROWS = 8, 2  # micro-batches per step, rows in each; Parquet files are read in eight parts, others in two


def open_batches(stream, folder, processes, rank, checkpoint):
    """The micro-batches of one process, and what follows their position."""
    loader = DataLoader(stream, batch_size=ROWS, collate_fn=lambda rows: {"rows": rows})
    args = SimpleNamespace(process_index=rank, world_size=processes, gradient_accumulation_steps=SLOTS // processes)
    args.train_batch_size, args.output_dir = ROWS, folder
    accelerator = SimpleNamespace(device=torch.device("cpu"), non_blocking=False)
    trainer = SimpleNamespace(args=args, train_dataset=stream, accelerator=accelerator)
    position = StreamPosition(trainer, checkpoint)
    return iter(position.divide(loader)), position


def read_steps(stream, folder, processes, steps, from_step=0):
    """The rows of `steps` optimizer steps, read by `processes` from a checkpoint on; then writes a checkpoint."""
    checkpoint = folder / f"checkpoint-{from_step}" if from_step else None
    found = [[None] * SLOTS for _ in range(steps)]
    for rank in range(processes):
        batches, position = open_batches(stream(), folder, processes, rank, checkpoint)
        for step in range(steps):
            of_step = list(itertools.islice(batches, SLOTS // processes))
            position.states = position.states_after_next_step()
            found[step][rank::processes] = [batch["rows"] for batch in of_step]
        (folder / f"checkpoint-{from_step + steps}").mkdir(parents=True, exist_ok=True)
        position.on_save(position.trainer.args, SimpleNamespace(global_step=from_step + steps), None)
    return found


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "rows"])
def test_rows_do_not_depend_on_the_number_of_processes(documents, tmp_path, is_packed):
    """A run on one process, and one that continues on 4, 1, 8 and 2: the same rows in every micro-batch."""

    def stream():
        if is_packed:
            return packed(documents, True)
        return shuffle(documents(), 1).repeat(None)

    expected, found = read_steps(stream, tmp_path / "uninterrupted", 1, 5), []
    for processes, steps in ((4, 1), (1, 2), (8, 1), (2, 1)):
        found += read_steps(stream, tmp_path / "run", processes, steps, from_step=len(found))
    assert found == expected
    if not is_packed:  # every part has more rows than it reads in a step, and in three steps where there are two parts
        steps = 3 if documents().num_shards == 3 else 1
        ids = [row["id"] for step in found[:steps] for batch in step for row in batch]
        assert len(ids) == len(set(ids)) == steps * SLOTS * ROWS


def read_epoch(rows, processes_of_steps, workers):
    """The rows of every step of an epoch in memory, each step on its own number of processes, as accelerate divides them."""
    found = []
    for step, processes in enumerate(processes_of_steps):
        of_step = []
        for rank in range(processes):
            sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(1))
            loader = DataLoader(rows, ROWS, sampler=sampler, collate_fn=list, num_workers=workers)
            divided = prepare_data_loader(loader, num_processes=processes, process_index=rank)
            accumulation = SLOTS // processes
            of_step += itertools.islice(skip_first_batches(divided, step * accumulation), accumulation)
        found.append([row for batch in of_step for row in batch])
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "rows"])
def test_epoch_in_memory_has_every_row_once(is_packed, workers):
    """Also its last step, on one process, and on 4, 1 and 2 in turns. The packed rows have no labels, as in gpt2_xl_wikitext."""
    rows = Dataset.from_list([{"input_ids": [number] * 3, "labels": [number] * 3} for number in range(37)])
    rows = pack_dataset(rows.select_columns("input_ids"), 3, "bfd") if is_packed else rows
    args = SimpleNamespace(world_size=1, gradient_accumulation_steps=SLOTS, train_batch_size=ROWS, dataloader_drop_last=False)
    trainer = SimpleNamespace(train_dataset=rows, args=args, model=SimpleNamespace(can_generate=lambda: True))
    fill_last_step(trainer)
    expected = {"input_ids": [0], "seq_lengths": [1]} if is_packed else {"input_ids": [0] * 3, "labels": [-100] * 3}
    for processes_of_steps in ((1, 1, 1), (4, 1, 2)):
        steps = read_epoch(trainer.train_dataset, processes_of_steps, workers)
        assert [len(step) for step in steps] == [SLOTS * ROWS] * 3
        read = [row for step in steps for row in step]
        assert sorted(row["input_ids"][0] for row in read if row != expected) == list(range(37))


def test_process_reads_the_positions_of_its_parts_only(documents, tmp_path):
    """Two machines without a shared disk: the second one has the file of its part."""

    def stream():
        return packed(documents, True)

    expected = read_steps(stream, tmp_path / "uninterrupted", 1, 3)
    read_steps(stream, tmp_path, 2, 2)
    (tmp_path / "checkpoint-2/stream_0.json").unlink()
    batches, _ = open_batches(stream(), tmp_path, 2, 1, tmp_path / "checkpoint-2")
    assert [batch["rows"] for batch in itertools.islice(batches, SLOTS // 2)] == expected[2][1::2]


def test_position_that_is_missing(documents, tmp_path, capsys):
    """The stream is read again, and rows are skipped; a message says so."""

    def stream():
        return packed(documents, True)

    expected = read_steps(stream, tmp_path / "uninterrupted", 1, 3)
    (tmp_path / "checkpoint-2").mkdir()
    assert read_steps(stream, tmp_path, 1, 1, from_step=2) == expected[2:]
    assert "32 rows are skipped" in capsys.readouterr().out


def test_position_with_fewer_micro_batches_per_step(documents, tmp_path, capsys, monkeypatch):
    """With larger micro-batches a step does not read all saved parts, so the stream is read again: every row is read."""

    def stream():
        return shuffle(documents(), 1).repeat(None)

    parts = min(SLOTS, documents().num_shards)
    read_steps(stream, tmp_path, 1, 1)
    monkeypatch.setattr(sys.modules[__name__], "SLOTS", 4 if parts > 4 else 1)
    batches, _ = open_batches(stream(), tmp_path, 1, 0, tmp_path / "checkpoint-1")
    assert "--per_device_train_batch_size" in capsys.readouterr().out
    rows = documents().num_shards * 8 * ROWS
    assert len({row["id"] for batch in itertools.islice(batches, rows) for row in batch["rows"]}) == sum(FILES)


def damaged_positions(path):
    """A position with every key left out, those of other streams, and what is no object."""
    position = json.loads(path.read_text())
    for key in ("parts", "stream", "state"):
        yield json.dumps({name: value for name, value in position.items() if name != key})
    for stream in ({}, position["stream"] | {"shards": 10**9}, position["stream"] | {"start": {"examples_iterable": 1}}):
        yield json.dumps(position | {"stream": stream})
    yield from ("", "{", "[]", "null", "2", "[" * 100_000, "\udcff")


def test_damaged_position(documents, tmp_path, capsys):
    """It is one message, and no error."""
    stream = packed(documents, True)
    read_steps(lambda: stream, tmp_path, 1, 1)
    path = tmp_path / "checkpoint-1/stream_0.json"
    (tmp_path / "checkpoint-1/stream_x.json").write_text("{}")
    open_batches(stream, tmp_path, 1, 0, path.parent)
    assert not capsys.readouterr().out, "the file that is not one of ours does not count"
    for content in list(damaged_positions(path)):
        path.write_text(content, "utf-8", "surrogateescape")
        open_batches(stream, tmp_path, 1, 0, path.parent)
        assert "does not have the position in this stream" in capsys.readouterr().out, content[:200]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_documents_that_are_packed_at_once(strategy):
    """So few that a part of a stream has its first row soon, and so many that few rows stay empty."""
    generator = random.Random(0)
    rows = [[0] * max(1, int(generator.lognormvariate(3.6, 1))) for _ in range(2000)]  # a mean of 60
    stream = Dataset.from_dict({"input_ids": rows}).to_iterable_dataset()
    documents = streams.documents_per_batch(stream, 64, strategy)
    assert 100 < documents < 250
    assert streams.documents_per_batch(stream, 512, strategy) == 1000


def test_resumed_stream_reads_only_from_the_block_on(tmp_path, monkeypatch):
    """Row 950 of a file with row groups of 100: reading starts in the tenth of these."""
    parquet.write_table(pyarrow.table({"id": range(1000)}), tmp_path / "a.parquet", row_group_size=100)
    stream = open_parquet([str(tmp_path / "a.parquet")])
    assert [row["id"] for row in itertools.islice(stream, 950)] == list(range(950))
    position, groups = stream.state_dict(), []
    read = parquet.ParquetFile.iter_batches

    def iter_batches(file, rows, row_groups):
        groups.append(row_groups)
        return read(file, rows, row_groups=row_groups)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    stream.load_state_dict(position)
    assert [row["id"] for row in stream] == list(range(950, 1000))
    assert groups == [[9]]


def test_many_files_are_opened_when_they_are_read(tmp_path, monkeypatch):
    """Some of their blocks have no row group then. The columns are those of every second file."""
    monkeypatch.setattr(stream_rows, "FEW_FILES", 19)
    files = [str(tmp_path / f"{number}.parquet") for number in range(20)]
    for number, file in enumerate(files):
        columns = {"id": range(30 * number, 30 * number + 30)} | ({"later": ["yes"] * 30} if number > 9 else {})
        parquet.write_table(pyarrow.table(columns), file, row_group_size=10)
    stream_rows._read_footer.cache_clear()
    stream = open_parquet(files)
    assert stream_rows._read_footer.cache_info().misses == 10
    assert stream.num_shards == 10 * 3 + 10 * stream_rows.BLOCKS_PER_FILE
    assert list(stream) == [{"id": number, "later": "yes" if number >= 300 else None} for number in range(600)]


def test_damaged_parquet_file(tmp_path, error_of):
    """The message names the file, whose first rows could be read."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"row {row} " * 9 for row in range(1000)]}), file, row_group_size=100)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 500] = bytes(500)
    file.write_bytes(content)
    message = error_of(list, open_parquet([str(file)]))
    assert message.startswith(f"{file} cannot be read: ")


def test_resumed_run_equals_uninterrupted(rehearse, fork_launch, workdir):
    """Two processes resume from the third step and log the same losses, bit for bit, at the same epochs.

    The adapters have dropout, so the random state must be the same too. Reading starts in the second pass over the stream, in
    which the third step was, so the resumed run reads fewer rows.
    """
    recipe = ROOT / "tests/data/count_rows.py"
    flags = ["--max_steps", "5", "--save_steps", "3", "--logging_steps", "1", "--eval_strategy", "no"]
    flags += ["--use_peft", "--lora_dropout", "0.1", "--max_samples", "6"]  # read once in about two steps
    uninterrupted = rehearse(recipe, "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2")
    run = begin_at(uninterrupted / "checkpoint-3", workdir / "runs/stream")
    process = fork_launch("--tiny", recipe, "4gpu_shard_grad_op", "--output_dir", run, *flags, NPROC_PER_NODE="2")
    assert process.returncode == 0, process.stderr
    assert len(list(run.glob("checkpoint-3/stream_*.json"))) == 4  # one per part: two micro-batches on each of two processes
    assert read(run)["resumed_from_step"] == 3 and losses(run) == losses(uninterrupted)
    assert [entry["epoch"] for entry in history(run, "epoch")] == [entry["epoch"] for entry in history(uninterrupted, "epoch")]
    assert read(run)["epoch"] == read(uninterrupted)["epoch"]
    for rank in range(2):
        assert read(run, f"rows_{rank}.json") < read(uninterrupted, f"rows_{rank}.json")
