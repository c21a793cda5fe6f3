"""The output directory: claimed by one run, refused to others, finished when it has trained as far as is asked for."""

import os
import subprocess
import sys
from pathlib import Path

from harness import folder, restarts
from harness.data.reading import file_versions
from harness.runs import Run

import pytest
from conftest import ROOT
from runs import read

pytestmark = pytest.mark.unit

IDENTITY = dict.fromkeys(("recipe", "model", "dataset", "dataset_config", "dataset_train_split"), "a")
IDENTITY |= dict.fromkeys(("recipe_digest",), "a") | dict.fromkeys(folder.CHOICE_OF_ROWS) | {"max_eval_samples": 16}
IDENTITY |= {
    "data_files": [["d/a.jsonl", 9, 10**9], ["d/b.jsonl", 9, 10**9]],
    "tiny": False,
    "config": "c",
    "sharded": True,
    "use_peft": False,
    "load_in_4bit": False,
    "settings": {"learning_rate": 1e-3, "lora_r": 8, "logging_steps": 1, "max_grad_norm": 0.5, "max_steps": 10},
}
IDENTITY_OF_REHEARSAL = IDENTITY | {"tiny": True}


def claim(run, identity, is_default=False):
    folder.check_output_dir(run, identity, is_default)
    lock = folder.lock_of(run)
    folder.claim_output_dir(lock, identity, is_default)
    lock.release()


def with_settings(**settings):
    return IDENTITY | {"settings": IDENTITY["settings"] | settings}


def begin_training(run):
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-5/complete.json").touch()


def test_claim(tmp_path):
    claim(tmp_path / "new/run", IDENTITY)
    assert read(tmp_path / "new/run", "run.json") == IDENTITY
    claim(tmp_path / "new/run", IDENTITY)


KEYS_OF_ANOTHER_RUN = ["recipe", "model", "dataset", "dataset_config", "dataset_train_split", "tiny", "use_peft", "load_in_4bit"]


@pytest.mark.parametrize("key", KEYS_OF_ANOTHER_RUN)
def test_folder_of_another_run_is_refused(tmp_path, error_of, key):
    claim(tmp_path / "run", IDENTITY)
    begin_training(tmp_path / "run")
    other_files = {"data_files": [["other.jsonl", 9, 10**9]]} if key == "dataset" else {}
    message = error_of(claim, tmp_path / "run", IDENTITY | other_files | {key: True})
    assert key in message and "--output_dir" in message
    assert read(tmp_path / "run", "run.json") == IDENTITY


@pytest.mark.parametrize(("key", "make"), [("model", str), ("dataset", str), ("datasets", lambda path: [str(path), "hub/b"])])
def test_paths_can_be_named_in_another_way(tmp_path, error_of, key, make):
    """By the new path of a folder that was moved."""
    (tmp_path / "here/m").mkdir(parents=True)
    here = tmp_path / "here/m"
    for before, is_same in ((tmp_path / "gone/m", True), (tmp_path / "gone/n", False)):
        run = tmp_path / str(before).replace("/", "-")
        claim(run, IDENTITY | {key: make(before)})
        begin_training(run)
        if is_same:
            claim(run, IDENTITY | {key: make(here)})
            assert read(run, "run.json")[key] == make(here)
        else:
            assert f"holds a run with {key}" in error_of(claim, run, IDENTITY | {key: make(here)})
    (tmp_path / "other/m").mkdir(parents=True)
    claim(tmp_path / "run", IDENTITY | {key: make(tmp_path / "other/m")})
    begin_training(tmp_path / "run")
    assert f"holds a run with {key}" in error_of(claim, tmp_path / "run", IDENTITY | {key: make(here)}), "both are there"


def test_folder_of_another_dataset_of_the_hub_is_refused(tmp_path, error_of):
    claim(tmp_path / "run", IDENTITY | {"data_files": []})
    begin_training(tmp_path / "run")
    assert "dataset a" in error_of(claim, tmp_path / "run", IDENTITY | {"data_files": [], "dataset": "b"})


