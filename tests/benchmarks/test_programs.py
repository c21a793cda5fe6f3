"""The benchmark of other programs runs in its smallest form; README has the table of the committed result."""

import json
import os
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, slow

pytestmark = pytest.mark.unit

BENCHMARKS = ROOT / "benchmarks"
SIDE_BY_SIDE = """
if __name__ == "__main__":
    import pathlib, side_by_side
    side_by_side.CPU_SIZES = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=2048
    )
    side_by_side.DOCUMENTS = 400
    side_by_side.main(2, pathlib.Path())
"""


@slow
def test_all_programs_train_in_turns(environment, tmp_path):
    """Their processes import the program again."""
    program = tmp_path / "program.py"
    program.write_text(SIDE_BY_SIDE)
    variables = environment | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(ROOT / "recipes"), str(ROOT / "tests")])}
    process = subprocess.run([sys.executable, program], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    record = json.loads((tmp_path / "side_by_side_cpu.json").read_text())
    assert all(rate > 0 for rate in record["tokens_per_second"].values()) and record["recipe_over"]["recipe"] == 1
    share = record["share_that_trains"]
    assert 0.2 < share.pop("guide") < 0.85  # eight documents, truncated and padded
    assert len(share) == 4 and all(0.9 < packed <= 1 for packed in share.values())


def test_docs_have_the_table_of_the_committed_result():
    sys.path.insert(0, str(BENCHMARKS))
    program = runpy.run_path(str(BENCHMARKS / "side_by_side.py"))
    record = json.loads((BENCHMARKS / "results/side_by_side_cpu.json").read_text())
    page = (BENCHMARKS / "README.md").read_text()
    for row in program["table"](record):
        assert "| " + " | ".join(row) + " |" in page
    assert record["date"] in page and all(f"{name} {record['versions'][name]}" in page for name in ("torch", "trl"))
