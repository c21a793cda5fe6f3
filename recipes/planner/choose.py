"""Chooses for a machine: the config, micro-batch and activation checkpointing with which a recipe is the fastest by the plan.

The grid: the configs that the run can use there × activation checkpointing × every micro-batch that divides
`global_batch_size`. Of each setting (a config with or without checkpointing) the smallest micro-batch is simulated. From its
memory follows the largest one that fits, and about how long a step takes with it. Those that could be the fastest are simulated.

Compared is the root of the sum of squares of the seconds of GPU and host. It is nearer to seven runs on an H100 than the larger
one of them (docs/measurements.md), and with fewer kernels it is smaller.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from harness.messages import UserError
from planner import memory
from planner.cards import Card
from planner.grid import Grid, Option
from planner.machines import Machine, is_possible, with_margin
from planner.roofline import step_seconds
from planner.simulation import Refused, Simulation

SIDE_BY_SIDE = 2  # simulations
EQUAL = 1.03  # times as many seconds; no forecast was nearer to a measurement
CLOSE = 1.1  # what could be within this factor of the fastest is simulated
by_seconds = operator.attrgetter("seconds")
COMPILING = 60.0  # seconds to compile the layers, as on the H100 of docs/measurements.md
LEFT_OUT = "--torch_compile true was left out:"
Simulate = Callable[[list[Option]], list[Simulation | Refused]]  # simulates options side by side


class Candidate(NamedTuple):
    """An option that fits, with its simulation."""

    option: Option
    simulation: Simulation
    seconds: float  # of a step, `compared_seconds`


def choose(machine: Machine, grid: Grid, simulate: Simulate, count: int = 3) -> list[Candidate]:
    """The fastest option and `count` - 1 runners-up; [] if nothing fits. Raises UserError if every option was refused.

    Of equally fast ones, that of the first config.
    """
    settings = list(grid.settings.values())
    first = [options[0] for options in settings]
    simulated = simulate(first)
    larger = []
    for options, smallest in zip(settings, simulated, strict=True):
        if isinstance(smallest, Simulation):
            larger.append(larger_options(machine.card, options, smallest))
    if not larger:
        raise UserError(simulated[0].reason)
    fitting = possible(machine, first, simulated)
    candidates = sorted(try_larger(machine, larger, fitting, simulate), key=by_seconds)
    equal = [one for one in candidates if one.seconds < EQUAL * candidates[0].seconds]
    order = list(grid.settings)
    equal.sort(key=lambda one: order.index(one.option.setting))
    return [*equal[:1], *(one for one in candidates if one is not equal[0])][:count]


def compared_seconds(card: Card, simulation: Simulation) -> float:
    """Seconds of a step, in which GPU and host also wait for each other."""
    return step_seconds(card, simulation, math.hypot)


def larger_options(card: Card, options: list[Option], smallest: Simulation) -> list[tuple[float, Option]]:
    """The options, but the first, that should fit a card by what the simulation of the first one says of their memory.

    Before each about the seconds of a step, which starts fewer kernels, and moves weights less often.
    """
    found = []
    step = smallest.step
    for option in options[1:]:
        times = option.micro_batch / smallest.micro_batch
        peak = max(fixed + growing * times for fixed, growing in smallest.hull)
        if option is options[-1]:  # if a step is one micro-batch, there are no gradients of earlier ones
            peak -= 2 * smallest.peak.by_holder.get("gradients", 0)
        if memory.fits(with_margin(card), smallest, peak):
            moved = {kind: size / times for kind, size in step.moved.items()}
            fewer = dataclasses.replace(step, moved=moved, launches=step.launches / times)
            larger = dataclasses.replace(smallest, step=fewer)
            found.append((compared_seconds(card, larger), option))
    return found


def try_larger(
    machine: Machine, settings: list[list[tuple[float, Option]]], candidates: list[Candidate], simulate: Simulate
) -> list[Candidate]:
    """The candidates, and of each setting of `larger_options` the last one that fits, unless it can only be slower."""
    candidates = list(candidates)
    while True:
        fastest = min(map(by_seconds, candidates), default=math.inf)
        promising = []
        for options in settings:
            if options and options[-1][0] <= CLOSE * fastest:
                promising.append(options)
        promising.sort(key=operator.itemgetter(-1))
        promising = promising[:SIDE_BY_SIDE]
        if not promising:
            return candidates
        tried = [options.pop()[1] for options in promising]
        for options, option, found in zip(promising, tried, simulate(tried), strict=True):
            if fitting := possible(machine, [option], [found]):
                candidates += fitting
                options.clear()


def possible(machine: Machine, options: list[Option], simulated: list[Simulation | Refused]) -> list[Candidate]:
    """Those that fit the machine."""
    fitting = []
    for option, found in zip(options, simulated, strict=True):
        if is_possible(machine, found):
            seconds = compared_seconds(machine.card, found)
            fitting.append(Candidate(option, found, seconds))
    return fitting


def weigh_compiling(
    machine: Machine,
    best: Candidate,
    options: list[Option],
    values: dict[str, Any],
    simulate: Simulate,
    count_steps: Callable[[Simulation], int],
) -> tuple[list[Candidate], str]:
    """`best` with compiled layers, if they earn the time of compiling back, else nothing; and in any case why.

    They need less memory, so a larger micro-batch of the `options`, those of the setting of `best`, can fit and be faster.
    `values`: of the recipe with its flags. `count_steps` returns the steps of a run, below 1 if they are not known.
    """
    if values["load_in_4bit"]:
        return [], f"{LEFT_OUT} 4-bit weights are not compiled."
    if not values.get("packing"):
        return [], f"{LEFT_OUT} rows that are not packed have many lengths, each of which is compiled."
    compiled = [option._replace(is_compiled=True) for option in options[options.index(best.option) :]]
    (same,) = simulate(compiled[:1])
    if isinstance(same, Refused):
        return [], f"{LEFT_OUT} {same.reason}."
    larger = larger_options(machine.card, compiled, same)
    candidates = possible(machine, compiled[:1], [same])
    fitting = try_larger(machine, [larger], candidates, simulate)
    if not fitting:
        return [], f"{LEFT_OUT} it would need more memory than there is."
    fastest = min(fitting, key=by_seconds)
    steps = count_steps(fastest.simulation)
    saved = steps * (best.seconds - fastest.seconds)
    compiling = f"compiling takes about {COMPILING:.0f} s."
    if steps < 1:
        return [], f"{LEFT_OUT} the number of steps is not known, and {compiling}"
    if saved <= COMPILING:
        return [], f"{LEFT_OUT} in {steps:,} steps it would save {max(0.0, saved):.0f} s, and {compiling}"
    return [fastest], f"--torch_compile true saves {saved:.0f} s in {steps:,} steps; {compiling}"
