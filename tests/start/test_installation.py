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
NOT_ACTIVE = "echo 'pyenv: command not found' >&2; exit 127"  # as pyenv answers for a version that is not active


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


@pytest.fixture
def programs(tmp_path):
    """Makes programs of bash in a folder; returns a PATH that begins with it."""

    def make(**scripts):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, script in scripts.items():
            program = folder / name.replace("_", ".", 1).replace("nvidia.smi", "nvidia-smi")
            program.write_text(f"#!/bin/bash\n{script}\n")
            program.chmod(0o755)
        return f"{folder}:/usr/bin:/bin"

    return make


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


def test_torchvision_of_another_build_than_torch(clone):
    """Any program in .venv can import it, and so transformers."""
    folder, call = clone
    call("--install")
    [site] = folder.glob(".venv/lib/python3*/site-packages")
    for file in site.glob("torchvision_operators.*"):
        file.unlink()
    torch = (
        "class library:\n class Library:\n  texts = []\n  def __init__(*args): 0\n  def define(self, text): self.texts += [text]"
    )
    sources = {"torch": torch, "torchvision": "import torch\nassert torch.library.Library.texts, 'no operators'"}
    for name, version in (("torch", "1+cpu"), ("torchvision", "1")):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(sources[name])
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    command = [folder / ".venv/bin/python", "-c", "import torchvision"]
    assert b"no operators" in subprocess.run(command, stderr=subprocess.PIPE).stderr
    (folder / "requirements.txt").write_text("# once more\n")
    call("--install")
    subprocess.run(command, check=True)


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
def test_driver_is_checked_before_the_installation(clone, programs, nvidia_smi, is_too_old):
    """Python is looked for after it, so its error shows that the driver was accepted."""
    folder, call = clone
    path = programs(nvidia_smi=nvidia_smi, python3=OLD, python3_11=OLD, python3_12=OLD, python3_13=OLD)
    words = ["NVIDIA driver is 535.183.01,", "580 or newer", "TORCH_INDEX=https://"] if is_too_old else ["no Python 3.11"]
    assert_one_error(call("--install", PATH=path), *words)
    assert_one_error(call("--install", PATH=path, TORCH_INDEX="https://other"), "no Python 3.11")
    assert not (folder / ".venv").exists()


@pytest.fixture
def recording_python(clone, tmp_path):
    """The script of a Python that makes an environment with itself, and writes the arguments of an installation to a file."""
    folder, _ = clone
    write = f'#!/bin/bash\nprintf "%s\\n" "$0" "$@" >"{tmp_path}/arguments"'
    return f"""case "$*" in
      "-m venv"*) [[ $3 != --clear ]] || rm -r "{folder}/.venv"
        mkdir -p "{folder}/.venv/bin"
        ln -sf "$0" "{folder}/.venv/bin/python" ;;
      "-m pip config list") printf "$PIP_SETTINGS" ;;
      "-m pip install"*"uv==0."*) echo '{write}' >"{folder}/.venv/bin/uv"; chmod +x "{folder}/.venv/bin/uv" ;;
      "-m pip install"*) echo '{write}' | bash -s -- "$@" ;;
      *) exec "{sys.executable}" "$@" ;;
    esac"""


@pytest.mark.parametrize("case", ["uv is there", "uv is installed first", "pip has settings"])
def test_installer(clone, programs, recording_python, tmp_path, case):
    """uv, which is installed first if it is not there; pip if pip has settings that uv would not read."""
    folder, call = clone
    uv = {"uv": f'printf "%s\\n" "$0" "$@" >"{tmp_path}/arguments"'} if case == "uv is there" else {}
    settings = "global.index-url='https://mirror'" if case == "pip has settings" else ""
    call("--install", PATH=programs(python3_11=recording_python, **uv), PIP_SETTINGS=settings)
    program, *words = (tmp_path / "arguments").read_text().splitlines()
    assert words[-4:] == ["-r", str(folder / "requirements.txt"), "-c", str(folder / "constraints.txt")]
    if case == "pip has settings":
        assert words[:3] == ["-m", "pip", "install"]
    else:
        assert program == (f"{tmp_path}/bin/uv" if case == "uv is there" else str(folder / ".venv/bin/uv"))
        assert words[:4] == ["pip", "install", "--python", str(folder / ".venv/bin/python")] and "unsafe-best-match" in words


def test_other_index_of_pytorch(clone, programs, recording_python, tmp_path):
    """It is used despite an old driver, and remembered. The environment is made again for another one."""
    folder, call = clone
    path = programs(nvidia_smi="echo 535.183.01", python3_11=NOT_ACTIVE, python3_12=recording_python)
    installs, marker = "Installing requirements.txt", folder / ".venv/of the first index"

    def index() -> str:
        return (tmp_path / "arguments").read_text().partition("--extra-index-url\n")[2].strip()

    assert installs in call("--install", PATH=path, TORCH_INDEX="https://a").stderr and index() == "https://a"
    marker.touch()
    assert installs not in call("--install", PATH=path).stderr
    (folder / "requirements.txt").write_text("# something else\n")
    assert installs in call("--install", PATH=path).stderr and index() == "https://a" and marker.exists()
    assert installs in call("--install", PATH=path, TORCH_INDEX="https://b").stderr and index() == "https://b"
    assert not marker.exists()


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
