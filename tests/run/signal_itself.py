"""A recipe for test_stopping.py: each process sends itself the signals of the variable SIGNALS.

It has a list of [rank, event of a callback, number of finished steps, name of the signal], as JSON.
"""

import json
import os
import runpy
import signal
from pathlib import Path

import harness

from transformers import TrainerCallback


class SignalItself(TrainerCallback):
    def on_event(self, event, args, state, control, **kwargs):
        for rank, *moment, name in json.loads(os.environ["SIGNALS"]):
            if [args.process_index, event, state.global_step] == [rank, *moment]:
                os.kill(os.getpid(), signal.Signals[name])

    def on_step_begin(self, *args, **kwargs):
        self.on_event("step begins", *args, **kwargs)

    def on_prediction_step(self, *args, **kwargs):
        self.on_event("batch is evaluated", *args, **kwargs)

    def on_save(self, *args, **kwargs):
        print("A checkpoint is written.")
        self.on_event("checkpoint is written", *args, **kwargs)


def train(trainer):
    trainer.add_callback(SignalItself())
    train_as_usual(trainer)


train_as_usual, harness.train = harness.train, train
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
