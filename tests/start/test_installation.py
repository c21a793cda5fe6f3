"""launch.sh installs requirements.txt once, again when it changes, and never into somebody else's Python."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, is_one_line


@pytest.fixture
def clone(tmp_path, environment):
    """A copy of the launcher that needs no packages, and a call of it that may install."""
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


def test_installs_once_and_again_when_requirements_change(clone):
    folder, call = clone
    (folder / "requirements.txt").write_text("./no-such-package\n")
    process = call("--test")
    assert process.returncode == 2 and "the same command again" in process.stderr.splitlines()[-1]
    assert not (folder / ".venv/requirements.installed").exists()
    (folder / "requirements.txt").write_text("# nothing\n")
    installs = "Installing requirements.txt"
    assert installs in call("--test").stderr
    python = folder / ".venv/bin/python"
    assert python.exists()
    assert installs not in call("--test").stderr
    (folder / "requirements.txt").write_text("# something else\n")
    assert installs in call("--test").stderr
    # An installation that was cut short, at either of its two steps, is finished by the next call.
    (folder / ".venv/requirements.installed").unlink()
    python.unlink()
    assert installs in call("--test").stderr and python.exists()


def test_a_python_without_venv(clone, tmp_path):
    """As Debian splits it: without python3-venv there is no ensurepip."""
    folder, call = clone
    (tmp_path / "ensurepip.py").write_text("raise ImportError('No module named ensurepip')\n")
    is_one_line(call("--test", PYTHONPATH=str(tmp_path)), "python3 cannot make a virtual environment: install python3-venv")
    assert not (folder / ".venv").exists()


def test_python_of_the_user_installs_nothing(clone):
    folder, call = clone
    bare = shutil.copy(sys.executable, folder / "bare python")
    call("--test", PYTHON=str(bare))
    assert not (folder / ".venv").exists()
    is_one_line(call("--test", PYTHON="/no/python"), "PYTHON=/no/python")
