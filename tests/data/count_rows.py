"""A recipe for test_streams.py: counts the rows that each process converts while it trains, into rows_RANK.json of the run."""

import json
import runpy
from pathlib import Path

import harness
from harness.data import formats

from transformers import TrainerCallback

convert = formats.convert


class CountRows(TrainerCallback):
    def __init__(self):
        self.rows = 0
        formats.convert = self.convert

    def convert(self, *args, **kwargs):
        self.rows += 1
        return convert(*args, **kwargs)

    def on_train_begin(self, args, state, control, **kwargs):
        self.rows = 0

    def on_train_end(self, args, state, control, **kwargs):
        Path(args.output_dir, f"rows_{args.process_index}.json").write_text(json.dumps(self.rows))


counter = CountRows()


def train(trainer):
    trainer.add_callback(counter)
    train_as_usual(trainer)


train_as_usual, harness.train = harness.train, train
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
