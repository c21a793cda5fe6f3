"""A recipe for test_memory_while_loading.py: writes how much private memory each process gains while its model is loaded.

It measures between `load` and `train`, where the recipe builds its trainer.
"""

import json
import runpy
from pathlib import Path

import harness
from harness import runs

import psutil


def load_and_measure(script_args):
    datasets = load(script_args)
    before.append(psutil.Process().memory_full_info().uss)
    return datasets


def train(trainer):
    gained = (psutil.Process().memory_full_info().uss - before[0]) / 1e9
    runs.started().trainer = trainer
    text = json.dumps({"gained": gained, "fsdp_enabled": trainer.is_fsdp_enabled})
    Path(trainer.args.output_dir, f"rank{trainer.args.process_index}.json").write_text(text)


load, before = harness.load, []
harness.load, harness.train = load_and_measure, train
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
