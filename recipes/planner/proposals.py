"""Changes that could make a run fit, the cheapest first: which there are, and what simulations of them say."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import configs
from harness.messages import UserError
from planner.cards import CARDS, Card, find_card
from planner.memory import fits, needed_host_memory, reserve
from planner.simulation import Refused, Simulation
from planner.summary import gb

import yaml


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
    kept, tried, rows, best = [], [], [], plan["peak_gpu_gb"] + plan["reserve_gb"]
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        # After a change that is kept, the next ones depend on it.
        while change := next((change for change in proposals(simulation, config) if change not in tried), None):
            tried.append(change)
            other_config = change.config or config
            if change.reduces_each_batch:
                other_config = copy_that_reduces_each_batch(config, folder)
            others = [*kept]
            if "--max_length" in others and "--max_length" in change.flags:
                place = others.index("--max_length")
                del others[place : place + 2]
            flags = [*others, *change.flags]
            simulated = run(other_config, flags)
            if isinstance(simulated, Refused):
                continue
            peak = simulated.peak.bytes
            needs, needs_host = gb(peak) + gb(reserve(simulated, peak, card)), needed_host_memory(simulated)
            words = " ".join([Path(other_config).stem, *flags])
            row = {"change": words, "needs": needs, "needs_host": gb(needs_host), "card": card.name}
            rows.append(row | {"fits": "yes" if is_enough(simulated) else "no"})
            if is_enough(simulated):
                break
            if needs < 0.98 * best and (needs_host <= host or needs_host <= needed_host_memory(simulation)):
                kept, best, config, simulation = flags, needs, other_config, simulated
    return rows


def card_of_config(config: str, all_cards: tuple[Card, ...] = CARDS) -> Card:
    """The card that a config is for: a T4 for fp16, else one of 24 GB."""
    return find_card("T4" if configs.read(config).mixed_precision == "fp16" else "3090", all_cards)


class Change(NamedTuple):
    """Something that could make a run need less memory."""

    flags: tuple[str, ...] = ()
    config: str = ""  # "" for the same one
    reduces_each_batch: bool = False  # in a copy of the config


def proposals(simulation: Simulation, config: str) -> list[Change]:
    """What could make a run need less memory: first what costs time, last what changes what is learnt."""
    changes = []
    if not simulation.has_checkpointing:
        changes.append(Change(("--activation_checkpointing", "true")))
    if simulation.micro_batch > 1:
        flags = ("--per_device_train_batch_size", "1")
        if not simulation.has_global_batch_flag:  # as many rows per step as before
            flags += ("--gradient_accumulation_steps", str(simulation.micro_batch * simulation.accumulation))
        changes.append(Change(flags))
    changes += [Change(config=other) for other in configs_that_save_more(config)]
    strategy = configs.read(config)
    gathers_each_batch = strategy.is_fsdp and strategy.reshard_after_forward
    if simulation.accumulation > 1 and gathers_each_batch and not strategy.reduce_each_batch:
        changes.append(Change(reduces_each_batch=True))
    use_peft = () if simulation.is_adapter else ("--use_peft", "true")
    if use_peft:
        changes.append(Change(use_peft))
    if not simulation.bytes_in_4bit:
        changes.append(Change((*use_peft, "--load_in_4bit", "true")))
    if simulation.max_length and simulation.max_length >= 2048:
        changes.append(Change(("--max_length", str(simulation.max_length // 2))))
    return changes


def copy_that_reduces_each_batch(config: str, folder: str) -> str:
    """The path of a copy of a config in `folder`, with `fsdp_reduce_each_batch: true`."""
    keys = yaml.safe_load(Path(config).read_text("utf-8"))
    keys["fsdp_config"]["fsdp_reduce_each_batch"] = True
    copy = Path(folder, f"{Path(config).stem} with fsdp_reduce_each_batch: true.yaml")
    copy.write_text(yaml.safe_dump(keys), "utf-8")
    return str(copy)


def configs_that_save_more(config: str) -> list[str]:
    """Configs for the same machines and precision that keep less on a GPU: sharded instead of whole, offloaded."""

    def saving(config: configs.AccelerateConfig) -> int:
        """A larger number for a config that keeps less on a GPU: DDP 0, FSDP 1 to 4."""
        return 1 + config.reshard_after_forward + 2 * config.offload_params if config.is_fsdp else 0

    own, others = configs.read(config), []
    folders = {Path(config).resolve().parent, Path(__file__).resolve().parents[2] / "accelerate_configs"}
    for path in sorted(path for folder in folders for path in folder.glob("*.yaml")):
        try:
            other = configs.read(str(path))
        except UserError:  # not a config that this project reads
            continue
        same_machines = (other.num_processes, other.num_machines) == (own.num_processes, own.num_machines)
        same_kind = (other.mixed_precision, other.replicas, other.shards) == (own.mixed_precision, own.replicas, own.shards)
        if same_machines and same_kind and saving(other) > saving(own):
            others.append((saving(other), str(path)))
    return [path for _, path in sorted(others)]
