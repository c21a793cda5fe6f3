"""Will it fit, on which cards, how long: simulates a recipe with each config. launch.sh calls it:

`python -m planner.command RECIPE.py CONFIG.yaml… [--json] [--picture] [--card NAME=GB,TFLOPS,GB/s] [--flag value …]`.
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

from harness import configs
from harness.configs import AccelerateConfig
from harness.hub import use_cache_if_unreachable
from harness.launched import set_interrupt_handler
from harness.messages import UserError, exit_on_user_error, kind_and_line, plural
from harness.nodes.cluster import nodes_from_environment
from harness.nodes.hardware import physical_cores
from harness.runs import GpuFeatures, Run
from planner import processes
from planner.arguments import PlanArguments, read_arguments
from planner.hardware import find_gpus
from planner.values import values_of_recipe

if TYPE_CHECKING:
    from planner.cards import Card
    from planner.grid import Grid, Option
    from planner.simulation import Refused, Simulation

DEFAULT_MACHINE = "1x3090"  # of a rehearsal on a machine without a GPU


def main(*words: str) -> None:
    arguments = read_arguments(words)
    use_cache_if_unreachable()
    if arguments.picture and (arguments.machine is not None or len(arguments.configs) != 1):
        raise UserError("--picture needs one CONFIG")
    if arguments.start or arguments.machine is not None:
        plan_choice(arguments)
    else:
        plan_configs(arguments)


def plan_configs(arguments: PlanArguments) -> None:
    """Prints the plan of one config, or of several side by side. With --card it is not about the GPUs of this machine."""
    recipe = str(arguments.recipe)
    read = [config for config in map(configs.read, arguments.configs) if not config.use_cpu]
    if not read:
        raise UserError("--plan forecasts GPUs, and this config computes on the CPU: its first steps print how long they take")
    gpus = [] if arguments.cards else find_gpus()
    environment = hide_gpus()
    method = start_server()
    from planner import machines, pages, proposals, summary  # they import torch, which a misspelt flag need not wait for
    from planner.simulation import Refused

    read_values(method, recipe, arguments.flags)  # a misspelt flag is one error, before anything is simulated
    all_cards = known_cards(arguments)
    no_triton = ""
    shown = {card.name for card in all_cards[: len(arguments.cards)]}
    if gpus:
        here = machines.card_of(gpus, all_cards)
        all_cards = (*all_cards, here) if here not in all_cards else all_cards
        shown.add(here.name)
        no_triton = why_not_triton(method, environment)

    def simulate_config(config: AccelerateConfig, flags: list[str], optional: bool) -> "Simulation | Refused":
        if not arguments.json:
            pages.print_progress(f"Simulating {Path(recipe).stem} with {' '.join([config.name, *flags])} …")
        run = dataclasses.replace(fit_processes(recipe, config), gpu=GpuFeatures([], no_triton=no_triton))
        return simulate_in_process(method, run, [*arguments.flags, *flags], optional, with_all_layers=arguments.picture)

    count_rows = row_counter(method, recipe, arguments.flags)
    found = [simulate_config(config, [], optional=len(read) > 1) for config in read]
    refused = [one.reason for one in found if isinstance(one, Refused)]
    if len(refused) == len(read):
        raise UserError(f"{Path(recipe).stem} cannot be simulated with any config: {max(refused, key=refused.count)}")
    plans: list[Any] = [
        {"config": one.config, "refused": one.reason}
        if isinstance(one, Refused)
        else summary.make_plan(with_steps(one, count_rows), all_cards)
        for one in found
    ]
    if arguments.json:
        print_json(plans[0] if len(read) == 1 else plans)
    elif len(read) > 1:
        pages.print_side_by_side(plans)
    else:
        card = proposals.card_of_config(read[0])
        pages.print_plan(plans[0], shown | {card.name})
        if not plans[0]["fits"][card.name]:
            print()
            for flags in proposals.flags_for_less(found[0]):
                pages.print_proposal(card, flags, simulate_config(read[0], flags, optional=True))
            print(proposals.ADVICE)
    if arguments.picture and len(read) == 1:
        print(f"\nPicture: {pages.draw(plans[0], found[0].curve)}", file=sys.stderr, flush=True)


def known_cards(arguments: PlanArguments) -> tuple["Card", ...]:
    """The cards of --card, then all others."""
    from planner import cards

    own = [cards.card_of_user(*numbers) for numbers in arguments.cards]
    return (*own, *(card for card in cards.CARDS if card.name not in {one.name for one in own}))


def start_server() -> str:
    """Imports what a simulation needs; returns how to start processes."""
    method = processes.start_server()
    warnings.filterwarnings("ignore")
    return method


def read_values(method: str, recipe: str, flags: list[str]) -> dict[str, Any]:
    """The values of a recipe with these flags, see `values_of_recipe`. Exits if the recipe refuses them."""
    code, values = processes.call(method, values_of_recipe, recipe, flags)
    if values is None:
        sys.exit(processes.explain_exit(code))
    return values


def simulate_in_process(
    method: str, run: Run, flags: list[str], optional: bool = False, with_all_layers: bool = False
) -> "Simulation | Refused":
    """One simulation in a process of its own. If it is refused, this process exits, or with `optional` returns the reason."""
    code, simulation = processes.call(method, simulate_quietly, run, flags, optional, True, with_all_layers)
    if simulation is None:
        sys.exit(processes.explain_exit(code))
    return simulation


def simulate_quietly(
    run: Run, flags: list[str], optional: bool, with_evaluation: bool = True, with_all_layers: bool = False
) -> "Simulation | Refused":
    """A simulation without the output of libraries; if the run is refused and that is `optional`, the reason.

    Raises UserError for a trainer that cannot be simulated: minutes pass before, and a traceback does not say what to do.
    """
    from planner.simulation import Refused, simulate

    logging.disable(logging.WARNING)  # what libraries log about a run does not belong to a plan
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return simulate(run, flags, with_evaluation=with_evaluation, with_all_layers=with_all_layers)
    except Exception as error:
        reason = f"{Path(run.recipe).name} cannot be simulated: {kind_and_line(error)}. Rehearse it with --tiny"
        if isinstance(error, UserError):
            reason = str(error)
        if not optional:
            raise UserError(reason) from error
    except SystemExit as end:
        reason = messages.getvalue().strip().removeprefix("error: ")
        if not optional or end.code != 2:
            sys.stderr.write(messages.getvalue())
            raise
    return Refused(run.config.name, reason)


def plan_choice(arguments: PlanArguments) -> None:
    """Chooses for the machine of --for, or for this one, and prints the choice; with --start, starts it."""
    gpus = [] if arguments.machine is not None else find_gpus()
    name = arguments.recipe.stem
    if arguments.start:
        check_start(name, arguments, gpus)
    environment = hide_gpus()
    method = start_server()
    from planner import choose, chosen, machines, pages, proposals, summary
    from planner.grid import given_flags, make_grid

    recipe = str(arguments.recipe)
    all_cards = known_cards(arguments)
    no_triton = ""
    if gpus:
        machine = machines.this_machine(gpus, all_cards)
        no_triton = why_not_triton(method, environment)
    else:
        machine = machines.read_machine(DEFAULT_MACHINE if arguments.machine is None else arguments.machine, all_cards)
    values = read_values(method, recipe, arguments.flags)
    grid = make_grid(values, machine, arguments.configs, arguments.flags)._replace(no_triton=no_triton)
    if grid.idle:
        pages.print_progress(f"{machine.name}: {grid.idle}.")
    show = print_json if arguments.json else pages.print_choice
    flags = [*arguments.flags, *grid.common_flags]
    simulate = functools.partial(simulate_options, method, recipe, grid, flags)
    candidates = choose.choose(machine, grid, simulate)
    if not candidates:
        if arguments.start:
            raise UserError(f"{name} fits no config of this machine with its margin. {proposals.ADVICE}")
        show({"machine": machine.name, "config": None, "proposals": proposals.ADVICE})
        return
    count_rows = row_counter(method, recipe, arguments.flags)
    compiling = ""
    has_triton = machine.card.bf16 and not no_triton
    is_given = values["torch_compile"] or given_flags(arguments.flags) & {"torch_compile", "config"}
    if has_triton and not (arguments.tiny or is_given):
        options = grid.settings[candidates[0].option.setting]
        compiled, compiling = choose.weigh_compiling(
            machine, candidates[0], options, values, simulate, lambda found: with_steps(found, count_rows).max_steps
        )
        candidates = [*compiled, *candidates]
    best = candidates[0].option
    simulation = candidates[0].simulation
    if not arguments.start:  # once more, with an evaluation and the length of the run
        again = simulate_in_process(method, grid.run(recipe, best.config), [*flags, *best.flags])
        simulation = with_steps(again, count_rows)
    choices = chosen.describe(name, machine, grid, candidates, arguments.flags)
    plan = summary.make_plan(simulation, all_cards) | chosen.on_machine(machine, simulation)
    plan |= {"flags": choices[0]["flags"], "command": choices[0]["command"], "choices": choices, "compiling": compiling}
    show(plan)
    if arguments.start:
        if configs.read(best.config).num_processes != grid.processes:
            environment["NPROC_PER_NODE"] = str(grid.processes)
        tiny = ["--tiny"] if arguments.tiny else []
        start([*tiny, recipe, best.config, *arguments.flags, *plan["flags"]], environment)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


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


def check_start(name: str, arguments: PlanArguments, gpus: list) -> None:
    """Raises UserError unless there is a machine to choose for: the run would start elsewhere than was meant."""
    example = f'./launch.sh --plan {name} --for "1x3090,64GB". Rehearse the choice for it: ./launch.sh --tiny {name} --for …'
    wrong = {
        f"CONFIG is missing: a run on several machines needs its name: ./launch.sh {name} CONFIG": nodes_from_environment().count
        > 1,
        "--json is for --plan": arguments.json,
        f"--for is for another machine. Plan for it: {example}": arguments.machine is not None and not arguments.tiny,
        f"CONFIG is missing, and there is no GPU. Plan for another machine: {example}": not gpus and not arguments.tiny,
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(message)


def start(words: list[str], environment: dict[str, str]) -> None:
    """Replaces this process by the launcher, which gets `environment`: in this process the GPUs are hidden."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "harness.start.launch", *words], environment)


