"""launch.sh installs requirements.txt once, again when the file changes, and never into the Python of PYTHON."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, assert_one_error


@pytest.fixture
def clone(tmp_path, environment):
    """A copy of the project with empty requirements; returns its folder and a function that calls its launch.sh."""
    folder = tmp_path / "a clone"
    (folder / "recipes").mkdir(parents=True)
    (folder / "accelerate_configs").mkdir()
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "launch.sh", folder)
    shutil.copytree(ROOT / "recipes/harness", folder / "recipes/harness")
    (folder / "requirements.txt").write_text("# nothing\n")

    def call(*arguments, **variables):
        env = {name: value for name, value in environment.items() if name != "PYTHON"} | variables
        return subprocess.run([folder / "launch.sh", *arguments], env=env, capture_output=True, text=True, timeout=120)

    return folder, call


def test_install_once_and_after_changes(clone):
    folder, call = clone
    (folder / "requirements.txt").write_text("./no-such-package\n")
    process = call("--test")
    assert process.returncode == 2 and "run the same command again" in process.stderr.splitlines()[-1]
    assert not (folder / ".venv/requirements.installed").exists()
    (folder / "requirements.txt").write_text("# nothing\n")
    installs = "Installing requirements.txt"
    assert installs in call("--test").stderr
    python = folder / ".venv/bin/python"
    assert python.exists()
    assert installs not in call("--test").stderr
    (folder / "requirements.txt").write_text("# something else\n")
    assert installs in call("--test").stderr
    # The next call completes an installation that was stopped at either of its two steps.
    (folder / ".venv/requirements.installed").unlink()
    python.unlink()
    assert installs in call("--test").stderr and python.exists()


def test_python_without_venv_is_an_error(clone, tmp_path):
    """On Debian, ensurepip is in a package of its own, python3-venv."""
    folder, call = clone
    (tmp_path / "ensurepip.py").write_text("raise ImportError('No module named ensurepip')\n")
    assert_one_error(call("--test", PYTHONPATH=str(tmp_path)), "python3 cannot make a virtual environment: install python3-venv")
    assert not (folder / ".venv").exists()


def test_nothing_is_installed_into_python_of_user(clone):
    folder, call = clone
    bare = shutil.copy(sys.executable, folder / "bare python")
    call("--test", PYTHON=str(bare))
    assert not (folder / ".venv").exists()
    assert_one_error(call("--test", PYTHON="/no/python"), "PYTHON", "/no/python")
