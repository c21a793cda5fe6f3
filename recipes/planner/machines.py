"""The machine to plan for: that of --for, or this one; and whether a run fits it with its margins."""

import dataclasses
import math
import re
import shutil
import sys
from typing import NamedTuple

from harness.messages import UserError
from planner import cards, links, memory
from planner.cards import CARDS, GB, Card
from planner.hardware import Gpu, ask_nvidia_smi, host_memory
from planner.simulation import Refused, Simulation

# What stays free on top of the reserve, because forecasts can be too low (benchmarks/README.md): shares of what there is.
GPU_MARGIN = 0.10
HOST_MARGIN = 0.05
MACHINE_FORMAT = (
    'expected one machine: a number of GPUs and their name, for example --for "2x3090,64GB", and before them the number of nodes '
    "if there are several, --for 2x4xA100"
)


class Machine(NamedTuple):
    """GPUs of one kind in one machine, or in several equal ones."""

    name: str  # as --for has it
    gpus: int  # of each node
    card: Card
    host: float = math.inf  # bytes of host memory of each node, infinite if unknown
    disk: float = math.inf  # bytes that are free
    nodes: int = 1


def read_machine(text: str, all_cards: tuple[Card, ...] = CARDS) -> Machine:
    """The machine of --for. Raises UserError if it is misspelt or has an unknown GPU."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([^,;]+?)\s*((?:,[^,;]*)*)", text, re.IGNORECASE)
    if not match or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise UserError(f"--for is {text!r}, {MACHINE_FORMAT}")
    machine = Machine(" ".join(text.split()), int(match[2]), cards.find_card(match[3], all_cards), nodes=int(match[1] or 1))
    for part in match[4].split(","):
        word = part.strip().lower()
        if not word:
            continue
        if word == "no nvlink":
            machine = machine._replace(card=links.with_pcie(machine.card))
        elif word == "nvlink":
            check_nvlink(machine.card)
            machine = machine._replace(card=links.with_nvlink(machine.card))
        elif size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*gb", word):
            machine = machine._replace(host=float(size[1]) * GB)
        elif size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*gb\s*disk", word):
            machine = machine._replace(disk=float(size[1]) * GB)
        else:
            raise UserError(
                f"--for: {word} is unknown, expected 64GB (host memory), 500GB disk, nvlink or no nvlink after the GPUs"
            )
    return machine


def check_nvlink(card: Card) -> None:
    """Raises UserError unless the rate of the card's NVLink is known."""
    if card.nvlink:
        return
    if card in CARDS:
        raise UserError(f"--for: {card.name} has no NVLink that this project knows: leave out nvlink")
    raise UserError(f"--for: {card.name} is planned with PCIe, because --card has no rate of NVLink: leave out nvlink")


def this_machine(gpus: list[Gpu], all_cards: tuple[Card, ...] = CARDS, launch: float | None = None) -> Machine:
    """The machine with these GPUs. `launch`: see `Card`, None if it was not measured."""
    smallest = min(gpus)
    card = cards.card_of_gpu(smallest.name, smallest.memory, smallest.capability >= 8, all_cards)
    if unknown := cards.describe_unknown(card, all_cards):
        print(unknown, file=sys.stderr, flush=True)
    if launch:
        card = dataclasses.replace(card, launch=launch)
    are_linked = links.are_linked(ask_nvidia_smi("topo", "-m"), [gpu.index for gpu in gpus])
    if are_linked is False:
        card = links.with_pcie(card)
    elif are_linked and card.nvlink:
        card = links.with_nvlink(card)
    elif are_linked:
        print(f"The GPUs have NVLink, whose rate is not known for {card.name}: planned with PCIe.", file=sys.stderr, flush=True)
    return Machine(f"{len(gpus)}x{card.name}", len(gpus), card, host_memory(), shutil.disk_usage(".").free)


def is_possible(machine: Machine, simulation: Simulation | Refused | None) -> bool:
    """Whether a run fits GPU and host memory with their margins, in a dtype that the GPU computes in."""
    if simulation is None or isinstance(simulation, Refused):
        return False
    if memory.needed_host_memory(simulation) > usable_host(machine):
        return False
    return memory.fits(with_margin(machine.card), simulation, simulation.peak.bytes)


def usable_host(machine: Machine) -> float:
    """Bytes of host memory of a node, without a margin."""
    return (1 - HOST_MARGIN) * machine.host


def with_margin(card: Card) -> Card:
    return dataclasses.replace(card, memory=(1 - GPU_MARGIN) * card.memory)
