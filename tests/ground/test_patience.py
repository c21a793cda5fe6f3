"""A hub that fails is waited for, with a line; when it stays away, all processes leave with a checkpoint and go on later."""

import re

from harness import patience

import datasets
import huggingface_hub
import pyarrow
import pytest
from conftest import losses
from datasets import load_dataset
from pyarrow import parquet
from stand_in_hub import serve
from starts import Starts

ROWS = [{"text": f"row {row} " + "of many words " * (row % 40)} for row in range(400)]


@pytest.fixture
def hub(tmp_path):
    """A hub with a data set of two files, `some/rows`."""
    with serve(tmp_path / "hub") as server:
        folder = server.root / "datasets/some/rows"
        folder.mkdir(parents=True)
        for file in (0, 1):
            parquet.write_table(pyarrow.Table.from_pylist(ROWS[file::2]), folder / f"{file}.parquet", row_group_size=50)
        server.file = folder / "1.parquet"
        yield server


@pytest.fixture
def stream(hub, monkeypatch):
    """Reads `some/rows`; the second file of it gives trouble, to be put into `hub.trouble`, from its second request on."""
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    for name, value in {"ENDPOINT": hub.url, "HF_HUB_DOWNLOAD_TIMEOUT": 1}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(patience, "PATIENCE", 4)
    monkeypatch.setattr(patience, "NOTICE", (0, 30))
    patience.wait_for_the_hub()
    datasets.disable_progress_bars()
    yield lambda: (row["text"] for row in load_dataset("some/rows", split="train", streaming=True))
    huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("500", "HTTP status 500"),
        ("503", "HTTP status 503"),
        ("429", "HTTP status 429"),
        ("cut", "peer closed connection|incomplete"),
        ("silent", "timed out"),
    ],
)
def test_trouble_that_passes(hub, stream, capsys, trouble, said):
    """Twice in the middle of a data set: all rows come, once each, and a line says what is waited for."""
    rows, troubles = stream(), iter([trouble, trouble])
    read = [next(rows)]
    hub.trouble = lambda method, path: next(troubles, None) if path.endswith("1.parquet") else None
    assert sorted([*read, *rows]) == sorted(row["text"] for row in ROWS) and next(troubles, None) is None
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "waiting for the hub" in line][:1]
    assert re.search(said, line) and "of 4 s (HUB_PATIENCE) so far" in line


def test_trouble_that_stays(hub, stream):
    rows = stream()
    next(rows)
    hub.trouble = lambda method, path: "503" if path.endswith("1.parquet") else None
    with pytest.raises(patience.Lost, match=r"has not answered for \d of 4 s \(HUB_PATIENCE\): HTTP status 503"):
        list(rows)


def test_what_is_not_there_is_not_waited_for(hub, stream):
    rows = stream()
    next(rows)
    hub.file.unlink()
    began = len(hub.requests)
    with pytest.raises(huggingface_hub.errors.RemoteEntryNotFoundError):
        list(rows)
    assert len(hub.requests) - began < 9


def test_a_file_that_changes_while_it_is_read(hub, monkeypatch, stream):
    file = huggingface_hub.HfFileSystem(endpoint=hub.url).open("datasets/some/rows/1.parquet", block_size=64, cache_type="none")
    before = file.read(64)
    hub.file.write_bytes(hub.file.read_bytes()[::-1])
    with pytest.raises(patience.Lost, match=r"1\.parquet is not on the hub any more as it was"):
        file.read(64)
    assert len(before) == 64


def test_a_hub_that_stays_away_costs_nothing(hub, rehearse, environment, workplace, tmp_path):
    """Two processes stream; to one of them the hub is lost. Both leave, and the same command logs what it would have logged."""
    rehearse("qwen2_fineweb_edu", "1x3090")  # makes the stand-ins
    model = next((workplace / "outputs/tiny/.stand-ins").glob("Qwen--Qwen2-0.5B-????????"))
    folder = hub.root / "datasets/many/rows"
    folder.mkdir(parents=True)
    for file in range(40):  # a thousand rows are packed at a time, and few tokens: files are read in every other step
        rows = [{"text": f"{file} {row}"} for row in range(200)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{file:02}.parquet")
    flags = ["--model_name_or_path", model, "--dataset_name", "many/rows", "--dataset_config", "default", "--bf16", "false"]
    flags += ["--max_steps", "12", "--save_steps", "4", "--logging_steps", "1", "--eval_strategy", "no", "--max_length", "512"]
    flags += ["--global_batch_size", "4", "--max_eval_samples", "4", "--learning_rate", "1e-2", "--report_to", "none"]
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NPROC_PER_NODE": "2", "HUB_PATIENCE": "2"}

    starts = Starts(environment | variables, tmp_path)

    def train(run):
        return starts("qwen2_fineweb_edu", "4gpu_ddp", "--use_cpu", *flags, "--output_dir", run)

    process = train(tmp_path / "undisturbed")
    assert process.returncode == 0, process.stderr
    run, lost = tmp_path / "run", re.compile(r"/[23]\d\.parquet$")  # the files of the second process
    hub.trouble = lambda method, path: "503" if lost.search(path) and (run / "checkpoint-4/complete.json").exists() else None
    process = train(run)
    assert process.returncode == 75 and "Traceback" not in process.stderr, process.stdout + process.stderr
    said = r"Stopped at step (\d+): the hub has not answered .*: HTTP status 503. The same command goes on from step \1\."
    step = re.search(said, process.stdout)[1]
    hub.trouble = lambda method, path: None
    process = train(run)
    assert process.returncode == 0, process.stderr
    assert f"Continuing from {run}/checkpoint-{step}" in process.stdout
    assert losses(run) == losses(tmp_path / "undisturbed")
    starts.close()
