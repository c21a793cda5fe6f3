"""A recipe for test_checkpoints.py: two nodes that see different folders look for the newest complete checkpoint.

The working directory of process RANK is RANK in each folder of the variable VIEWS. Each process writes what it has found into
found.txt there.
"""

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import harness
from harness.run.checkpoints import recover_checkpoints
from harness.runs import started


def find(trainer):
    started().trainer = trainer  # as `train` does
    for view in json.loads(os.environ["VIEWS"]):
        os.chdir(Path(view, str(trainer.args.process_index)))
        Path("found.txt").write_text(str(recover_checkpoints(SimpleNamespace(output_dir="run"))))
    trainer.end()


if "RANK" in os.environ:
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
harness.train = find
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