def test_folder_with_other_files_is_refused(tmp_path, error_of):
    (tmp_path / "thesis.tex").touch()
    assert "not from a run" in error_of(claim, tmp_path, IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_run_file_is_refused(tmp_path, error_of):
    (tmp_path / "run.json").write_text("{")
    assert "damaged" in error_of(claim, tmp_path, IDENTITY)


def test_folder_in_use_is_refused(tmp_path, error_of):
    claim(tmp_path / "run", IDENTITY)
    held = folder.lock_of(tmp_path / "run")
    folder.acquire(held)
    assert "another run is writing" in error_of(claim, tmp_path / "run", IDENTITY)
    held.release()
    claim(tmp_path / "run", IDENTITY)


def test_folder_that_cannot_be_written_is_refused(tmp_path, error_of):
    (tmp_path / "file").touch()
    assert "cannot be written" in error_of(claim, tmp_path / "file" / "run", IDENTITY)
    assert "cannot be written" in error_of(claim, tmp_path / "file", IDENTITY)


def test_one_of_several_simultaneous_runs_gets_the_folder(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'recipes')!r}); from pathlib import Path\n"
        "from harness import folder\n"
        "from harness.messages import exit_on_user_error\n"
        f"run, identity = Path({str(tmp_path / 'run')!r}), {IDENTITY!r} | {{'recipe': sys.argv[1]}}\n"
        "with exit_on_user_error():\n"
        "    folder.check_output_dir(run, identity, False); print(flush=True); sys.stdin.readline()\n"
        "    lock = folder.lock_of(run); folder.claim_output_dir(lock, identity, False)\n"
        "    (run / 'checkpoint-1').mkdir()"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    runs = [subprocess.Popen([sys.executable, "-c", script, f"{number}"], text=True, **pipes) for number in range(6)]
    for run in runs:
        run.stdout.readline()  # all have checked
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    errors = [run.communicate()[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2, 2, 2, 2, 2], errors
    owner = next(number for number, run in enumerate(runs) if run.returncode == 0)
    assert read(tmp_path / "run", "run.json")["recipe"] == str(owner)
    assert all(error.startswith("error: ") and error.count("\n") == 1 for error in errors if error)


def test_earlier_rehearsal_with_another_config_is_deleted(tmp_path, capsys):
    run = tmp_path / "run"
    claim(run, IDENTITY_OF_REHEARSAL | {"config": "old"}, is_default=True)
    (run / "model.safetensors").write_text("weights")
    claim(run, IDENTITY_OF_REHEARSAL | {"config": "new"}, is_default=True)
    assert read(run, "run.json")["config"] == "new" and not (run / "model.safetensors").exists()
    assert "was deleted" in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_rehearsal_with_a_real_run_below_it_is_not_deleted(tmp_path, error_of):
    run = tmp_path / "run"
    claim(run, IDENTITY_OF_REHEARSAL | {"config": "old"}, is_default=True)
    begin_training(run)
    claim(run / "mine", IDENTITY)
    begin_training(run / "mine")
    error_of(claim, run, IDENTITY_OF_REHEARSAL | {"dataset": "other"}, is_default=True)
    assert (run / "mine/checkpoint-5").is_dir()


def test_rehearsal_that_has_started_is_not_deleted(tmp_path, error_of):
    """Two rehearsals start in the default folder and have passed their checks; the first one has claimed it."""
    run, other = tmp_path / "run", IDENTITY_OF_REHEARSAL | {"config": "other"}
    first = folder.lock_of(run)
    folder.claim_output_dir(first, IDENTITY_OF_REHEARSAL, True)
    assert "another run is writing" in error_of(claim, run, other, True)
    assert read(run, "run.json") == IDENTITY_OF_REHEARSAL
    first.release()
    claim(run, other, is_default=True)
    assert read(run, "run.json") == other


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000, "\udcff"])
def test_damaged_json_is_a_user_error(tmp_path, error_of, content):
    (tmp_path / "a.json").write_bytes(content.encode(errors="surrogateescape"))
    message = error_of(folder.read_json, tmp_path / "a.json")
    assert "a.json is damaged" in message


