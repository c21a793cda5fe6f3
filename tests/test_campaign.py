"""A sample of the campaign; docs/a-run-and-its-folder.md has the result of a long one."""

import subprocess
import sys

from conftest import ROOT


def test_a_kill_a_damage_and_a_signal(environment, tmp_path):
    command = [sys.executable, ROOT / "tests/campaign.py", "3", "5"]
    process = subprocess.run(command, env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "| full, 1 process | 1 | 1 | 1 |" in process.stdout and "3 trials, 0 failed" in process.stdout
