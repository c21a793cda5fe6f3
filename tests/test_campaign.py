"""A few trials of campaign.py; benchmarks/README.md has the results of many."""

import subprocess
import sys

from conftest import ROOT, slow


@slow
def test_kill_damage_and_signal(environment, tmp_path):
    command = [sys.executable, ROOT / "tests/campaign.py", "3", "5"]
    process = subprocess.run(command, env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "3 trials, 0 failed" in process.stdout
