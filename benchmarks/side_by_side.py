"""Compares useful tokens per second of a recipe, a bare PyTorch loop, `trl sft` and the usual loop of guides, in turns.

    .venv/bin/python benchmarks/side_by_side.py                  # on a CPU a small model, some minutes; on a GPU the real one
    .venv/bin/python benchmarks/side_by_side.py --rounds 50

The five processes are alive at once and train in turns, one optimizer step each, so that other load on the machine affects all
alike. A turn lasts from one optimizer step to the next and includes data, logging and callbacks. On a CPU its seconds are those
that the process got of one core. Useful tokens are in the loss and are not padding. All programs have the same model, documents,
batch and learning rate: those of recipes/qwen2_fineweb_edu.py, on a CPU with CPU_SETTINGS.
"""

import argparse
import ast
import itertools
import signal
import statistics
import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import inputs
import sides

TITLES = {
    "recipe": "the recipe, `recipes/qwen2_fineweb_edu.py`",
    "bare_loop": "a bare PyTorch loop over the same packed rows",
    "bare_loop_with_trl_loss": "the same loop with TRL's loss",
    "trl_sft": "TRL's `trl sft` with the same settings",
    "guide": "the usual way in guides: truncate, pad to the full length",
}
GOALS = {"bare_loop": 0.95, "guide": 1.5}  # how many times as many useful tokens per second the recipe should train
CPU_SETTINGS = {
    "max_length": 256,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "use_cpu": True,
    "bf16": False,
}
# The head has as large a share of the parameters as in the real model.
CPU_SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "vocab_size": 12_288,
}
DOCUMENTS = 2000
# Lengths are about those of FineWeb-Edu, in tokens, for rows of 1,024.
MEDIAN_LENGTH, MEAN_LENGTH, ROW_LENGTH = 600, 1000, 1024


def recipe_settings() -> dict[str, Any]:
    """The values that the recipe passes to `parse`, without those that TRL does not know."""
    tree = ast.parse(sides.RECIPE.read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    parse = next(call for call in calls if getattr(call.func, "id", "") == "parse")
    settings = {word.arg: ast.literal_eval(word.value) for word in parse.keywords if word.arg != "dataset_formats"}
    rows_per_step = settings.pop("global_batch_size")
    settings["gradient_accumulation_steps"] = rows_per_step // settings["per_device_train_batch_size"]
    return settings


def measure(context: BaseContext, rounds: int, changes: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Useful tokens per second of each program, and the recipe's as a multiple of each (the median of all rounds)."""
    from harness.rehearsal import tiny

    own = recipe_settings()
    settings = own | changes | {"eval_strategy": "no", "eval_on_start": False}
    with tempfile.TemporaryDirectory() as scratch:
        model, dataset = Path(scratch, "model"), Path(scratch, "data")
        inputs.make_model(settings["model_name_or_path"], model, **sizes)
        tokenizer = tiny.make_tokenizer(tiny.family_of(settings["model_name_or_path"]))
        scale = settings["max_length"] / ROW_LENGTH
        inputs.make_documents(dataset, tokenizer, DOCUMENTS, MEDIAN_LENGTH * scale, MEAN_LENGTH * scale)
        settings |= {"model_name_or_path": str(model), "dataset_name": str(dataset), "output_dir": "run"}
        steps = train_in_turns(context, rounds, own, settings, Path(scratch))
    rates = [{name: tokens / seconds for name, (tokens, seconds) in step.items()} for step in steps]
    tokens = {name: sum(step[name][0] for step in steps) for name in TITLES}
    seconds = {name: sum(step[name][1] for step in steps) for name in TITLES}
    rows = rounds * settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    return {
        "tokens_per_second": {name: round(tokens[name] / seconds[name], 1) for name in TITLES},
        "share_that_trains": {name: round(tokens[name] / (rows * settings["max_length"]), 3) for name in TITLES},
        "recipe_over": {name: round(statistics.median(rate["recipe"] / rate[name] for rate in rates), 3) for name in TITLES},
        "rounds": rounds,
        "numbers": changes,
        "sizes": sizes,
    }


def train_in_turns(
    context: BaseContext, rounds: int, own: dict[str, Any], settings: dict[str, Any], folder: Path
) -> list[dict[str, tuple[int, float]]]:
    """Runs all programs; returns for each round the tokens and seconds of each program's step."""
    flags = {name: value for name, value in settings.items() if own.get(name) != value}  # the recipe has the other values
    connections, processes = {}, {}
    try:
        for name in TITLES:
            connections[name], theirs = context.Pipe()
            given = flags if name == "recipe" else settings
            processes[name] = context.Process(target=sides.run_program, args=(name, theirs, given, folder / name))
            processes[name].start()
            theirs.close()
        for name in TITLES:
            connections[name].recv()  # the first step, which warms up
        steps = [{} for _ in range(rounds)]
        for step, name in itertools.product(steps, TITLES):
            connections[name].send(True)
            step[name] = connections[name].recv()
        return steps
    except EOFError:
        sys.exit(f"error: {name} {how_it_ended(processes[name])}: {(folder / name / 'output.txt').read_text()[-2000:]}")
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def how_it_ended(process: BaseProcess) -> str:
    """In words, with the signal that has killed a process."""
    process.join()
    code = process.exitcode
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has exited with code {code}"


def table(record: dict[str, Any]) -> list[list[str]]:
    """The table of benchmarks/README.md."""
    rows = [["", "useful tokens of a batch", "useful tokens/s", "the recipe's speed ÷ this row's speed", "goal, at least"]]
    for name, title in TITLES.items():
        share, speed, ratio = (record[key][name] for key in ("share_that_trains", "tokens_per_second", "recipe_over"))
        goal = f"{GOALS[name]:.2f} ×" if name in GOALS else ""
        rows.append([title, f"{share:.0%}", f"{speed:,.0f}", f"{ratio:.2f} ×", goal])
    return rows


def send_gpu_features(connection: Connection) -> None:
    """Sends whether this machine has a GPU, and the attention implementation that all five programs can use there."""
    from harness.model.gpu_features import FLASH, find_gpu_features

    import torch

    connection.send((torch.cuda.is_available(), FLASH if FLASH in find_gpu_features()[0] else "sdpa"))


def main(rounds: int, results: Path) -> None:
    from harness.folder import write_json

    context = get_context("spawn")
    ours, theirs = context.Pipe()
    asking = context.Process(target=send_gpu_features, args=(theirs,))
    asking.start()
    has_gpu, attention = ours.recv()
    asking.join()
    if not has_gpu:
        record = measure(context, rounds, CPU_SETTINGS, CPU_SIZES)
    else:
        record = measure(context, rounds, {"attn_implementation": attention}, {})
    command = f"python benchmarks/side_by_side.py --rounds {rounds}"
    record = {"measurement": "side by side", "command": command, **inputs.provenance(), **record}
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / f"side_by_side_{'gpu' if has_gpu else 'cpu'}.json", record)
    for row in table(record):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="optimizer steps of each program")
    parser.add_argument("--results", type=Path, default=inputs.RESULTS, help="folder for the JSON file")
    main(**vars(parser.parse_args()))
