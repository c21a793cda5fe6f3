"""The machine to plan for: that of --for, or this one; and whether a run fits it with its margins."""

import dataclasses
import math
import re
import shutil
from typing import NamedTuple

from harness.messages import UserError
from planner import cards, links, memory
from planner.cards import CARDS, GB, Card
from planner.hardware import Gpu, ask_nvidia_smi, host_memory
from planner.pages import print_progress
from planner.simulation import Refused, Simulation

# What stays free on top of the reserve, because forecasts can be too low (benchmarks/README.md): shares of what there is.
GPU_MARGIN = 0.10
HOST_MARGIN = 0.05
MACHINE = (
    r"(?:(?P<nodes>[1-9]\d*)\s*x\s*)?(?P<gpus>[1-9]\d*)\s*x\s*(?P<card>[^,;]+?)\s*"
    r"(?P<rest>(?:,\s*(?:(?:no )?nvlink|\d+(?:\.\d+)?\s*gb(?:\s*disk)?)\s*)*)"
)
MACHINE_FORMAT = (
    'expected the number of GPUs and their name, then host memory, "500GB disk", nvlink or "no nvlink", for example --for '
    '"2x3090,64GB"; before them the number of nodes if there are several, --for 2x4xA100'
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
    match = re.fullmatch(MACHINE, text.strip(), re.IGNORECASE)
    if not match:
        raise UserError(f"--for is {text!r}, {MACHINE_FORMAT}")
    card = cards.find_card(match["card"], all_cards)
    sizes = {"host": math.inf, "disk": math.inf}
    for size, is_disk in re.findall(r"([\d.]+)\s*gb\s*(disk)?", match["rest"], re.IGNORECASE):
        sizes["disk" if is_disk else "host"] = float(size) * GB
    if "no nvlink" in match["rest"].lower():
        card = links.with_links(card, has_nvlink=False)
    elif "nvlink" in match["rest"].lower():
        if not card.nvlink:  # otherwise it would be planned with PCIe without a word
            raise UserError(f"--for: no rate of NVLink is known for {card.name}: leave out nvlink")
        card = links.with_links(card, has_nvlink=True)
    return Machine(" ".join(text.split()), int(match["gpus"]), card, **sizes, nodes=int(match["nodes"] or 1))


def card_of(gpus: list[Gpu], all_cards: tuple[Card, ...]) -> Card:
    """The card of the smallest of these GPUs; prints what is assumed of one that is not known."""
    smallest = min(gpus)
    card = cards.card_of_gpu(smallest.name, smallest.memory, smallest.capability >= 8, all_cards)
    if card not in all_cards:
        other = "an RTX 3090" if card.bf16 else "a T4"
        print_progress(
            f"{card.name} is not known to --plan: its memory is what nvidia-smi reports, its speed that of {other}. "
            "Its own numbers: --card NAME=GB,TFLOPS,GB/s"
        )
    return card


def this_machine(gpus: list[Gpu], all_cards: tuple[Card, ...] = CARDS) -> Machine:
    """The machine with these GPUs."""
    card = card_of(gpus, all_cards)
    are_linked = links.are_linked(ask_nvidia_smi("topo", "-m"), [gpu.index for gpu in gpus])
    if are_linked is False:
        card = links.with_links(card, has_nvlink=False)
    elif are_linked and card.nvlink:
        card = links.with_links(card, has_nvlink=True)
    elif are_linked:
        print_progress(f"The GPUs have NVLink, whose rate is not known for {card.name}: planned with PCIe.")
    return Machine(f"{len(gpus)}x{card.name}", len(gpus), card, host_memory(), shutil.disk_usage(".").free)


def is_possible(machine: Machine, simulation: Simulation | Refused) -> bool:
    """Whether a run fits GPU and host memory with their margins, in a dtype that the GPU computes in."""
    if isinstance(simulation, Refused) or memory.needed_host_memory(simulation) > (1 - HOST_MARGIN) * machine.host:
        return False
    return memory.fits(with_margin(machine.card), simulation, simulation.peak.bytes)


def with_margin(card: Card) -> Card:
    return dataclasses.replace(card, memory=(1 - GPU_MARGIN) * card.memory)
