"""Will it fit, on which cards, how long: simulates a recipe with each config. launch.sh calls it:

`python -m harness.plan.command RECIPE.py CONFIG.yaml… [--json] [--price_per_gpu_hour N] [--card NAME=GB,TFLOPS,GB/s]
[--flag value …]`.

If the run does not fit, changes are tried until it does, each by another simulation.
"""

import contextlib
import dataclasses
import functools
import io
import json
import logging
import math
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import configs, signals
from harness.configs import AccelerateConfig
from harness.hub import file_sizes
from harness.launched import Launched, UserError, exit_on_user_error
from harness.nodes.machines import nodes_from_environment
from harness.start import flags, processes

if TYPE_CHECKING:
    from harness.plan.simulation import Refused, Simulation


def main(recipe: str, *words: str) -> None:
    count = next((number for number, word in enumerate(words) if not word.endswith((".yaml", ".yml"))), len(words))
    paths, (price, as_json, own_cards, arguments) = words[:count], read_own_flags(list(words[count:]))
    flags.check_flags(Path(recipe), arguments)
    read = {path: configs.read(path) for path in paths}
    can_fork = processes.import_libraries()
    warnings.filterwarnings("ignore")
    from harness.plan import cards, pages  # they import torch, which a misspelt flag need not wait for
    from harness.plan.simulation import Refused

    more_cards = tuple(cards.card_of_user(*numbers) for numbers in own_cards)
    # Neither a config nor a proposal changes how many rows an epoch has, so they are counted once.
    rows = functools.cache(lambda: processes.call(can_fork, rows_of_epoch, recipe, arguments)[1])
    plans, found = [], None
    for config in read.values():
        if not as_json:
            pages.print_progress(f"Simulating {Path(recipe).stem} with {config.name} …")
        found = run(can_fork, recipe, config, arguments, optional=len(read) > 1)
        plans.append(found if isinstance(found, Refused) else cards.make_plan(with_steps(found, rows), price, more_cards))
    if as_json:
        shown = [{"config": p.config, "refused": p.reason} if isinstance(p, Refused) else p for p in plans]
        print(json.dumps(shown[0] if len(read) == 1 else shown, indent=2))
    elif len(read) > 1:
        pages.print_side_by_side(plans)
    else:
        pages.print_plan(plans[0])
        print(f"\nPicture: {pages.draw(plans[0], found.curve)}", flush=True)

        def run_again(path: str, more: list[str]) -> "Simulation | Refused":
            pages.print_progress(f"Trying {' '.join([Path(path).stem, *more])} …")
            return run(can_fork, recipe, configs.read(path), [*arguments, *more], optional=True)

        pages.print_proposals(cards.try_proposals(plans[0], found, paths[0], run_again))


CardNumbers = tuple[str, float, float, float]  # name, GB, TFLOPS, GB/s
CARD_FORMAT = "expected NAME=GB,TFLOPS,GB/s with three numbers above 0, for example --card A6000=48,155,768"


def read_own_flags(words: list[str]) -> tuple[float, bool, list[CardNumbers], list[str]]:
    """The values of --price_per_gpu_hour (0 without it), --json and every --card, and the remaining words."""
    price, as_json, own_cards, rest = "0", False, [], []
    with_value = ("--price_per_gpu_hour=", "--card=")
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(with_value) else [word])]
    while words:
        word = words.pop(0)
        if word == "--json":
            as_json = True
        elif word == "--price_per_gpu_hour":
            if not words:
                raise UserError("--price_per_gpu_hour needs a number")
            price = words.pop(0)
            with contextlib.suppress(ValueError):
                if float(price) > 0:
                    continue
            raise UserError(f"--price_per_gpu_hour is {price}, expected a number above 0")
        elif word == "--card":
            own_cards.append(read_card(words.pop(0) if words else ""))
        else:
            rest.append(word)
    return float(price), as_json, own_cards, rest


def read_card(text: str) -> CardNumbers:
    """A card that is not in `cards.CARDS`. Raises UserError unless it has a name and three numbers."""
    name, _, values = text.rpartition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if not name.strip() or len(numbers) != 3 or not all(0 < number < math.inf for number in numbers):
        raise UserError(f"--card is {text!r}, {CARD_FORMAT}")
    return name.strip(), *numbers


