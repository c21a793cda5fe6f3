"""The output directory: claimed by one run, refused to others, finished when it has trained as far as is asked for."""

import os

from harness import folder
from harness.data.reading import file_versions
from harness.start import claim as of_claim
from harness.start.claim import CHOICE_OF_ROWS, SETTINGS

import pytest
from filelock import FileLock
from runs import read

IDENTITY = dict.fromkeys(("recipe", "model", "dataset", "recipe_digest", *CHOICE_OF_ROWS), "a")
IDENTITY |= {
    "datasets": ["a"],
    "dataset_weights": [1],
    "data_files": [["d/a.jsonl", 9, 10**9], ["d/b.jsonl", 9, 10**9]],
    "tiny": False,
    "config": "c",
    "sharded": True,
    "use_peft": False,
    "load_in_4bit": False,
    "settings": {"learning_rate": 1e-3, "lora_r": 8, "logging_steps": 1, "max_grad_norm": 0.5, "max_steps": 10},
}
RESULTS = IDENTITY | {"global_step": 10, "epoch": 1.0, "final_loss": 2.5}


def claim(run, identity):
    """As the first process does."""
    lock = FileLock(run / ".lock")
    of_claim.acquire(lock)
    before = folder.read_json(run / "run.json")
    try:
        of_claim.check_same_run(run, before, identity)
        of_claim.write_run(run, before, dict(identity))
    finally:
        lock.release()


def with_settings(**settings):
    return IDENTITY | {"settings": IDENTITY["settings"] | settings}


def begin_training(run, identity=IDENTITY):
    """A run that has written a checkpoint."""
    claim(run, identity)
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-5/complete.json").touch()


def test_claim(tmp_path, error_of):
    """By one run at a time, of a folder that is new or has files of this run only."""
    run = tmp_path / "new/run"
    for _ in range(2):
        claim(run, IDENTITY)
        assert read(run, "run.json") == IDENTITY
    held = FileLock(run / ".lock")
    of_claim.acquire(held)
    assert "another run is writing" in error_of(claim, run, IDENTITY)
    held.release()
    claim(run, IDENTITY)
    (tmp_path / "thesis.tex").touch()
    assert "not from a run" in error_of(claim, tmp_path, IDENTITY)


@pytest.mark.parametrize("name", SETTINGS["must be equal"])
def test_folder_of_another_run_is_refused(tmp_path, error_of, name):
    """Its checkpoint cannot be loaded, or what it has learned would mean something else, or it was evaluated on other rows."""
    place = dict if name in IDENTITY else lambda value: {"settings": IDENTITY["settings"] | value}
    begin_training(tmp_path, IDENTITY | place({name: ["a", "b"]}))
    for other, words in ("c", "c"), (["b", "a"], "b a"):  # such as the weights of two datasets
        message = error_of(claim, tmp_path, IDENTITY | place({name: other}))
        assert f"{name} a b, this run has {name} {words}" in message and "--output_dir" in message


def test_schedulers_that_load_no_other_state(tmp_path, error_of):
    begin_training(tmp_path)
    assert "lr_scheduler_type" in error_of(claim, tmp_path, with_settings(lr_scheduler_type="reduce_lr_on_plateau"))


def test_settings_that_may_change(tmp_path, capsys):
    """A line for those that the checkpoint of the optimizer keeps, as run.json then says, and one for those of the loss."""
    begin_training(tmp_path)
    changes = {"max_grad_norm": 1, "lr_scheduler_type": "linear", "learning_rate": 2e-3, "adam_beta1": 0.8, "logging_steps": 9}
    claim(tmp_path, with_settings(**changes) | {"config": "d"})
    of_optimizer, of_loss = capsys.readouterr().out.splitlines()
    assert "learning_rate" in of_optimizer and "adam_beta1" in of_optimizer
    assert "lr_scheduler_type" in of_loss and "max_grad_norm" in of_loss and "logging_steps" not in of_loss
    used = {"max_grad_norm": 1, "logging_steps": 9, "lr_scheduler_type": "linear"}
    assert read(tmp_path, "run.json") == with_settings(**used) | {"config": "d"}
    claim(tmp_path, with_settings(**used))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000, "\udcff"])
