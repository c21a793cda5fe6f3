"""launch.sh installs requirements.txt once, again when the file changes, and never into the Python of PYTHON.

It looks at Python and the NVIDIA driver first.
"""

import shutil
import subprocess
import sys

import pytest
import write_constraints
from conftest import ROOT, slow
from payloads import ran, write_modules
from runs import assert_one_error

pytestmark = slow  # installs

OLD = 'case "$1" in --version) echo "Python 3.10.13" ;; *) exit 1 ;; esac'


@pytest.fixture
def clone(tmp_path, environment):
    """A copy of the project with empty requirements; returns its folder and a function that calls its launch.sh."""
    folder = tmp_path / "a clone"
    (folder / "recipes").mkdir(parents=True)
    (folder / "accelerate_configs").mkdir()
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "launch.sh", folder)
    for package in ("harness", "planner"):
        shutil.copytree(ROOT / "recipes" / package, folder / "recipes" / package)
    (folder / "requirements.txt").write_text("# nothing\n")
    (folder / "constraints.txt").write_text("# nothing\n")

    def call(*arguments, **variables):
        env = {name: value for name, value in environment.items() if name != "PYTHON"}
        env |= {"PIP_NO_INPUT": "1"} | variables  # with a setting of pip, uv is not installed
        return subprocess.run([folder / "launch.sh", *arguments], env=env, capture_output=True, text=True, timeout=120)

    return folder, call


def test_install_once_and_after_changes(clone, tmp_path, monkeypatch):
    """The installation imports pip, venv and others, but no file of the working directory."""
    folder, call = clone
    write_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    (folder / "requirements.txt").write_text("./no-such-package\n")
    process = call("--install")
    assert process.returncode == 2 and "run the same command again" in process.stderr.splitlines()[-1]
    assert not (folder / ".venv/installed.txt").exists()
    (folder / "requirements.txt").write_text("# nothing\n")
    installs = "Installing requirements.txt"
    assert installs in call("--install").stderr
    python = folder / ".venv/bin/python"
    assert python.exists()
    assert installs not in call("--install").stderr
    (folder / "requirements.txt").write_text("# something else\n")
    assert installs in call("--install").stderr
    # The next call completes an installation that was stopped at either of its two steps.
    (folder / ".venv/installed.txt").unlink()
    python.unlink()
    assert installs in call("--install").stderr and python.exists()
    assert ran(tmp_path) == []


@pytest.mark.parametrize(
    ("nvidia_smi", "is_too_old"),
    [
        ("echo 535.183.01; echo 535.183.01", True),
        ("echo 580.65.06", False),
        ("echo 'NVIDIA-SMI has failed'; exit 9", False),
        ("echo '[N/A]'", False),
    ],
    ids=["old", "new", "failing", "without a number"],
)
def test_driver_is_checked_before_the_installation(clone, tmp_path, nvidia_smi, is_too_old):
    """Python is looked for after it, so its error shows that the driver was accepted."""
    folder, call = clone
    for name, script in ("nvidia-smi", nvidia_smi), *((f"python3{minor}", OLD) for minor in ("", ".11", ".12", ".13")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    words = ["NVIDIA driver is 535.183.01,", "580 or newer", "TORCH_INDEX=https://"] if is_too_old else ["no Python 3.11"]
    assert_one_error(call("--install", PATH=path), *words)
    assert_one_error(call("--install", PATH=path, TORCH_INDEX="https://other"), "no Python 3.11")
    assert not (folder / ".venv").exists()


def test_constraints_are_the_installed_versions():
    """Those that the tests run with. With them, pip has nothing to change."""
    assert (ROOT / "constraints.txt").read_text() == write_constraints.content(), "run tests/start/write_constraints.py"
    files = ["-r", "requirements.txt", "-c", "constraints.txt"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--disable-pip-version-check", *files]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0 and "Would install" not in process.stdout, process.stdout + process.stderr


def test_nothing_is_installed_into_python_of_user(clone):
    folder, call = clone
    bare = shutil.copy(sys.executable, folder / "bare python")
    call("--install", PYTHON=str(bare))
    assert not (folder / ".venv").exists()
    assert_one_error(call("--install", PYTHON="/no/python"), "PYTHON", "/no/python")
