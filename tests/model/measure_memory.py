"""A recipe for test_memory_while_loading.py: writes how much private memory each process gains while its model is loaded."""

import json
import runpy
from pathlib import Path

import harness
from harness import runs

import psutil


def private_gb() -> float:
    return psutil.Process().memory_full_info().uss / 1e9


class Measurement:
    """Measures between `load` and `train`, where the recipe builds its trainer."""

    def load(self, script_args):
        datasets = load(script_args)
        self.before = private_gb()
        return datasets

    def train(self, trainer):
        measured = {"gained": private_gb() - self.before, "fsdp_enabled": trainer.is_fsdp_enabled}
        runs.started().trainer = trainer
        Path(trainer.args.output_dir, f"rank{trainer.args.process_index}.json").write_text(json.dumps(measured))


load, measurement = harness.load, Measurement()
harness.load, harness.train = measurement.load, measurement.train
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