def test_damaged_json_is_a_user_error(tmp_path, error_of, content):
    (tmp_path / "a.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "a.json is damaged" in error_of(folder.read_json, tmp_path / "a.json")


@pytest.mark.parametrize("file", [["d/b.jsonl", 8, 10**9], ["d/c.jsonl", 9, 10**9], None], ids=["size", "name", "missing"])
def test_changed_file_is_refused(tmp_path, error_of, file):
    changed = IDENTITY | {"data_files": [*IDENTITY["data_files"][:1], *([file] if file else [])]}
    claim(tmp_path, changed)
    begin_training(tmp_path)  # nothing had trained yet
    assert f"{file[0] if file else 'd/b.jsonl'}" in error_of(claim, tmp_path, changed)


def test_versions_of_local_files(tmp_path):
    """They change with the name, the size and the time of a file, not with how its path is given. A Hub ID has none."""
    file = tmp_path / "d/rows.jsonl"
    file.parent.mkdir()
    file.write_text("x" * 9)
    os.utime(file, ns=(5, 5))
    assert file_versions(str(file)) == [["rows.jsonl", 9, 5]] and file_versions("someone/rows") == []
    assert file_versions(str(file.parent)) == file_versions(f"{file.parent}/../d") == [["d/rows.jsonl", 9, 5]]
    file.write_text("y" * 9)
    assert file_versions(str(file))[0][2] > 5


def test_run_that_trained_nothing_does_not_keep_its_folder(tmp_path, error_of):
    """It died before its first checkpoint, perhaps because of a wrong data set. What it read is of no use."""
    claim(tmp_path, IDENTITY)
    (tmp_path / "data.json").touch()
    other = IDENTITY | {"datasets": ["b"], "data_files": [], "model": "b"}
    claim(tmp_path, other)
    assert read(tmp_path, "run.json") == other and not (tmp_path / "data.json").exists()
    (tmp_path / "model.safetensors").touch()
    assert "model b" in error_of(claim, tmp_path, IDENTITY)


def test_only_what_a_rehearsal_has_trained_is_deleted(tmp_path):
    """A real run can be in a folder below it."""
    begin_training(tmp_path)
    begin_training(tmp_path / "mine")
    for name in ("model.safetensors", "train_results.json"):
        (tmp_path / name).touch()
    of_claim.delete_training(tmp_path)
    assert not folder.has_trained(tmp_path) and (tmp_path / "mine/checkpoint-5").is_dir()


def test_run_is_finished_when_it_has_trained_as_far_as_is_asked_for(tmp_path):
    early = {"stopped_early_of": [20, 3.0]}  # by a callback
    for more, asked, is_finished in (
        ({}, (10, 3.0), True),
        ({}, (11, 3.0), False),
        ({}, (-1, 1.0), True),
        ({}, (-1, 2.0), False),
        (early, (20, 3.0), True),
        (early, (30, 3.0), False),
    ):
        folder.write_json(tmp_path / "train_results.json", RESULTS | more)
        assert bool(of_claim.finished_results(tmp_path, *asked)) == is_finished
    assert not of_claim.finished_results(tmp_path / "none", 10, 3.0)


def test_finished_run_exits(tmp_path, capsys, error_of):
    folder.write_json(tmp_path / "run.json", IDENTITY)
    folder.write_json(tmp_path / "train_results.json", RESULTS | {"global_batch_size": 8})  # a result here, no setting
    for identity in (IDENTITY, with_settings(logging_steps=5, max_steps=8)):  # which do not matter for what is finished
        with pytest.raises(SystemExit) as end:
            of_claim.exit_if_finished(tmp_path, identity, 10, 3.0)
        assert end.value.code == 0
        assert "10 steps" in capsys.readouterr().out
    trained_otherwise = with_settings(learning_rate=2e-3, max_length=64)  # which would train nothing
    message = error_of(of_claim.exit_if_finished, tmp_path, trained_otherwise, 10, 3.0)
    assert "learning_rate 0.002" in message and "max_length 64" in message
    assert "checkpoints were deleted" in error_of(of_claim.exit_if_finished, tmp_path, IDENTITY, 11, 3.0)
    (tmp_path / "checkpoint-5").mkdir()
    of_claim.exit_if_finished(tmp_path, IDENTITY, 11, 3.0)  # it resumes


def test_checkpoints_are_ordered_by_step(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", "damaged-checkpoint-11"):
        (tmp_path / name).mkdir()
    assert [path.name for path in folder.checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-9"]
    assert folder.newest_complete_checkpoint(tmp_path) is None
    assert "No checkpoint" in folder.resume_hint(tmp_path)
    (tmp_path / "checkpoint-9" / folder.COMPLETION_MARKER).touch()
    assert folder.newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    assert str(tmp_path / "checkpoint-9") in folder.resume_hint(tmp_path)
