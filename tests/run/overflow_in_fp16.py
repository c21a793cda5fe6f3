"""A recipe for test_checkpoints.py: an fp16 run whose gradients overflow in several steps, because its scale grows every two."""

import runpy
from pathlib import Path

import harness

from accelerate.utils import GradScalerKwargs


def train(trainer):
    trainer.accelerator.scaler_handler = GradScalerKwargs(init_scale=2.0**20, growth_interval=2)
    train_as_usual(trainer)


train_as_usual, harness.train = harness.train, train
runpy.run_path(str(Path(__file__).parents[2] / "recipes/gpt2_xl_wikitext.py"), run_name="__main__")
