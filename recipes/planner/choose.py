"""Chooses for a machine: the config, micro-batch and activation checkpointing with which a recipe is the fastest by the plan.

The grid: the configs that the run can use there × activation checkpointing × every micro-batch that divides
`global_batch_size`. Left out are configs with which weights, gradients and optimizer states alone do not fit. Of each other
setting (a config with or without checkpointing) the smallest micro-batch is simulated first. From it follows a number of seconds
that none of its micro-batches can be below. Then the settings that could be the fastest are simulated with larger micro-batches,
until those that remain cannot be faster.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import configs
from harness.messages import UserError
from planner import memory, proposals, summary
from planner.cards import GB, Card
from planner.grid import Grid, Option
from planner.machines import Machine, is_possible, usable_host, with_margin
from planner.pages import print_progress
from planner.roofline import step_seconds
from planner.simulation import Refused, Simulation

COMPILING = 60.0  # seconds to compile the layers, as on the H100 of docs/measurements.md
CLOSE = 1.3  # runners-up that could be within this factor of the fastest are simulated with larger micro-batches


class Candidate(NamedTuple):
    """An option that fits, with its simulation."""

    option: Option
    simulation: Simulation
    seconds: float  # of a step


def choose(
    machine: Machine,
    grid: Grid,
    simulate: Callable[[list[Option]], list[Simulation | Refused]],
    count: int = 3,
) -> tuple[list[Candidate], dict[Option, Simulation | Refused]]:
    """The fastest option and `count` - 1 runners-up, of other settings if there are any, and everything that was simulated.

    `simulate` simulates options side by side. Settings that can only be much slower are not simulated further, so a smaller or
    larger micro-batch of such a runner-up may be faster. No candidate: nothing fits.
    """
    simulations: dict[Option, Simulation | Refused] = {}

    def simulate_missing(options: list[Option]) -> None:
        new = [option for option in options if option not in simulations]
        simulations.update(zip(new, simulate(new), strict=True))

    # The config that keeps the least on a GPU comes first. It says how many parameters there are, and so what cannot fit.
    first = [options[0] for options in grid.settings.values()]
    saving = min((option.config for option in first), key=lambda path: not configs.read(path).offload_params)
    simulate_missing([option for option in first if option.config == saving])
    simulations |= refuse_too_large(machine, grid, simulations)
    simulate_missing(first)
    simulated = {setting: options for setting, options in grid.settings.items() if is_simulated(simulations[options[0]])}
    share = remaining_share(machine.card, simulated, simulations, simulate_missing)

    def candidates(setting: tuple[str, bool | None]) -> list[Candidate]:
        fitting = [option for option in simulated[setting] if is_possible(machine, simulations.get(option))]
        return [Candidate(option, simulations[option], step_seconds(machine.card, simulations[option])) for option in fitting]

    def following(setting: tuple[str, bool | None]) -> Option | None:
        return next_option(machine, simulated[setting], simulations)

    def least_seconds(setting: tuple[str, bool | None]) -> float:
        known = min((candidate.seconds for candidate in candidates(setting)), default=math.inf)
        if following(setting) is None:
            return known
        options = simulated[setting]
        return min(known, bound(machine.card, simulations[options[0]], options[-1].micro_batch, share))

    while True:
        fastest = sorted(simulated, key=least_seconds)[:count]
        close = [setting for setting in fastest if least_seconds(setting) <= CLOSE * least_seconds(fastest[0])]
        unknown = [option for option in map(following, close) if option]
        if not unknown:
            break
        simulate_missing(unknown)
    every = sorted((candidate for setting in simulated for candidate in candidates(setting)), key=by_seconds)
    best: dict[tuple[str, bool | None], Candidate] = {}
    for candidate in every:
        if candidate.seconds <= CLOSE * every[0].seconds:
            best.setdefault(candidate.option.setting, candidate)
    shown = [*best.values()][:count]
    shown += [candidate for candidate in every if candidate not in shown][: count - len(shown)]
    return sorted(shown, key=by_seconds), simulations


def weigh_compiling(
    machine: Machine,
    best: Candidate,
    options: list[Option],
    values: dict[str, Any],
    simulate: Callable[[list[Option]], list[Simulation | Refused]],
    count_steps: Callable[[Simulation], int],
) -> tuple[Candidate | None, str]:
    """`best` with compiled layers, if they earn the time of compiling back, and in any case why.

    They need less memory, so a larger micro-batch of the `options`, those of the setting of `best`, can fit and be faster.
    `values`: of the recipe with its flags. `count_steps` returns the steps of a run, below 1 if they are not known.
    """
    if values["load_in_4bit"]:
        return None, "--torch_compile true was left out: 4-bit weights are not compiled."
    if not values.get("packing"):
        return None, "--torch_compile true was left out: rows that are not packed have many lengths, each of which is compiled."
    compiled = [option._replace(is_compiled=True) for option in options[options.index(best.option) :]]
    simulations: dict[Option, Simulation | Refused] = {}
    following: Option | None = compiled[0]
    while following:
        (simulations[following],) = simulate([following])
        if isinstance(found := simulations[compiled[0]], Refused):
            return None, f"--torch_compile true was left out: {found.reason}."
        following = next_option(machine, compiled, simulations)
    fitting = [
        Candidate(*pair, step_seconds(machine.card, pair[1])) for pair in simulations.items() if is_possible(machine, pair[1])
    ]
    if not fitting:
        return None, "--torch_compile true was left out: it would need more memory than there is."
    fastest = min(fitting, key=by_seconds)
    steps = count_steps(fastest.simulation)
    saved = steps * (best.seconds - fastest.seconds)
    if steps < 1 or saved <= COMPILING:
        length = f"in {steps:,} steps it would save {max(0.0, saved):.0f} s" if steps > 0 else "the number of steps is not known"
        return None, f"--torch_compile true was left out: {length}, and compiling takes about {COMPILING:.0f} s."
    return fastest, f"--torch_compile true saves {saved:.0f} s in {steps:,} steps; compiling takes about {COMPILING:.0f} s."


def refuse_too_large(machine: Machine, grid: Grid, simulations: dict[Option, Simulation | Refused]) -> dict[Option, Refused]:
    """The first options, not simulated so far, of settings whose weights, gradients and optimizer states are too large."""
    found = next(filter(is_simulated, simulations.values()), None)
    refused = {}
    for path, is_on in grid.settings if found else ():
        config = configs.read(path)
        option = grid.settings[path, is_on][0]
        least = memory.least_bytes(found, config, grid.processes)
        if least > with_margin(machine.card).memory and option not in simulations:
            reason = f"weights, gradients and optimizer states alone need at least {least / GB:.1f} GB on each GPU"
            refused[option] = Refused(found.recipe, config.name, reason)
    for config, reason in {(one.config, one.reason) for one in refused.values()}:
        print_progress(f"{config} is not simulated: {reason}.")
    return refused


def is_simulated(found: Simulation | Refused) -> bool:
    return isinstance(found, Simulation)


def by_seconds(candidate: Candidate) -> float:
    return candidate.seconds


def remaining_share(
    card: Card,
    settings: dict[tuple[str, bool | None], list[Option]],
    simulations: dict[Option, Simulation | Refused],
    simulate_missing: Callable[[list[Option]], None],
) -> float:
    """The share of the memory traffic of a step that remains if its micro-batch is the largest instead of the smallest.

    Measured on the fastest setting, whether it fits or not: slower ones keep more, so `bound` holds for them too. 0.0, with which
    it always holds, if the share is not known.
    """
    if not settings:
        return 0.0
    options = min(settings.values(), key=lambda options: step_seconds(card, simulations[options[0]]))
    simulate_missing([options[-1]])
    smallest = simulations[options[0]]
    largest = simulations[options[-1]]
    if isinstance(largest, Refused) or not smallest.step.touched:
        return 0.0
    return min(1.0, largest.step.touched / smallest.step.touched)


def bound(card: Card, simulation: Simulation, largest: int | None, share: float) -> float:
    """Seconds that a step with no micro-batch up to `largest` is below, from the simulation of the smallest one."""
    times = (largest or simulation.micro_batch) / simulation.micro_batch
    moved = {kind: size / times for kind, size in simulation.step.moved.items()}
    counts = simulation.step
    step = dataclasses.replace(counts, moved=moved, touched=share * counts.touched, launches=counts.launches / times)
    return step_seconds(card, dataclasses.replace(simulation, step=step))


def next_option(machine: Machine, options: list[Option], simulations: dict[Option, Simulation | Refused]) -> Option | None:
    """The option of a setting to simulate next, None if the best one is known. The first of `options` is simulated."""
    card = with_margin(machine.card)
    last = options[-1]
    fitting = [option for option in options if is_possible(machine, simulations.get(option))]
    top = fitting[-1] if fitting else options[0]
    # If a step is one micro-batch, there are no gradients of earlier ones, so the largest micro-batch can need less memory.
    if last not in simulations and memory.fits(card, simulations[top], peak_of(last, top, None, simulations, is_alone=True)):
        return last
    if not fitting:
        return None
    too_large = [option for option in options if option in simulations and option > top]
    limit = too_large[0] if too_large else None
    between = [option for option in options[:-1] if option > top and (limit is None or option < limit)]
    likely = [option for option in between if memory.fits(card, simulations[top], peak_of(option, top, limit, simulations))]
    if likely:
        return likely[-1]
    # Attention over packed rows with a mask computes more the longer the rows are, so a smaller micro-batch can be faster.
    flops = [sum(simulations[option].step.flops.values()) for option in (options[0], top)]
    if flops[1] > 1.01 * flops[0]:
        place = options.index(min(fitting, key=lambda option: step_seconds(machine.card, simulations[option])))
        neighbours = [option for option in options[max(0, place - 1) : place + 2] if option < top and option not in simulations]
        return neighbours[0] if neighbours else None
    return None


def peak_of(
    option: Option,
    known: Option,
    too_large: Option | None,
    simulations: dict[Option, Simulation | Refused],
    is_alone: bool = False,
) -> float:
    """The least that the peak of an option can be, in bytes, estimated from simulations of smaller and larger micro-batches.

    `is_alone`: the step of the option has one micro-batch.
    """
    estimates = []
    for other in (known, too_large):
        if other and isinstance(simulations[other], Simulation):
            times = option.micro_batch / other.micro_batch
            estimates.append(max(fixed + growing * times for fixed, growing in simulations[other].hull))
    smaller = max((other for other in simulations if other.setting == option.setting and other < known), default=None)
    larger = simulations[known]
    if smaller and isinstance(simulations[smaller], Simulation):  # the line through the two largest that fit
        slope = (larger.peak.bytes - simulations[smaller].peak.bytes) / (known.micro_batch - smaller.micro_batch)
        estimates.append(larger.peak.bytes + slope * (option.micro_batch - known.micro_batch))
    earlier_gradients = 2 * larger.peak.by_holder.get("gradients", 0) if is_alone else 0
    return min(estimates) - earlier_gradients


def option_with_least_memory(machine: Machine, simulations: dict[Option, Simulation | Refused]) -> tuple[Option, Simulation]:
    """The option that needs least GPU memory, of those for which the host has enough, if there are any.

    Raises UserError, with the first reason, if every option was refused.
    """
    simulated = [(option, simulation) for option, simulation in simulations.items() if isinstance(simulation, Simulation)]
    if not simulated:
        raise UserError(next(refused.reason for refused in simulations.values() if isinstance(refused, Refused)))
    return min(simulated, key=lambda pair: (memory.needed_host_memory(pair[1]) > usable_host(machine), pair[1].peak.bytes))


def propose(
    machine: Machine, option: Option, simulation: Simulation, run: Callable[[str, list[str]], Simulation | Refused]
) -> list[dict[str, Any]]:
    """Changes of `option`, which does not fit the machine, that would make it fit. `run(config, flags)` simulates one."""

    def run_on_top(config: str, more: list[str]) -> Simulation | Refused:
        return run(config, [*option.flags, *more])

    card = with_margin(machine.card)
    host = usable_host(machine)
    return proposals.try_proposals(summary.make_plan(simulation), simulation, option.config, run_on_top, card, host)
