"""The benchmarks of streams run in their smallest form."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, slow

pytestmark = pytest.mark.unit

BENCHMARKS = ROOT / "benchmarks"
READING = """
if __name__ == "__main__":
    import reading
    reading.main(counts=(1,), rounds=1, documents_per_file=150, steps=2)
"""
WAITING = """
if __name__ == "__main__":
    import waiting
    waiting.main([1_000_000], documents=200, step_count=4)
"""


@pytest.fixture
def run_program(environment, tmp_path):
    """Runs a program that imports benchmarks; returns its lines. Their processes import the program again."""

    def call(text):
        program = tmp_path / "program.py"
        program.write_text(text)
        variables = environment | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(ROOT / "recipes"), str(ROOT / "tests")])}
        process = subprocess.run([sys.executable, program], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout.splitlines()

    return call


@slow
def test_reading(run_program):
    records = [json.loads(line) for line in run_program(READING) if line.startswith("{")]
    assert [record["kind"] for record in records] == ["divided", "large buffers", "parts"]
    assert all(0.9 < record["filled"] <= 1 and record["host_gb"] > 0 for record in records)


@slow
def test_waiting(run_program):
    *_, head, _, row, facts = run_program(WAITING)
    assert head.startswith("| tokens/s of the GPU") and row.startswith("| 1,000,000 | ") and row.count("%, at most") == 2
    assert "cores of" in facts
