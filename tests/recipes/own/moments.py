"""A small network whose processes record the moments of a run, for tests/start/test_ends.py.

Each moment is a line of JSON in $MOMENTS/moments.jsonl. $ACTS is a list of [moment, rank, Python] as JSON: a process executes
this Python at the moment. Rank -1 is every process. "step 3" is the end of the third step.
"""

import json
import os
import sys  # noqa: F401 (for $ACTS)
import time
from dataclasses import dataclass
from pathlib import Path

from harness import parse, train

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

FILE, ACTS = Path(os.environ["MOMENTS"], "moments.jsonl"), json.loads(os.environ.get("ACTS", "[]"))


def reach(moment: str, **values):
    rank = int(os.environ.get("RANK", "0"))
    record = {"moment": moment, "rank": rank, "pid": os.getpid(), **values}
    with FILE.open("a") as file:
        file.write(json.dumps(record) + "\n")
    for name, number, act in ACTS:
        if name == moment and number in (-1, rank):
            exec(act)


def fail():
    raise AssertionError("mine")


@dataclass
class Arguments(TrainingArguments):
    def __post_init__(self):
        reach("arguments")
        super().__post_init__()


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Moments(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(float(os.environ.get("SECONDS_PER_STEP", "0")))
        reach(f"step {state.global_step}")

    def on_save(self, args, state, control, **kwargs):
        reach("save", step=state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        reach("trained", step=state.global_step)


def main():
    reach("recipe")
    _, training_args, _ = parse(Arguments, per_device_train_batch_size=2, learning_rate=0.1, logging_steps=1, report_to="none")
    reach("parsed")
    points = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    rows = Dataset.from_dict({"x": points.tolist(), "labels": (points[:, 0] > 0).long().tolist()})
    trainer = Trainer(model=Network(), args=training_args, train_dataset=rows, callbacks=[Moments()])
    reach("built")
    train(trainer)


if __name__ == "__main__":
    main()