@pytest.mark.parametrize("key", ["recipe_digest", "data_files", "dataset_weights", "use_peft", "model", "max_samples"])
def test_rehearsal_of_another_recipe_dataset_or_kind_starts_over(tmp_path, key):
    run = tmp_path / "run"
    for digest in ("before", "after"):
        value = [["a.jsonl", len(digest), 0]] if key == "data_files" else digest
        claim(run, IDENTITY_OF_REHEARSAL | {key: value}, is_default=True)
        assert not (run / "checkpoint-5").exists()
        begin_training(run)


def test_rehearsal_in_a_given_folder_is_not_deleted(tmp_path):
    claim(tmp_path / "run", IDENTITY_OF_REHEARSAL | {"config": "old"})
    begin_training(tmp_path / "run")
    claim(tmp_path / "run", IDENTITY_OF_REHEARSAL | {"config": "new"})
    assert (tmp_path / "run/checkpoint-5").is_dir()


@pytest.mark.parametrize("is_default", [True, False])
def test_real_run_is_never_deleted(tmp_path, is_default):
    claim(tmp_path / "run", IDENTITY, is_default)
    begin_training(tmp_path / "run")
    claim(tmp_path / "run", IDENTITY | {"config": "new"}, is_default)
    assert (tmp_path / "run/checkpoint-5").is_dir()


@pytest.mark.parametrize("file", [["d/b.jsonl", 8, 10**9], ["d/c.jsonl", 9, 10**9], None], ids=["size", "name", "missing"])
def test_changed_file_is_refused(tmp_path, error_of, file):
    run, changed = tmp_path / "run", IDENTITY | {"data_files": [*IDENTITY["data_files"][:1], *([file] if file else [])]}
    claim(run, changed, is_default=True)
    claim(run, IDENTITY, is_default=True)  # it has not trained yet
    begin_training(run)
    message = error_of(claim, run, changed, is_default=True)
    assert f"{file[0] if file else 'd/b.jsonl'} of a has changed since" in message and "valuation rows" in message


@pytest.mark.parametrize("key", ["dataset", "datasets"])
def test_files_of_another_dataset_have_not_changed(tmp_path, error_of, key):
    identities = []
    for path in (tmp_path / "qa.csv", tmp_path / "support.csv"):
        path.touch()
        name = str(path) if key == "dataset" else [str(path), "other/rows"]
        identities.append(IDENTITY | {key: name, "data_files": file_versions(str(path))})
    claim(tmp_path / "run", identities[0])
    begin_training(tmp_path / "run")
    message = error_of(claim, tmp_path / "run", identities[1])
    assert "qa.csv" in message and "support.csv" in message and "has changed" not in message


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


@pytest.mark.parametrize("key", folder.CHOICE_OF_ROWS)
def test_another_choice_of_rows_is_refused(tmp_path, error_of, key):
    """Rows that were held out would be trained on."""
    run = tmp_path / "run"
    claim(run, IDENTITY, is_default=True)
    value = {"a": 8} if key == "chat_template_kwargs" else 8
    claim(run, IDENTITY | {key: value}, is_default=True)
    begin_training(run)
    message = error_of(claim, run, IDENTITY, is_default=True)
    assert f"a run with --{key} {value}, this run has --{key} " in message and "Evaluation rows" in message


def test_changed_recipe_is_printed(tmp_path, capsys):
    claim(tmp_path / "run", IDENTITY, is_default=True)
    claim(tmp_path / "run", IDENTITY | {"recipe_digest": "before"}, is_default=True)  # nothing was trained
    begin_training(tmp_path / "run")
    assert "changed" not in capsys.readouterr().out
    claim(tmp_path / "run", IDENTITY | {"recipe_digest": "after"}, is_default=True)
    assert "a.py has changed since" in capsys.readouterr().out


