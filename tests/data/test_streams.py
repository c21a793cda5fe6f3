"""Streams on several processes: none ends before the others, and each resumes at the row where it stopped reading."""

import itertools
import json
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

from harness.compat import datasets as compat_datasets
from harness.compat.datasets import complete_stream_state
from harness.data.streams import StreamPosition, repeat_stream
from harness.folder import COMPLETION_MARKER
from harness.rehearsal import tiny_model

import pyarrow
import pytest
import yaml
from accelerate.data_loader import prepare_data_loader
from conftest import ROOT, losses, read
from datasets import Dataset, load_dataset
from pyarrow import parquet
from torch.utils.data import DataLoader
from trl import pack_dataset

RECIPE = "qwen2_fineweb_edu"


def test_stream_is_repeated(build_trainer):
    """Processes read files of different length; each has rows as long as the others need."""
    trainer = build_trainer(RECIPE, "--max_length", "4096")
    repeat_stream(trainer)
    rows = sum(1 for _, _ in zip(trainer.train_dataset, range(200), strict=False))
    assert rows == 200  # the tiny dataset fills about forty rows of this length


def test_stream_as_eval_dataset_is_refused(error_of):
    stream = Dataset.from_list([{"text": "a"}]).to_iterable_dataset()
    trainer = SimpleNamespace(train_dataset=stream, eval_dataset=stream, args=SimpleNamespace(world_size=2))
    assert "Dataset.from_list" in error_of(repeat_stream, trainer)


def test_processes_with_files_of_different_length(environment, tmp_path):
    """Started with `accelerate launch`: three files for two processes, five passes over the shorter share.

    If the stream ended for one process, the processes would wait for each other without end.
    """
    tiny_model.make("Qwen/Qwen2-0.5B", "main", tmp_path / "model")
    (tmp_path / "data").mkdir()
    for file, rows in enumerate((40, 30, 20)):
        texts = [json.dumps({"text": f"file {file} row {row} " + "of many words " * 20}) for row in range(rows)]
        (tmp_path / f"data/{file}.jsonl").write_text("\n".join(texts))
    settings = yaml.safe_load((ROOT / "accelerate_configs/4gpu_full_shard.yaml").read_text()) | {"num_processes": 2}
    config = tmp_path / "2gpu.yaml"
    config.write_text(yaml.safe_dump(settings))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_machines", "1"]
    command += ["--main_process_port", "0", ROOT / f"recipes/{RECIPE}.py", "--use_cpu", "--output_dir", run, "--max_steps", "40"]
    command += ["--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "data", "--dataset_config", "default"]
    command += ["--max_length", "256", "--gradient_accumulation_steps", "1", "--max_eval_samples", "4"]
    command += ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_steps", "10", "--bf16", "false"]
    process = subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert read(run)["global_step"] == 40 and read(run)["world_size"] == 2 and read(run)["fsdp_enabled"]


FILES = (37, 21, 25)  # documents in each; a row group has 8


@pytest.fixture(scope="module", params=["parquet", "json"])
def documents(request, tmp_path_factory):
    """A function that opens a stream of three files: documents of 1 to 60 numbers."""
    folder, generator = tmp_path_factory.mktemp(request.param), random.Random(0)
    for file, rows in enumerate(FILES):
        rows = [
            {"id": 100 * file + row, "input_ids": [generator.randrange(99) for _ in range(row % 60 + 1)]} for row in range(rows)
        ]
        if request.param == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{file}.parquet", row_group_size=8)
        else:
            (folder / f"{file}.json").write_text("\n".join(map(json.dumps, rows)))
    return lambda: load_dataset(request.param, data_files=f"{folder}/*", split="train", streaming=True)


def packed(documents, is_shuffled):
    stream = documents().filter(lambda row: row["id"] != 3)
    stream = stream.shuffle(seed=1, buffer_size=10, max_buffer_input_shards=1) if is_shuffled else stream
    stream = stream.map(lambda row: {"labels": row["input_ids"]}, remove_columns="id")
    return pack_dataset(stream, 64, "bfd_split", {"batch_size": 7}).repeat(None)


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
def test_stream_resumes_at_any_row(documents, is_shuffled):
    """Between the rows of a packed batch, in the middle of a buffer, at the ends of files and of the stream."""
    complete_stream_state()
    stream, rows, positions = packed(documents, is_shuffled), [], []
    for row in itertools.islice(stream, 110):  # the files fill about forty such rows
        rows.append(row)
        positions.append(json.dumps(stream.state_dict()))
    assert rows[40:80] != rows[:40]
    for number in range(0, 100, 7):
        again = packed(documents, is_shuffled)
        again.load_state_dict(json.loads(positions[number]))
        assert list(itertools.islice(again, 9)) == rows[number + 1 : number + 10], number


@pytest.mark.parametrize("processes", [2, 4], ids=["separate files", "the same files"])
def test_every_process_resumes_at_its_own_position(documents, processes, tmp_path):
    """Two processes divide three files; four processes all read them, and each keeps every fourth batch."""
    for rank in range(processes):

        def open_batches(checkpoint, rank=rank):
            loader = DataLoader(packed(documents, False), batch_size=2, collate_fn=lambda rows: [row["labels"] for row in rows])
            loader = prepare_data_loader(loader, num_processes=processes, process_index=rank, dispatch_batches=False)
            args = SimpleNamespace(process_index=rank, world_size=processes, output_dir=tmp_path)
            trainer = SimpleNamespace(args=args, get_train_dataloader=lambda: loader)
            position = StreamPosition(trainer, checkpoint)
            position.install()
            return position, args, iter(trainer.get_train_dataloader())

        (tmp_path / "checkpoint-1").mkdir(exist_ok=True)
        position, args, uninterrupted = open_batches(None)
        list(itertools.islice(uninterrupted, 5))
        position.position = position.after_batches[0]
        position.on_save(args, SimpleNamespace(global_step=1), None)
        _, _, resumed = open_batches(tmp_path / "checkpoint-1")
        assert list(itertools.islice(resumed, 12)) == list(itertools.islice(uninterrupted, 12))


def test_resuming_reads_only_from_the_row_group_on(tmp_path, monkeypatch):
    """Row 950 of a file with row groups of 100: reading starts in the tenth of these."""
    complete_stream_state()
    parquet.write_table(pyarrow.table({"id": range(1000)}), tmp_path / "a.parquet", row_group_size=100)
    stream = load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), split="train", streaming=True)
    assert [row["id"] for row in itertools.islice(stream, 950)] == list(range(950))
    position = stream.state_dict()
    found, row_groups_from = [], compat_datasets._row_groups_from
    monkeypatch.setattr(compat_datasets, "_row_groups_from", lambda *of: found.append(row_groups_from(*of)) or found[0])
    stream.load_state_dict(position)
    assert [row["id"] for row in stream] == list(range(950, 1000))
    assert found == [([9], 900)]


