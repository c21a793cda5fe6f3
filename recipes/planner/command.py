"""Will it fit, on which cards, how long: simulates a recipe with each config. launch.sh calls it:

`python -m planner.command RECIPE.py CONFIG.yaml… [--json] [--card NAME=GB,TFLOPS,GB/s] [--flag value …]`.

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
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import configs
from harness.configs import AccelerateConfig
from harness.hub import use_cache_if_unreachable
from harness.messages import UserError, exit_on_user_error, last_line
from harness.nodes.cluster import nodes_from_environment
from harness.nodes.hardware import physical_cores
from harness.runs import GpuFeatures, Run
from harness.signals import set_interrupt_handler
from planner import processes
from planner.arguments import PlanArguments, read_arguments
from planner.hardware import find_gpus
from planner.values import values_of_recipe

if TYPE_CHECKING:
    from planner.cards import Card
    from planner.grid import Grid, Option
    from planner.machines import Machine
    from planner.simulation import Refused, Simulation

DEFAULT_MACHINE = "1x3090"  # of a rehearsal on a machine without a GPU


def main(*words: str) -> None:
    arguments = read_arguments(words)
    use_cache_if_unreachable()
    plan = plan_choice if arguments.start or arguments.machine else plan_configs
    plan(str(arguments.recipe), arguments.configs, arguments, arguments.flags)


def plan_configs(recipe: str, paths: list[str], plan_flags: PlanArguments, arguments: list[str]) -> None:
    """Prints the plan of one config, or of several side by side. With --card it is not about the GPUs of this machine."""
    read = [configs.read(path) for path in paths]
    gpus = [] if plan_flags.cards else find_gpus()
    environment = hide_gpus()
    method = start_server()
    from planner import cards, pages, proposals, summary  # they import torch, which a misspelt flag need not wait for
    from planner.simulation import Refused

    read_values(method, recipe, arguments)  # a misspelt flag is one error, before anything is simulated
    all_cards = known_cards(plan_flags)
    here = {cards.card_of_gpu(gpu.name, gpu.memory, gpu.capability >= 8, all_cards) for gpu in gpus}
    for own in here:
        if unknown := cards.describe_unknown(own, all_cards):
            pages.print_progress(unknown)
            all_cards = (*all_cards, own)
    no_triton = why_not_triton(method, environment) if gpus else ""

    def run_with(config: AccelerateConfig) -> Run:
        return dataclasses.replace(fit_processes(recipe, config), gpu=GpuFeatures([], no_triton=no_triton))

    count_rows = row_counter(method, recipe, arguments)
    simulations = []
    plans: list[Any] = []
    for config in read:
        if not plan_flags.json:
            pages.print_progress(f"Simulating {Path(recipe).stem} with {config.name} …")
        simulation = simulate_in_process(method, run_with(config), arguments, optional=len(read) > 1)
        simulations.append(simulation)
        if isinstance(simulation, Refused):
            plans.append(simulation)
        else:
            plans.append(summary.make_plan(with_steps(simulation, count_rows), all_cards))

    refused = [plan.reason for plan in plans if isinstance(plan, Refused)]
    if len(refused) == len(read):
        raise UserError(f"{Path(recipe).stem} cannot be simulated with any config: {max(refused, key=refused.count)}")
    if plan_flags.json:
        shown = [{"config": p.config, "refused": p.reason} if isinstance(p, Refused) else p for p in plans]
        print(json.dumps(shown[0] if len(read) == 1 else shown, indent=2))
    elif len(read) > 1:
        pages.print_side_by_side(plans)
    else:
        card = proposals.card_of_config(paths[0], all_cards)
        pages.print_plan(plans[0], {card.name, *(of_gpu.name for of_gpu in here)})
        print(f"\nPicture: {pages.draw(plans[0], simulations[0].curve)}", flush=True)

        def simulate_change(path: str, flags_of_change: list[str]) -> "Simulation | Refused":
            pages.print_progress(f"Trying {' '.join([Path(path).stem, *flags_of_change])} …")
            return simulate_in_process(method, run_with(configs.read(path)), [*arguments, *flags_of_change], optional=True)

        pages.print_proposals(proposals.try_proposals(plans[0], simulations[0], paths[0], simulate_change, card))


def known_cards(plan_flags: PlanArguments) -> tuple["Card", ...]:
    """The cards of --card, then all others."""
    from planner import cards

    return (*(cards.card_of_user(*numbers) for numbers in plan_flags.cards), *cards.CARDS)


def start_server() -> str:
    """Imports what a simulation needs; returns how to start processes."""
    method = processes.start_server()
    warnings.filterwarnings("ignore")
    return method


def read_values(method: str, recipe: str, arguments: list[str]) -> dict[str, Any]:
    """The values of a recipe with these flags, see `values_of_recipe`. Exits if the recipe refuses them."""
    code, values = processes.call(method, values_of_recipe, recipe, arguments)
    if values is None:
        sys.exit(processes.explain_exit(code))
    return values


def simulate_in_process(method: str, run: Run, arguments: list[str], optional: bool = False) -> "Simulation | Refused":
    """One simulation in a process of its own. If it is refused, this process exits, or with `optional` returns the reason."""
    code, simulation = processes.call(method, simulate_quietly, run, arguments, optional)
    if simulation is None:
        sys.exit(processes.explain_exit(code))
    from planner.simulation import Refused

    if isinstance(simulation, Refused):
        return simulation
    return dataclasses.replace(simulation, download=download_bytes(simulation))


def simulate_quietly(run: Run, arguments: list[str], optional: bool, with_evaluation: bool = True) -> "Simulation | Refused":
    """A simulation without the output of libraries; if the run is refused and that is `optional`, the reason."""
    from planner.simulation import Refused, simulate

    logging.disable(logging.WARNING)  # what libraries log about a run does not belong to a plan
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return simulate(run, arguments, with_evaluation=with_evaluation)
    except UserError as error:
        reason = str(error)
        if not optional:
            raise
    except Exception as error:
        if not any(frame.filename == run.recipe for frame in traceback.extract_tb(error.__traceback__)):
            raise  # a bug of the simulation
        raise UserError(
            f"{Path(run.recipe).name} cannot be simulated, because a simulation has no values: {type(error).__name__}: "
            f"{last_line(error)}. Rehearse it with --tiny (--debug shows the traceback)"
        ) from error
    except SystemExit as end:
        reason = messages.getvalue().strip().removeprefix("error: ")
        if not optional or end.code != 2:
            sys.stderr.write(messages.getvalue())
            raise
    return Refused(Path(run.recipe).stem, run.config.name, reason)


def plan_choice(recipe: str, paths: list[str], plan_flags: PlanArguments, arguments: list[str]) -> None:
    """Chooses for the machine of --for, or for this one, and prints the choice; with --start, starts it."""
    gpus = [] if plan_flags.machine else find_gpus()
    if plan_flags.start:
        check_start(Path(recipe).stem, plan_flags, gpus)
    environment = hide_gpus()
    method = start_server()
    from planner import choose, chosen, launches, machines, pages, summary
    from planner.grid import given_flags, make_grid

    all_cards = known_cards(plan_flags)
    if gpus:
        machine = machines.this_machine(gpus, all_cards, launches.measured_launch(environment))
        no_triton = why_not_triton(method, environment)
    else:
        machine = machines.read_machine(plan_flags.machine or DEFAULT_MACHINE, all_cards)
        no_triton = ""
    values = read_values(method, recipe, arguments)
    grid = make_grid(values, machine, paths, arguments)._replace(no_triton=no_triton)
    if grid.idle:
        pages.print_progress(f"{machine.name}: {grid.idle}.")
    words = [*arguments, *grid.common_flags]
    simulate = functools.partial(simulate_options, method, recipe, grid, words, is_quiet=plan_flags.json)
    candidates, simulations = choose.choose(machine, grid, simulate)
    if not candidates:
        proposed = propose_changes(method, recipe, machine, grid, words, simulations)
        print_chosen({"machine": machine.name, "config": None, "proposals": proposed}, plan_flags.json)
        if plan_flags.start:
            raise UserError(
                f"{Path(recipe).stem} fits no config of this machine with its margin: see above what would make it fit"
            )
        return
    count_rows = row_counter(method, recipe, arguments)
    about_compiling = ""
    if not (plan_flags.tiny or values["torch_compile"] or given_flags(arguments) & {"torch_compile", "config"}):
        options = grid.settings[candidates[0].option.setting]
        simulate_compiled = functools.partial(simulate_options, method, recipe, grid, words, is_quiet=True)

        def count_steps(simulation: "Simulation") -> int:
            return with_steps(simulation, count_rows).max_steps

        compiled, about_compiling = choose.weigh_compiling(
            machine, candidates[0], options, values, simulate_compiled, count_steps
        )
        if compiled:
            candidates = [compiled, *candidates]
    best = candidates[0].option
    simulation = candidates[0].simulation
    if not plan_flags.start:  # once more, with an evaluation and the length of the run
        again = simulate_in_process(method, grid.run(recipe, best.config), [*words, *best.flags])
        simulation = with_steps(again, count_rows)
    choices = chosen.describe(Path(recipe).stem, machine, grid, candidates, arguments)
    flags = choices[0]["flags"]
    plan = summary.make_plan(simulation, all_cards) | chosen.on_machine(machine, simulation)
    plan |= {"flags": flags, "command": choices[0]["command"], "choices": choices, "compiling": about_compiling}
    print_chosen(plan, plan_flags.json)
    if plan_flags.start:
        if configs.read(best.config).num_processes != grid.processes:
            environment["NPROC_PER_NODE"] = str(grid.processes)
        tiny = ["--tiny"] if plan_flags.tiny else []
        start([*tiny, recipe, best.config, *arguments, *flags], environment)


def print_chosen(plan: dict[str, Any], as_json: bool) -> None:
    from planner import pages

    if as_json:
        print(json.dumps(plan, indent=2))
    else:
        pages.print_choice(plan)


def hide_gpus() -> dict[str, str]:
    """Hides this machine's GPUs from this process; returns its environment before that.

    bitsandbytes asks every visible GPU when it is imported, and then CUDA would fail in the forked processes that simulate.
    """
    environment = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def why_not_triton(method: str, environment: dict[str, str]) -> str:
    """Why TRL's loss cannot use Triton on the GPUs that are visible in this environment, which is printed; "" if it can."""
    from planner import pages

    process = processes.Process(method, ask_gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    _, reason = process.wait()
    if reason:
        pages.print_progress(f"TRL's loss runs in PyTorch instead of Triton, which needs more memory: {reason}")
    return reason or ""


def ask_gpus(visible: str | None) -> str:
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from harness.model.gpu_features import find_gpu_features

    return find_gpu_features().no_triton


def propose_changes(
    method: str,
    recipe: str,
    machine: "Machine",
    grid: "Grid",
    words: list[str],
    simulations: dict["Option", "Simulation | Refused"],
) -> list[dict[str, Any]]:
    """What would make a run fit this machine, if nothing of `simulations` does. Raises UserError if every option was refused."""
    from planner import choose, pages

    def run_again(path: str, more: list[str]) -> "Simulation | Refused":
        return simulate_in_process(method, grid.run(recipe, path), [*words, *more], optional=True)

    option, least = choose.option_with_least_memory(machine, simulations)
    pages.print_progress(f"No combination fits {machine.name} with its margin: trying what would make it fit …")
    return choose.propose(machine, option, least, run_again)


def check_start(name: str, plan_flags: PlanArguments, gpus: list) -> None:
    """Raises UserError unless there is a machine to choose for."""
    nodes = nodes_from_environment()
    if nodes.count > 1:
        raise UserError(f"CONFIG is missing: a run on {nodes.count} machines needs its name: ./launch.sh {name} CONFIG")
    if plan_flags.json:
        raise UserError("--json is for --plan")
    if plan_flags.tiny:
        return
    if plan_flags.machine:
        raise UserError(
            f"--for is for another machine: ./launch.sh --plan {name} --for …, or rehearse: ./launch.sh --tiny {name} --for …"
        )
    if not gpus:
        raise UserError(
            "CONFIG is missing, and this machine has no GPU to choose one for. Plan for another machine: ./launch.sh --plan "
            f'{name} --for "1x3090,64GB". Rehearse the choice for it: ./launch.sh --tiny {name} --for "1x3090,64GB"'
        )


def start(words: list[str], environment: dict[str, str]) -> None:
    """Replaces this process by the launcher, which gets `environment`: in this process the GPUs are hidden."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "harness.start.launch", *words], environment)


def simulate_options(
    method: str, recipe: str, grid: "Grid", arguments: list[str], options: list["Option"], is_quiet: bool
) -> list["Simulation | Refused"]:
    """Simulates options side by side, as many as there are cores. Simulations are kept in a cache."""
    from planner import cache, pages
    from planner.simulation import Refused

    files = {option: cache.cache_path(grid.run(recipe, option.config), [*arguments, *option.flags]) for option in options}
    simulations = {option: cache.cached_simulation(file) for option, file in files.items()}
    new = [option for option in options if simulations[option] is None]
    if new and not is_quiet:
        names = sorted({Path(option.config).stem for option in new})
        pages.print_progress(f"Simulating {len(new)} combination{'s' if len(new) > 1 else ''}: {', '.join(names)} …")
    side_by_side = physical_cores()
    for first in range(0, len(new), side_by_side):
        batch = new[first : first + side_by_side]
        started = []
        for option in batch:
            words = [*arguments, *option.flags]
            started.append(processes.Process(method, simulate_quietly, grid.run(recipe, option.config), words, True, False))
        for process, option in zip(started, batch, strict=True):
            code, simulation = process.wait()
            if simulation is None:
                sys.exit(processes.explain_exit(code))
            simulations[option] = simulation
            if not isinstance(simulation, Refused):
                cache.keep_simulation(files[option], simulation)
    return [simulations[option] for option in options]


def fit_processes(recipe: str, config: AccelerateConfig) -> Run:
    """As many processes and nodes as the config has, or as launch.sh's variables say."""
    nodes = nodes_from_environment()
    count = nodes.count if nodes.count > 1 else config.num_machines
    gpus = nodes.processes or config.num_processes // config.num_machines
    if config.distributed_type == "NO":
        gpus = 1
    if config.is_hybrid and count * gpus != config.replicas * config.shards:
        raise UserError(f"{config.name} is for {config.replicas} nodes with {config.shards} GPUs, not for {count} with {gpus}")
    return Run(recipe, config, processes=count * gpus, nodes=count)


def file_sizes(kind: str, name: str, suffixes: tuple[str, ...]) -> int | None:
    """Bytes of a repository's files with one of `suffixes`; None when the Hub does not say. `kind`: "model" or "dataset"."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import httpx

    try:
        files = HfApi().repo_info(name, repo_type=kind, files_metadata=True, timeout=10).siblings
    except (OSError, ValueError, httpx.HTTPError):
        return None
    return sum(file.size for file in files if file.rfilename.endswith(suffixes) and file.size) or None


def download_bytes(simulation: "Simulation") -> int:
    """Bytes to download, from the Hub; if it does not answer, those of the parameters. A stream downloads no files."""
    weights = 0 if Path(simulation.model).is_dir() else file_sizes("model", simulation.model, (".safetensors",))
    if weights is None:
        weights = simulation.parameters * simulation.hub_bytes
    if simulation.is_streamed:
        return weights
    names = [name for name in simulation.datasets if not Path(name).exists()]
    return weights + sum(file_sizes("dataset", name, (".parquet", ".jsonl", ".json", ".csv")) or 0 for name in names)


def with_steps(simulation: "Simulation", count_rows: Callable[[], float | str]) -> "Simulation":
    """`simulation` with max_steps from its epochs if max_steps is not set, or with the reason why they are not known."""
    if simulation.max_steps > 0:
        return simulation
    rows = count_rows()  # after packing, estimated
    if isinstance(rows, str):
        return dataclasses.replace(simulation, no_steps=rows)
    rows_per_step = simulation.micro_batch * simulation.accumulation * simulation.processes
    steps = math.ceil(simulation.epochs * rows / rows_per_step)
    return dataclasses.replace(simulation, max_steps=steps, steps_are_estimated=True)


def row_counter(method: str, recipe: str, arguments: list[str]) -> Callable[[], float | str]:
    """A function that returns the rows of an epoch, or why they are not known.

    It counts them, in a process of its own, when it is first called. Configs and the changes that `--plan` proposes do not alter
    their number.
    """

    @functools.cache
    def count_rows() -> float | str:
        code, rows = processes.call(method, rows_of_epoch, recipe, arguments)
        return rows or f"the process that reads the first rows ended with exit code {code}"

    return count_rows


def rows_of_epoch(recipe: str, arguments: list[str]) -> float | str:
    """Packed rows in an epoch of a recipe; the rows, if they are no documents.

    Returns the reason instead if tokenizer or data cannot be loaded, or the number of rows is not known.
    """
    from harness.commands.preview import Preview, why_no_documents
    from harness.data.loading import count_training_rows

    rows = None
    messages: Any = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="plan-") as output_dir:
        words = [*arguments, "--disable_tqdm", "true", "--output_dir", output_dir]
        with contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
            try:
                preview = Preview(recipe, words)
                if why_no_documents(preview.trainer):
                    data = preview.started.run.data  # such as preference data
                    rows = min(filter(None, (count_training_rows(data), data.max_samples)), default=None)
                else:
                    rows = preview.epoch()[0]
            except UserError as error:
                return str(error)
            except SystemExit:  # after a message, or a traceback, whose last line is the error
                return messages.getvalue().strip().rpartition("\n")[2].removeprefix("error: ")
    return rows or "the dataset does not say how many rows it has"


if __name__ == "__main__":
    code = 0
    set_interrupt_handler(signal.default_int_handler)
    try:
        with exit_on_user_error():
            main(*sys.argv[1:])
    except SystemExit as end:
        code = end.code
    sys.exit(code)
