"""Python and shell are clean by the tools everybody uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

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


@pytest.mark.xdist_group("together")
def test_workers_keep_groups_together(request):
    """Two of them making the same machines would be in each other's way."""
    assert request.node.nodeid.endswith("@together") == ("PYTEST_XDIST_WORKER" in os.environ)
