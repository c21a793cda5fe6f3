from dataclasses import dataclass, field

from harness import parse, train

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments


@dataclass
class Arguments(TrainingArguments):
    width: int = field(default=8, metadata={"help": "Units of the hidden layer."})


class Network(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    _, training_args, _ = parse(
        Arguments, output_dir="outputs/mine", eval_strategy="steps", eval_on_start=True, per_device_train_batch_size=4
    )
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    rows = Dataset.from_dict({"x": points.tolist(), "labels": (points[:, 0] > 0).long().tolist()})
    trainer = Trainer(
        model=Network(training_args.width),
        args=training_args,
        train_dataset=rows.select(range(32)),
        eval_dataset={"small": rows.select(range(32, 36)), "large": rows.select(range(32, 40))},
        compute_metrics=accuracy,
    )
    train(trainer)


if __name__ == "__main__":
    main()
