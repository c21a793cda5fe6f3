"""Changes that could make a run fit, the cheapest first: which there are, and what simulations of them say."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import configs
from harness.messages import UserError
from planner.cards import CARDS, Card, find_card
from planner.memory import fits, needed_host_memory, reserve
from planner.simulation import Refused, Simulation
from planner.summary import gb

MOST = 4  # simulations of changes


def try_proposals(
    plan: dict[str, Any],
    simulation: Simulation,
    config: str,
    run: Callable[[str, list[str]], Simulation | Refused],
    card: Card | None = None,
    host: float = math.inf,
) -> list[dict[str, Any]]:
    """Simulates what could make the run fit, the cheapest change first, until one does; [] if it fits already.

    The target is `card`, or the one that the config is for, on nodes with `host` bytes of memory. `run(config, flags)` simulates.
    A change that saves memory is kept, and the next one is tried on top of it. Returns `{"change", "needs", "needs_host",
    "fits", "card"}` of each.
    """
    card = card or card_of_config(config)

    def is_enough(simulated: Simulation) -> bool:
        return fits(card, simulated, simulated.peak.bytes) and needed_host_memory(simulated) <= host

    if is_enough(simulation):
        return []
    kept: dict[str, str] = {}  # flags
    tried: list[Change] = []
    rows = []
    best = plan["peak_gpu_gb"] + plan["reserve_gb"]
    # After a change that is kept, the next ones depend on it.
    while len(tried) < MOST and (change := next_change(simulation, config, tried)):
        tried.append(change)
        other_config = change.config or config
        flags = kept | change.flags
        words = list(itertools.chain.from_iterable(flags.items()))
        simulated = run(other_config, words)
        if isinstance(simulated, Refused):
            continue
        peak = simulated.peak.bytes
        needs = gb(peak) + gb(reserve(simulated, peak, card))
        needs_host = needed_host_memory(simulated)
        fits_now = is_enough(simulated)
        rows.append(
            {
                "change": " ".join([Path(other_config).stem, *words]),
                "needs": needs,
                "needs_host": gb(needs_host),
                "card": card.name,
                "fits": "yes" if fits_now else "no",
            }
        )
        if fits_now:
            break
        if needs < 0.98 * best and (needs_host <= host or needs_host <= needed_host_memory(simulation)):
            kept = flags
            best = needs
            config = other_config
            simulation = simulated
    return rows


def card_of_config(config: str, all_cards: tuple[Card, ...] = CARDS) -> Card:
    """The card that a config is for: a T4 for fp16, else one of 24 GB."""
    return find_card("T4" if configs.read(config).mixed_precision == "fp16" else "3090", all_cards)


class Change(NamedTuple):
    """Something that could make a run need less memory."""

    flags: dict[str, str]
    config: str = ""  # "" for the same one


def next_change(simulation: Simulation, config: str, tried: list[Change]) -> Change | None:
    """The first of the `proposals` that was not tried, None if all were."""
    return next((change for change in proposals(simulation, config) if change not in tried), None)


def proposals(simulation: Simulation, config: str) -> list[Change]:
    """What could make a run need less memory: first what costs time, last what changes what is learnt."""
    changes = []
    slower: dict[str, str] = {}
    if not simulation.has_checkpointing:
        slower["--activation_checkpointing"] = "true"
    if simulation.micro_batch > 1:
        slower["--per_device_train_batch_size"] = "1"
        if not simulation.has_global_batch_flag:  # as many rows per step as before
            slower["--gradient_accumulation_steps"] = str(simulation.micro_batch * simulation.accumulation)
    if slower:
        changes.append(Change(slower))
    if other := config_that_saves_most(config):
        changes.append(Change({}, other))
    use_peft = {} if simulation.is_adapter else {"--use_peft": "true"}
    if use_peft:
        changes.append(Change(use_peft))
    if not simulation.bytes_in_4bit:
        changes.append(Change(use_peft | {"--load_in_4bit": "true"}))
    if simulation.max_length and simulation.max_length >= 2048:
        changes.append(Change({"--max_length": str(simulation.max_length // 2)}))
    return changes


def config_that_saves_most(config: str) -> str | None:
    """The config for the same machines and precision that keeps least on a GPU; None if none keeps less than this one."""
    own = configs.read(config)
    folders = {Path(config).resolve().parent, Path(__file__).resolve().parents[2] / "accelerate_configs"}
    best = own
    for path in sorted(path for folder in folders for path in folder.glob("*.yaml")):
        try:
            other = configs.read(str(path))
        except UserError:  # not a config that this project reads
            continue
        same_machines = (other.num_processes, other.num_machines) == (own.num_processes, own.num_machines)
        same_kind = (other.mixed_precision, other.replicas, other.shards) == (own.mixed_precision, own.replicas, own.shards)
        if same_machines and same_kind and saving(other) > saving(best):
            best = other
    return None if best is own else best.path


def saving(config: configs.AccelerateConfig) -> int:
    """A larger number for a config that keeps less on a GPU: DDP 0, FSDP 1 to 4."""
    return 1 + config.reshard_after_forward + 2 * config.offload_params if config.is_fsdp else 0
