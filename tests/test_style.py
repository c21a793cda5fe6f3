"""Python and shell are clean by the tools everybody uses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        [BIN / "ruff", "check", "."],
        [BIN / "ruff", "format", "--check", "."],
        [BIN / "shellcheck", "launch.sh", ".ci/run"],
    ],
    ids=["ruff check", "ruff format", "shellcheck"],
)
def test_clean(command):
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_commands_of_the_environment_have_a_path():
    """They are not in PATH: `.venv/bin/hf`, or the path of the Python that runs."""
    command = re.compile(
        r"(?<![\w/])(?<!python -m )(?<!executable\} -m )(?:hf (?:auth|upload|download)|pip install|lm_eval --|trackio show|"
        r"accelerate (?:to-fsdp2|launch --config_file accelerate_configs)|torchrun --)"
    )
    files = [*ROOT.glob("recipes/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    assert command.search("`hf auth login`") and not command.search("`.venv/bin/hf auth login`")
    assert not [f"{file.name}: {match[0]}" for file in files for match in command.finditer(file.read_text())]