def simulate_options(
    method: str, recipe: str, grid: "Grid", flags: list[str], options: list["Option"]
) -> list["Simulation | Refused"]:
    """Simulates options side by side, as many as there are cores. Simulations are kept in a cache."""
    from planner import cache, pages
    from planner.simulation import Refused

    runs = {option: (grid.run(recipe, option.config), [*flags, *option.flags]) for option in options}
    files = {option: cache.cache_path(*run) for option, run in runs.items()}
    simulations = {option: cache.cached_simulation(file) for option, file in files.items()}
    new = [option for option in options if simulations[option] is None]
    if new:
        names = sorted({Path(option.config).stem for option in new})
        pages.print_progress(f"Simulating {plural(len(new), 'combination')}: {', '.join(names)} …")
    side_by_side = physical_cores()
    for first in range(0, len(new), side_by_side):
        batch = new[first : first + side_by_side]
        started = [processes.Process(method, simulate_quietly, *runs[option], True, False) for option in batch]
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
    return Run(recipe, config, processes=count * gpus, nodes=count)


def with_steps(simulation: "Simulation", count_rows: Callable[[], float | str]) -> "Simulation":
    """`simulation` with max_steps from its epochs if max_steps is not set, or with the reason why they are not known.

    Raises UserError if there are fewer prompts than a step needs.
    """
    if simulation.completion and not isinstance(rows := count_rows(), str):
        from harness.run.generation import check_number_of_prompts

        check_number_of_prompts(rows, simulation.generated_rows * simulation.processes, simulation.answers)
    if simulation.max_steps > 0:
        return simulation
    rows = count_rows()  # after packing, estimated
    if isinstance(rows, str):
        return dataclasses.replace(simulation, no_steps=rows)
    rows_per_step = simulation.micro_batch * simulation.accumulation * simulation.processes
    steps = math.ceil(simulation.epochs * rows / rows_per_step)
    return dataclasses.replace(simulation, max_steps=steps, steps_are_estimated=True)