def test_run_of_an_earlier_version_resumes(tmp_path, capsys):
    """Its run.json has fewer keys."""
    later_keys = ("recipe_digest", *folder.CHOICE_OF_ROWS)
    folder.write_json(tmp_path / "run.json", {key: value for key, value in IDENTITY.items() if key not in later_keys})
    begin_training(tmp_path)
    claim(tmp_path, IDENTITY, is_default=True)
    assert not capsys.readouterr().out and read(tmp_path, "run.json") == IDENTITY


def test_sharded_run_cannot_resume_from_unsharded_checkpoints(tmp_path, error_of):
    claim(tmp_path / "run", IDENTITY, is_default=True)
    claim(tmp_path / "run", IDENTITY | {"sharded": False, "config": "d"}, is_default=True)
    begin_training(tmp_path / "run")
    assert "unsharded checkpoints of d" in error_of(claim, tmp_path / "run", IDENTITY, is_default=True)


def test_run_is_finished_when_it_has_trained_as_far_as_is_asked_for(tmp_path):
    assert not folder.finished_results(tmp_path, 10, 3.0)
    folder.write_json(tmp_path / "train_results.json", {"global_step": 10, "epoch": 1.0, "final_loss": 2.5})
    assert folder.finished_results(tmp_path, 10, 3.0) and not folder.finished_results(tmp_path, 11, 3.0)
    assert folder.finished_results(tmp_path, -1, 1.0) and not folder.finished_results(tmp_path, -1, 2.0)
    stopped = {"global_step": 10, "epoch": 1.0, "final_loss": 2.5, "stopped_early_of": [20, 3.0]}  # by a callback
    folder.write_json(tmp_path / "train_results.json", stopped)
    assert folder.finished_results(tmp_path, 20, 3.0) and not folder.finished_results(tmp_path, 30, 3.0)


def test_finished_run_exits(tmp_path, capsys, error_of):
    results = {"global_step": 10, "epoch": 1.0, "final_loss": 2.5}
    folder.write_json(tmp_path / "train_results.json", IDENTITY | results)
    for identity in (IDENTITY, with_settings(logging_steps=5, max_steps=8)):  # which do not matter for what is finished
        with pytest.raises(SystemExit) as end:
            folder.exit_if_finished(tmp_path, identity, 10, 3.0)
        assert end.value.code == 0
        printed = capsys.readouterr().out
        assert "10 steps" in printed and "2.5" in printed and "--max_steps" in printed
    assert "checkpoints were deleted" in error_of(folder.exit_if_finished, tmp_path, IDENTITY, 11, 3.0)
    begin_training(tmp_path)
    folder.exit_if_finished(tmp_path, IDENTITY, 11, 3.0)  # it resumes


def test_finished_run_names_other_settings(tmp_path, error_of):
    """They would train nothing."""
    folder.write_json(tmp_path / "train_results.json", IDENTITY | {"global_step": 10, "epoch": 1.0, "final_loss": 2.5})
    given = {"learning_rate": 2e-3, "weight_decay": 0.1, "max_length": 64}
    other = with_settings(**given)
    message = error_of(folder.exit_if_finished, tmp_path, other, 10, 3.0)
    assert all(f"--{name} {value}" in message for name, value in other["settings"].items() if name in given)


def test_finished_rehearsal_with_other_settings_starts_over(tmp_path):
    run = tmp_path / "run"
    claim(run, IDENTITY_OF_REHEARSAL, is_default=True)
    results = IDENTITY_OF_REHEARSAL | {"global_step": 10, "epoch": 1.0, "final_loss": 2.5}
    folder.write_json(run / "train_results.json", results)
    claim(run, with_settings(max_steps=20, logging_steps=2) | {"tiny": True}, is_default=True)  # it continues
    assert (run / "train_results.json").exists()
    claim(run, with_settings(max_length=64) | {"tiny": True}, is_default=True)
    assert not (run / "train_results.json").exists()


