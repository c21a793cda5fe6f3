"""A run's folder: claimed once, refused to others, finished as far as asked."""

import subprocess
import sys

from harness import folder

import pytest
from conftest import ROOT, read

IDENTITY = dict.fromkeys(("recipe", "model", "dataset", "dataset_config", "use_peft", "load_in_4bit"), "a")
IDENTITY |= dict.fromkeys(("recipe_digest", "data_digest"), "a") | {"max_samples": None, "max_eval_samples": 16}
IDENTITY |= {"tiny": False, "config": "c", "sharded": True}


def take(run, identity, is_default):
    folder.check(run, identity, is_default)
    folder.claim(run, identity, is_default)


class TestRunFolder:
    def test_is_claimed_once(self, tmp_path):
        take(tmp_path / "new/run", IDENTITY, False)
        assert read(tmp_path / "new/run", "run.json") == IDENTITY
        take(tmp_path / "new/run", IDENTITY, False)

    @pytest.mark.parametrize("key", ["recipe", "model", "dataset", "dataset_config", "tiny", "use_peft", "load_in_4bit"])
    def test_of_another_run_is_refused(self, tmp_path, says, key):
        take(tmp_path / "run", IDENTITY, False)
        message = says(take, tmp_path / "run", IDENTITY | {key: True}, False)
        assert key in message and "--output_dir" in message
        assert read(tmp_path / "run", "run.json") == IDENTITY

    def test_with_files_of_somebody_else_is_refused(self, tmp_path, says):
        (tmp_path / "thesis.tex").touch()
        assert "not a run" in says(take, tmp_path, IDENTITY, False)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_in_use_by_another_run(self, tmp_path, says):
        take(tmp_path / "run", IDENTITY, False)
        held = folder.lock(tmp_path / "run")
        assert "another run is writing" in says(take, tmp_path / "run", IDENTITY, False)
        held.release()
        take(tmp_path / "run", IDENTITY, False)

    def test_that_cannot_be_written(self, tmp_path, says):
        (tmp_path / "file").touch()
        assert "cannot be written" in says(take, tmp_path / "file" / "run", IDENTITY, False)

    def test_belongs_to_one_of_those_that_begin_at_the_same_moment(self, tmp_path):
        script = (
            f"import sys; sys.path.insert(0, {str(ROOT / 'recipes')!r}); from pathlib import Path\n"
            "from harness import folder\n"
            f"run, mine = Path({str(tmp_path / 'run')!r}), {IDENTITY!r} | {{'recipe': sys.argv[1]}}\n"
            "folder.check(run, mine, False); print(flush=True); sys.stdin.readline(); folder.claim(run, mine, False)"
        )
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        runs = [subprocess.Popen([sys.executable, "-c", script, f"{number}"], text=True, **pipes) for number in range(6)]
        for run in runs:
            run.stdout.readline()  # all have checked
        for run in runs:
            run.stdin.write("\n")
            run.stdin.flush()
        said = [run.communicate()[1] for run in runs]
        assert sorted(run.returncode for run in runs) == [0, 2, 2, 2, 2, 2], said
        owner = next(number for number, run in enumerate(runs) if run.returncode == 0)
        assert read(tmp_path / "run", "run.json")["recipe"] == str(owner)
        assert all(line.startswith("error: ") and line.count("\n") == 1 for line in said if line)

    def test_a_rehearsal_with_another_config_steps_aside(self, tmp_path, capsys):
        run = tmp_path / "run"
        take(run, IDENTITY | {"tiny": True, "config": "old"}, True)
        (run / "model.safetensors").write_text("weights")
        take(run, IDENTITY | {"tiny": True, "config": "new"}, True)
        assert (tmp_path / "run.old/model.safetensors").read_text() == "weights"
        assert read(run, "run.json")["config"] == "new" and not (run / "model.safetensors").exists()
        assert "run.old" in capsys.readouterr().out

    @pytest.mark.parametrize("key", ["recipe_digest", "data_digest"])
    def test_a_rehearsal_of_what_was_edited_begins_anew(self, tmp_path, key):
        run = tmp_path / "run"
        for digest in ("before", "after"):
            take(run, IDENTITY | {"tiny": True, key: digest}, True)
            assert not (run / "checkpoint-5").exists()
            (run / "checkpoint-5").mkdir()
        assert (tmp_path / "run.c/checkpoint-5").is_dir()

    def test_data_that_changed_under_a_run(self, tmp_path, says):
        run, others = tmp_path / "run", IDENTITY | {"data_digest": "after"}
        take(run, IDENTITY, True)
        take(run, others, True)  # which has not trained on anything yet
        (run / "checkpoint-5").mkdir()
        assert "its rows have changed since" in says(take, run, IDENTITY, True)
        take(run, others, True)

    @pytest.mark.parametrize("key", ["max_samples", "max_eval_samples"])
    def test_other_rows_held_out_or_trained_on(self, tmp_path, says, key):
        take(tmp_path / "run", IDENTITY, True)
        take(tmp_path / "run", IDENTITY | {key: 8}, True)
        (tmp_path / "run/checkpoint-5").mkdir()
        assert f"--{key} 8, this one has" in says(take, tmp_path / "run", IDENTITY, True)

    def test_a_recipe_that_changed_under_a_run(self, tmp_path, capsys):
        take(tmp_path / "run", IDENTITY, True)
        assert "changed" not in capsys.readouterr().out
        take(tmp_path / "run", IDENTITY | {"recipe_digest": "after"}, True)
        assert "a.py has changed since" in capsys.readouterr().out

    def test_a_run_of_an_earlier_version_goes_on(self, tmp_path, capsys):
        digests = ("recipe_digest", "data_digest", "max_samples", "max_eval_samples")
        folder.write_json(tmp_path / "run.json", {key: value for key, value in IDENTITY.items() if key not in digests})
        (tmp_path / "checkpoint-5").mkdir()
        take(tmp_path, IDENTITY, True)
        assert not capsys.readouterr().out

    def test_a_real_run_never_steps_aside(self, tmp_path):
        take(tmp_path / "run", IDENTITY, True)
        (tmp_path / "run/checkpoint-5").mkdir()
        take(tmp_path / "run", IDENTITY | {"config": "new"}, True)
        assert (tmp_path / "run/checkpoint-5").is_dir()

    def test_checkpoints_of_the_other_kind_are_refused(self, tmp_path, says):
        take(tmp_path / "run", IDENTITY, True)
        take(tmp_path / "run", IDENTITY | {"sharded": False, "config": "d"}, True)
        (tmp_path / "run/checkpoint-5").mkdir()
        assert "unsharded checkpoints of d" in says(take, tmp_path / "run", IDENTITY, True)

    def test_finished_means_as_far_as_asked(self, tmp_path):
        assert not folder.finished(tmp_path, 10, 3.0)
        folder.write_json(tmp_path / "train_results.json", {"global_step": 10, "epoch": 1.0})
        assert folder.finished(tmp_path, 10, 3.0) and not folder.finished(tmp_path, 11, 3.0)
        assert folder.finished(tmp_path, -1, 1.0) and not folder.finished(tmp_path, -1, 2.0)