def run(
    can_fork: bool, recipe: str, config: AccelerateConfig, arguments: list[str], optional: bool = False
) -> "Simulation | Refused":
    """One simulation in a process of its own. If it is refused, this process exits, or with `optional` returns the reason."""
    launched = fit_processes(recipe, config)
    code, found = processes.call(can_fork, simulate_quietly, launched, config, arguments, optional)
    if found is None:
        sys.exit(processes.explain_exit(code))
    from harness.plan.simulation import Refused

    if isinstance(found, Refused):
        return found
    names = {word.split("=")[0].replace("-", "_") for word in arguments}
    return dataclasses.replace(found, download=download_bytes(found), has_global_batch_flag="__global_batch_size" in names)


def simulate_quietly(
    launched: Launched, config: AccelerateConfig, arguments: list[str], optional: bool
) -> "Simulation | Refused":
    from harness.plan.simulation import Refused, simulate

    logging.disable(logging.WARNING)  # what libraries log about a run does not belong to a plan
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return simulate(launched, config, arguments)
    except UserError as error:
        reason = str(error)
        if not optional:
            raise
    except SystemExit as end:
        reason = messages.getvalue().strip().removeprefix("error: ")
        if not optional or end.code != 2:
            sys.stderr.write(messages.getvalue())
            raise
    return Refused(Path(launched.recipe).stem, config.name, reason)


def fit_processes(recipe: str, config: AccelerateConfig) -> Launched:
    """As many processes and nodes as the config has, or as launch.sh's variables say."""
    nodes = nodes_from_environment()
    count = nodes.count if nodes.count > 1 else config.num_machines
    gpus = nodes.processes or config.num_processes // config.num_machines
    if config.distributed_type == "NO":
        gpus = 1
    if config.is_hybrid and count * gpus != config.replicas * config.shards:
        raise UserError(f"{config.name} is for {config.replicas} nodes with {config.shards} GPUs, not for {count} with {gpus}")
    return Launched(recipe=recipe, config=config.path, processes=count * gpus, nodes=count, on_cpu=True, mode="plan")


def download_bytes(found: "Simulation") -> int:
    """Bytes to download, from the Hub; if it does not answer, those of the parameters. A stream downloads no files."""
    weights = 0 if Path(found.model).is_dir() else file_sizes("model", found.model, (".safetensors",))
    if weights is None:
        weights = found.parameters * found.hub_bytes
    if found.is_streamed or Path(found.dataset).exists():
        return weights
    return weights + (file_sizes("dataset", found.dataset, (".parquet", ".jsonl", ".json", ".csv")) or 0)


def with_steps(found: "Simulation", count_rows: Callable[[], float | None]) -> "Simulation":
    """`found` with the steps of its epochs, if neither a flag nor the recipe sets them and the number of rows is known."""
    if found.max_steps > 0:
        return found
    rows = count_rows()  # packed rows, estimated; only counted if needed
    if not rows:
        return found
    rows_per_step = found.micro_batch * found.accumulation * found.processes
    steps = math.ceil(found.epochs * rows / rows_per_step)
    return dataclasses.replace(found, max_steps=steps, steps_are_estimated=True)


def rows_of_epoch(recipe: str, arguments: list[str]) -> float | None:
    """Packed rows in an epoch of a recipe; None if tokenizer or data cannot be had, or do not say how many rows there are."""
    from harness.commands.preview import build_preview

    launched = Launched(recipe=recipe, mode="preview", on_cpu=True)
    messages: Any = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="plan-") as output_dir:
        words = [*arguments, "--disable_tqdm", "true", "--output_dir", output_dir]
        with contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
            try:
                _, rows, _ = build_preview(launched, words)
            except SystemExit:
                return None
    epoch = rows.epoch()
    return epoch[0] if epoch else None


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed on a GPU
    code = 0
    signals.set_interrupt_handler(signal.default_int_handler)
    try:
        with exit_on_user_error():
            main(*sys.argv[1:])
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    processes.exit_quickly(code or 0)