def test_all_differences_of_another_run_are_named_at_once(tmp_path, error_of):
    claim(tmp_path, IDENTITY)
    begin_training(tmp_path)
    message = error_of(claim, tmp_path, with_settings(lora_r=16, optim="adafactor") | {"model": "b", "max_samples": 9})
    assert all(words in message for words in ("model b", "--max_samples 9", "--lora_r 16", "--optim adafactor"))
    assert read(tmp_path, "run.json") == IDENTITY


@pytest.mark.parametrize("name", restarts.MUST_BE_EQUAL)
def test_setting_that_must_be_equal(tmp_path, error_of, name):
    """A checkpoint with another one cannot be loaded, or what it has learned would mean something else."""
    claim(tmp_path / "run", with_settings(**{name: ["a", "b"]}))
    begin_training(tmp_path / "run")
    claim(tmp_path / "run", with_settings(**{name: ["b", "a"]}))
    assert f"--{name} b, this run has --{name} c" in error_of(claim, tmp_path / "run", with_settings(**{name: "c"})).replace(
        "b a", "b"
    )


def test_settings_that_may_change(tmp_path, capsys):
    """A line for those that the checkpoint of the optimizer keeps, as run.json then says, and one for those of the loss."""
    claim(tmp_path, IDENTITY)
    begin_training(tmp_path)
    changes = {"max_grad_norm": 1, "lr_scheduler_type": "linear", "learning_rate": 2e-3, "adam_beta1": 0.8, "logging_steps": 9}
    claim(tmp_path, with_settings(**changes))
    of_optimizer, of_loss = capsys.readouterr().out.splitlines()
    for words in ("--learning_rate 0.001, --adam_beta1 not set", "--learning_rate 0.002, --adam_beta1 0.8 has no effect"):
        assert words in of_optimizer
    assert of_loss.startswith("--lr_scheduler_type not set, --max_grad_norm 0.5 until now, --lr_scheduler_type linear")
    used = {"max_grad_norm": 1, "logging_steps": 9, "lr_scheduler_type": "linear"}
    assert read(tmp_path, "run.json") == with_settings(**used)
    claim(tmp_path, with_settings(**used))
    assert not capsys.readouterr().out


def test_schedulers_that_load_no_other_state(tmp_path, error_of):
    claim(tmp_path, IDENTITY)
    begin_training(tmp_path)
    other = with_settings(lr_scheduler_type="reduce_lr_on_plateau")
    assert "--lr_scheduler_type not set, this run has --lr_scheduler_type reduce" in error_of(claim, tmp_path, other)


def test_run_that_trained_nothing_does_not_keep_its_folder(tmp_path, error_of):
    """It died before its first checkpoint, perhaps because of a wrong data set. What it read is of no use."""
    claim(tmp_path, IDENTITY)
    (tmp_path / "data.json").touch()
    other = IDENTITY | {"dataset": "b", "data_files": [], "model": "b"}
    claim(tmp_path, other)
    assert read(tmp_path, "run.json") == other and not (tmp_path / "data.json").exists()
    (tmp_path / "model.safetensors").touch()
    assert "model b" in error_of(claim, tmp_path, IDENTITY)


def test_default_output_dir():
    assert Path(Run("/a/my_recipe.py").default_output_dir) == Path("outputs/my_recipe")
    assert Path(Run("/a/my_recipe.py", tiny=True).default_output_dir) == Path("outputs/tiny/my_recipe")


def test_checkpoints_are_ordered_by_step(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", "damaged-checkpoint-11"):
        (tmp_path / name).mkdir()
    assert [path.name for path in folder.checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-9"]
    assert folder.newest_complete_checkpoint(tmp_path) is None
    assert "No checkpoint" in folder.resume_hint(tmp_path)
    (tmp_path / "checkpoint-9" / folder.COMPLETION_MARKER).touch()
    assert folder.newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    assert str(tmp_path / "checkpoint-9") in folder.resume_hint(tmp_path)
