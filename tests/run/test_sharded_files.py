"""A sharded checkpoint that would run code is refused on resume and by --merge; what torch writes is accepted."""

import json
import pickle
import shutil
from pathlib import Path

from harness.folder import COMPLETION_MARKER
from harness.run.marker import WRITING, sync_files, write_marker
from harness.run.sharded_files import check_sharded_files

import pytest
import torch
from payloads import ran, source
from runs import SHORT, assert_one_error, fewer_processes
from torch.distributed import checkpoint as dcp

RECIPE, CONFIG = "qwen2_fineweb_edu", "4gpu_full_shard"


class Payload:
    """Pickled, it is a call of a function."""

    def __init__(self, folder: Path):
        self.call = exec, (source(folder, "pickle"),)

    def __reduce__(self):
        return self.call


def tensors() -> dict:
    return {str(dtype): torch.zeros(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8)}


@pytest.fixture
def save(tmp_path):
    """Saves a state as torch does; returns the folder of the checkpoint."""

    def call(state: dict) -> Path:
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint-2/optimizer_0", no_dist=True)
        return tmp_path / "checkpoint-2"

    return call


def test_what_torch_writes_is_accepted(save):
    values = {"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"], "foreach": None, "decoupled": True, "step": torch.tensor(3)}
    check_sharded_files(save({"model": tensors(), "optimizer": {"param_groups": [values]}}))


@pytest.mark.parametrize("place", ["value", ".metadata", "__0.metadata", "best checkpoint"])
def test_code_is_refused(save, tmp_path, error_of, place):
    """It would run: torch runs it here. `__0.metadata` is read if there is no `.metadata`."""
    checkpoint = save({"lr": Payload(tmp_path) if place == "value" else 0.1})
    folder = checkpoint / "optimizer_0"
    if place != "value":
        metadata = dcp.FileSystemReader(folder).read_metadata()
        metadata.planner_data = Payload(tmp_path)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    if place == "__0.metadata":
        (folder / ".metadata").rename(folder / "__0.metadata")
    given = checkpoint
    if place == "best checkpoint":
        given = tmp_path / "checkpoint-4"
        given.mkdir()
        (given / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "where/it/was/checkpoint-2"}))
    message = error_of(check_sharded_files, given)
    assert f"{folder}/" in message and "Refused: " in message
    assert ran(tmp_path) == []
    dcp.load({"lr": 0.2}, checkpoint_id=folder, no_dist=True)
    assert "pickle" in ran(tmp_path)


@pytest.mark.parametrize("best", ["{tmp_path}", "{tmp_path}/elsewhere/checkpoint-3", "..", 3])
def test_only_checkpoints_of_the_run_are_read(save, tmp_path, best):
    checkpoint, elsewhere = save({"lr": 0.1}), tmp_path / "elsewhere/checkpoint-3"
    elsewhere.mkdir(parents=True)
    (elsewhere / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path)))
    best = best.format(tmp_path=tmp_path) if isinstance(best, str) else best
    (checkpoint / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": best}))
    check_sharded_files(checkpoint)


# Sets an attribute of a class: a table of entries could look empty to the check, and have code for torch.
CHANGES_A_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(dS'items'\nI1\nsb."


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", pickle.dumps(3), pickle.dumps({"a": torch.float32}), CHANGES_A_CLASS])
def test_other_metadata_are_refused(save, error_of, content):
    checkpoint = save({"lr": 0.1})
    (checkpoint / "optimizer_0/.metadata").write_bytes(content)
    message = "attributes of <class" if content == CHANGES_A_CLASS else ".metadata was not written by a run"
    assert message in error_of(check_sharded_files, checkpoint)


def test_entry_outside_of_the_checkpoint_is_refused(save, error_of):
    checkpoint = save({"lr": 0.1})
    metadata = dcp.FileSystemReader(checkpoint / "optimizer_0").read_metadata()
    for entry in metadata.storage_data.values():
        entry.relative_path = f"../../{entry.relative_path}"
    (checkpoint / "optimizer_0/.metadata").write_bytes(pickle.dumps(metadata))
    assert "Refused: an entry in ../../" in error_of(check_sharded_files, checkpoint)


def test_resume_and_merge_refuse_it(rehearse, fork_launch, tmp_path):
    """Its completion marker is right. Without the payload, the same command resumes and the other merges: other tests do that."""
    run, checkpoint = tmp_path / "run", tmp_path / "run/checkpoint-4"
    original = rehearse(RECIPE, CONFIG)
    shutil.copytree(original / "checkpoint-4", checkpoint)
    for name in ("run.json", "data.json", "held_out.parquet"):
        shutil.copy(original / name, run)
    path = checkpoint / "pytorch_model_fsdp_0/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Payload(tmp_path)
    path.write_bytes(pickle.dumps(metadata))
    marker = json.loads((checkpoint / COMPLETION_MARKER).read_text())
    del marker["checksum"]
    (checkpoint / WRITING).touch()
    write_marker(checkpoint, marker | {"files": sync_files(checkpoint, lambda name: True)})

    process = fork_launch("--tiny", RECIPE, CONFIG, "--output_dir", run, *SHORT, **fewer_processes(CONFIG))
    assert process.returncode == 2 and "Refused: builtins.exec" in process.stderr, process.stderr
    assert_one_error(fork_launch("--merge", checkpoint, tmp_path / "merged"), "Refused: builtins.exec")
    assert ran(tmp_path) == [] and checkpoint.is_dir() and not (tmp_path / "merged").exists()


def test_links_to_folders_are_refused(save, tmp_path, error_of):
    checkpoint = save({"lr": Payload(tmp_path)})
    (checkpoint / "optimizer_0").rename(tmp_path / "real")
    (checkpoint / "optimizer_0").symlink_to(tmp_path / "real")
    assert "Refused: a link to a folder" in error_of(check_sharded_files, checkpoint)
    assert ran(tmp_path) == []
