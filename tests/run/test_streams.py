"""Streams go on for every process as long as the others need, and after a stop at the row where each process was."""

import itertools
import json
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

from harness.run import stream_state, streams

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


def test_streams_never_run_dry(build_trainer):
    """Ranks read files of different length; each goes on as long as the others need."""
    trainer = build_trainer(RECIPE, "--max_length", "4096")
    streams.keep_together(trainer)
    rows = sum(1 for _, _ in zip(trainer.train_dataset, range(200), strict=False))
    assert rows == 200  # the stand-in fills about forty sequences of this length


def test_a_stream_to_evaluate_on_is_refused(capsys):
    stream = Dataset.from_list([{"text": "a"}]).to_iterable_dataset()
    trainer = SimpleNamespace(train_dataset=stream, eval_dataset=stream, args=SimpleNamespace(world_size=2))
    with pytest.raises(SystemExit) as stopped:
        streams.keep_together(trainer)
    assert stopped.value.code == 2 and "Dataset.from_list" in capsys.readouterr().err


def test_processes_whose_files_end_at_different_times_go_on(rehearse, environment, workplace, tmp_path):
    """Three files for two processes, five passes over the shorter share: without help they wait for each other for ever."""
    rehearse(RECIPE, "1x3090")  # makes the stand-ins
    model = next((workplace / "outputs/tiny/.stand-ins").glob("Qwen--Qwen2-0.5B-*"))
    (tmp_path / "data").mkdir()
    for file, rows in enumerate((40, 30, 20)):
        texts = [json.dumps({"text": f"file {file} row {row} " + "of many words " * 20}) for row in range(rows)]
        (tmp_path / f"data/{file}.jsonl").write_text("\n".join(texts))
    settings = yaml.safe_load((ROOT / "accelerate_configs/4gpu_full_shard.yaml").read_text()) | {"num_processes": 2}
    config = tmp_path / "2gpu.yaml"
    config.write_text(yaml.safe_dump(settings))
    launched = {"recipe": RECIPE, "config": str(config), "processes": 2, "on_cpu": True}
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"recipe": RECIPE, "config": "", "model": "", "dataset": "", "tiny": True}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_machines", "1"]
    command += ["--main_process_port", "0", ROOT / f"recipes/{RECIPE}.py", "--output_dir", run, "--max_steps", "40"]
    command += ["--model_name_or_path", model, "--dataset_name", tmp_path / "data", "--dataset_config", "default"]
    command += ["--max_length", "256", "--gradient_accumulation_steps", "1", "--max_eval_samples", "4"]
    command += ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_steps", "10", "--bf16", "false"]
    variables = {"RECIPE_LAUNCH": json.dumps(launched), "PYTHONPATH": str(ROOT / "recipes")}
    process = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert read(run)["global_step"] == 40


FILES = (37, 21, 25)  # documents in each; a row group holds 8


@pytest.fixture(scope="module", params=["parquet", "json"])
def documents(request, tmp_path_factory):
    """A stream of three files, read anew by every call: documents of 1 to 60 numbers."""
    folder, chance = tmp_path_factory.mktemp(request.param), random.Random(0)
    for file, rows in enumerate(FILES):
        rows = [{"id": 100 * file + row, "input_ids": [chance.randrange(99) for _ in range(row % 60 + 1)]} for row in range(rows)]
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
def test_a_stream_goes_on_at_any_row(documents, is_shuffled):
    """Between the rows of a packed batch, in the middle of a buffer, at the ends of files and of the stream."""
    stream_state.complete()
    stream, rows, places = packed(documents, is_shuffled), [], []
    for row in itertools.islice(stream, 110):  # the files hold about forty such rows
        rows.append(row)
        places.append(json.dumps(stream.state_dict()))
    assert rows[40:80] != rows[:40]
    for number in range(0, 100, 7):
        again = packed(documents, is_shuffled)
        again.load_state_dict(json.loads(places[number]))
        assert list(itertools.islice(again, 9)) == rows[number + 1 : number + 10], number