def row_counter(method: str, recipe: str, flags: list[str]) -> Callable[[], float | str]:
    """A function that returns the rows of an epoch, or why they are not known.

    It counts them, in a process of its own, when it is first called. Configs do not alter their number.
    """

    @functools.cache
    def count_rows() -> float | str:
        code, rows = processes.call(method, rows_of_epoch, recipe, flags)
        return rows or f"the process that reads the first rows ended with exit code {code}"

    return count_rows


def rows_of_epoch(recipe: str, flags: list[str]) -> float | str:
    """Packed rows in an epoch of a recipe; the rows, if they are no documents.

    Returns the reason instead if tokenizer or data cannot be loaded, or the number of rows is not known.
    """
    from harness.commands.preview import Preview, why_no_documents
    from harness.data.loading import PREVIEWED_ROWS, count_training_rows

    rows = None
    messages: Any = io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="plan-") as output_dir,
        contextlib.redirect_stdout(messages),
        contextlib.redirect_stderr(messages),
    ):
        try:
            preview = Preview(recipe, [*flags, "--disable_tqdm", "true", "--output_dir", output_dir])
            if why_no_documents(preview.trainer):
                data = preview.started.run.data  # such as preference data
                rows = min(filter(None, (count_training_rows(data), data.max_samples)), default=None)
                if rows and rows <= PREVIEWED_ROWS:  # without those that are skipped, dropped or held out
                    rows = sum(1 for _ in preview.trainer.train_dataset)
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
