"""Python and shell are clean by the tools everybody uses."""

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