@pytest.mark.parametrize("processes", [2, 4], ids=["own files", "the same files"])
def test_every_process_goes_on_where_it_was(documents, processes, tmp_path):
    """Two processes of three files have files of their own; four read all and keep every fourth batch."""
    for rank in range(processes):

        def batches(checkpoint, skipped=0, rank=rank):
            loader = DataLoader(packed(documents, False), batch_size=2, collate_fn=lambda rows: [row["labels"] for row in rows])
            loader = prepare_data_loader(loader, num_processes=processes, process_index=rank, dispatch_batches=False)
            args = SimpleNamespace(process_index=rank, world_size=processes, output_dir=tmp_path)
            parts = {"train_dataset": None, "get_batch_samples": None, "get_train_dataloader": lambda: loader}
            trainer = SimpleNamespace(args=args, **parts)
            place = streams.Place(trainer, checkpoint)
            prepared = trainer.get_train_dataloader()
            if skipped:
                assert place._skip_first_batches(prepared, skipped) is prepared
            return place, args, iter(prepared)

        (tmp_path / "checkpoint-1").mkdir(exist_ok=True)
        place, args, undisturbed = batches(None)
        list(itertools.islice(undisturbed, 5))
        place.place = place.places[0]
        place.on_save(args, SimpleNamespace(global_step=1), None)
        _, _, resumed = batches(tmp_path / "checkpoint-1", 5)
        assert list(itertools.islice(resumed, 12)) == list(itertools.islice(undisturbed, 12))


def test_only_the_row_group_is_read_again(tmp_path, monkeypatch):
    """Row 950 of a file with row groups of 100: it goes on with the tenth of these."""
    stream_state.complete()
    parquet.write_table(pyarrow.table({"id": range(1000)}), tmp_path / "a.parquet", row_group_size=100)
    stream = load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), split="train", streaming=True)
    assert [row["id"] for row in itertools.islice(stream, 950)] == list(range(950))
    place = stream.state_dict()
    begun, groups_from = [], stream_state._groups_from
    monkeypatch.setattr(stream_state, "_groups_from", lambda *where: begun.append(groups_from(*where)) or begun[0])
    stream.load_state_dict(place)
    assert [row["id"] for row in stream] == list(range(950, 1000))
    assert begun == [([9], 900)]


def test_a_resumed_run_reads_nothing_again(rehearse, starts, workplace):
    """Two processes, from their third step: losses equal to the bit."""
    flags = ["--max_steps", "5", "--save_steps", "3", "--logging_steps", "1", "--eval_strategy", "no"]
    undisturbed = rehearse(RECIPE, "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2")
    run = workplace / "runs/stream"
    shutil.copytree(undisturbed / "checkpoint-3", run / "checkpoint-3")
    shutil.copy(undisturbed / "run.json", run)
    process = starts("--tiny", RECIPE, "4gpu_shard_grad_op", "--output_dir", run, *flags, NPROC_PER_NODE="2")
    assert process.returncode == 0, process.stderr
    assert len(list(run.glob("checkpoint-3/stream_*.json"))) == 2
    assert read(run)["resumed_from_step"] == 3 and losses(run) == losses(undisturbed)


@pytest.mark.parametrize(
    ("now", "outcome"), [(2, "reads 48 of these or more a second time"), (8, "leaves out 96 others or more")]
)
def test_another_number_of_processes_is_told_what_it_means(tmp_path, capsys, now, outcome):
    """Three steps of four batches of two rows on each of four processes."""
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "stream_0.json").write_text('{"processes": 4}')
    args = SimpleNamespace(process_index=0, world_size=now)
    loader = DataLoader(Dataset.from_dict({"a": range(99)}).to_iterable_dataset(), batch_size=2)
    parts = {"train_dataset": None, "get_batch_samples": None, "get_train_dataloader": lambda: loader}
    place = streams.Place(SimpleNamespace(args=args, **parts), checkpoint)
    place._explain(loader, 12)
    said = capsys.readouterr().out
    assert "that of 4 processes, which have trained on 96 rows" in said and outcome in said
    assert f"first 24 rows of its own share, {24 * now} in all" in said