def test_resumed_run_equals_uninterrupted(rehearse, fork_launch, workdir):
    """Two processes resume from the third step and log the same losses, bit for bit, at the same epochs.

    The adapters have dropout, so the random state must be the same too. Reading starts in the second pass over the stream, in
    which the third step was, so the resumed run reads fewer rows.
    """
    recipe = ROOT / "tests/data/count_rows.py"
    flags = ["--max_steps", "5", "--save_steps", "3", "--logging_steps", "1", "--eval_strategy", "no"]
    flags += ["--use_peft", "--lora_dropout", "0.1", "--max_samples", "6"]  # read once in about two steps
    uninterrupted = rehearse(recipe, "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2")
    run = workdir / "runs/stream"
    shutil.copytree(uninterrupted / "checkpoint-3", run / "checkpoint-3")
    shutil.copy(uninterrupted / "run.json", run)
    process = fork_launch("--tiny", recipe, "4gpu_shard_grad_op", "--output_dir", run, *flags, NPROC_PER_NODE="2")
    assert process.returncode == 0, process.stderr
    assert len(list(run.glob("checkpoint-3/stream_*.json"))) == 2
    assert read(run)["resumed_from_step"] == 3 and losses(run) == losses(uninterrupted)
    histories = [read(folder, "trainer_state.json")["log_history"] for folder in (run, uninterrupted)]
    assert [entry["epoch"] for entry in histories[0]] == [entry["epoch"] for entry in histories[1]]
    assert read(run)["epoch"] == read(uninterrupted)["epoch"]
    for rank in range(2):
        assert read(run, f"rows_{rank}.json") < read(uninterrupted, f"rows_{rank}.json")


@pytest.mark.parametrize(
    ("processes", "accumulation", "outcome"),
    [
        (2, 4, "skips 48 rows, so at least 48 are trained on twice"),
        (8, 4, "skips 192 rows, so at least 96 others are never"),
        (2, 8, "skips 96 rows, but not always the same"),
    ],
)
def test_another_number_of_processes_is_explained(tmp_path, capsys, processes, accumulation, outcome):
    """The checkpoint: three steps of four batches of two rows on each of four processes."""
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    saved = {"world_size": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    (checkpoint / COMPLETION_MARKER).write_text(json.dumps({"geometry": saved}))
    args = SimpleNamespace(process_index=0, world_size=processes, gradient_accumulation_steps=accumulation)
    stream = Dataset.from_dict({"a": range(99)}).to_iterable_dataset()
    loader = prepare_data_loader(DataLoader(stream, batch_size=2), num_processes=1, dispatch_batches=False)
    trainer = SimpleNamespace(args=args, get_train_dataloader=lambda: loader)
    StreamPosition(trainer, checkpoint).install()
    trainer.get_train_dataloader()
    printed = capsys.readouterr().out
    assert "on 4 processes, which trained on 96 rows" in printed and outcome in printed
