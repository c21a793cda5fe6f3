"""How long training waits for rows of a stream: the recipe qwen2_fineweb_edu with a model that computes nothing.

    .venv/bin/python benchmarks/waiting.py                            # at two speeds of a GPU
    .venv/bin/python benchmarks/waiting.py --tokens_per_second 12000

A micro-batch "computes" by sleeping as long as a GPU of that speed needs, so the CPU is free for tokenizing and packing, as it
is beside a GPU. The documents are as long as those of FineWeb-Edu and come from a Parquet file. A stream is tokenized and packed
in batches of documents, so most steps wait for nothing, and some for all tokens of a batch. The table has the share of the time
that training waited for rows, and its longest wait: with steps read ahead, as the recipe does, and without.
"""

import argparse
import itertools
import os
import runpy
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import inputs
import sides

STEPS = 120  # of 16,384 tokens: enough to read a thousand documents twice
DOCUMENTS = 4000
MEDIAN_LENGTH, MEAN_LENGTH = 600, 1000  # in tokens, about those of FineWeb-Edu


def run_recipe(connection: Connection, folder: Path, tokens_per_second: int, read_ahead: bool, step_count: int) -> None:
    """Trains in this process; sends the seconds of every step, and how many of them it waited for rows."""
    from harness.run.losses import AgreedReader

    import torch
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer
    from trl import SFTTrainer

    waits, began = [], []
    read = AgreedReader.next_step

    def timed_read(self: AgreedReader, *arguments: object) -> tuple:
        if not read_ahead:
            self.is_stream = False
        start = time.perf_counter()
        batches = read(self, *arguments)
        waits.append(time.perf_counter() - start)
        return batches

    def compute_loss(self: SFTTrainer, model: torch.nn.Module, batch: dict, **options: object) -> torch.Tensor:
        time.sleep(batch["input_ids"].numel() / tokens_per_second)
        return sum(parameter.sum() for parameter in model.parameters()) * 0.0

    class TimeSteps(TrainerCallback):
        def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
            began.append(time.perf_counter())

    AgreedReader.next_step, SFTTrainer.compute_loss = timed_read, compute_loss
    trainer.DEFAULT_CALLBACKS.append(TimeSteps)
    os.chdir(tempfile.mkdtemp(dir=folder))
    settings = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "documents",
        "dataset_config": "sample-10BT",
        "max_steps": step_count,
        "eval_strategy": "no",
        "save_strategy": "no",
        "use_cpu": "true",
        "bf16": "false",
        "output_dir": "run",
    }
    sys.argv = [str(sides.RECIPE)]
    for name, value in settings.items():
        sys.argv += [f"--{name}", str(value)]
    with Path("output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    runpy.run_path(str(sides.RECIPE), run_name="__main__")
    seconds = [after - before for before, after in itertools.pairwise(began)]
    connection.send(list(zip(seconds, waits[1:], strict=False))[1:])


def measure(folder: Path, tokens_per_second: int, read_ahead: bool, step_count: int) -> str:
    """Which share of the time training waited for rows, and the longest wait."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_recipe, args=(theirs, folder, tokens_per_second, read_ahead, step_count))
    process.start()
    theirs.close()
    steps = ours.recv()
    process.join()
    waits = [wait for _, wait in steps]
    return f"{sum(waits) / sum(seconds for seconds, _ in steps):.1%}, at most {max(waits):.2f} s"


def main(speeds: list[int], documents: int = DOCUMENTS, step_count: int = STEPS) -> None:
    from harness.rehearsal import tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.make_model("Qwen/Qwen2-0.5B", folder / "model", is_tiny=True)
        tokenizer = tiny.make_tokenizer(tiny.family_of("Qwen/Qwen2-0.5B"))
        inputs.make_documents(folder / "documents", tokenizer, documents, MEDIAN_LENGTH, MEAN_LENGTH)
        print("| tokens/s of the GPU | waits, read ahead | waits, read when needed |\n|---|---|---|")
        for speed in speeds:
            ahead, when_needed = (measure(folder, speed, read_ahead, step_count) for read_ahead in (True, False))
            print(f"| {speed:,} | {ahead} | {when_needed} |", flush=True)
    facts = inputs.provenance()
    hardware, versions = facts["hardware"], ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{hardware['cores']} cores of {hardware['cpu']}; {versions}; at {facts['commit']}, {facts['date']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens_per_second", type=int, nargs="+", default=[26_000, 50_000], help="speeds of a GPU")
    main(parser.parse_args().tokens_per_second)
