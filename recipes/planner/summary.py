"""The plan of a simulated run, as --json prints it: memory and time on all cards."""

from typing import Any

from planner.cards import CARDS, GB, Card
from planner.memory import disk_space, fits, largest_micro_batch, needed_host_memory, reserve
from planner.roofline import generating_seconds, moved_bytes, step_seconds
from planner.simulation import Simulation


def make_plan(simulation: Simulation, all_cards: tuple[Card, ...] = CARDS) -> dict[str, Any]:
    """The plan as `--json` prints it; memory in GB (1e9 bytes), time in seconds."""
    peak = simulation.peak.bytes
    tokens = simulation.tokens * simulation.accumulation * simulation.processes
    steps = simulation.max_steps if simulation.max_steps > 0 else None
    plan: dict[str, Any] = {
        name: getattr(simulation, name)
        for name in ("recipe", "config", "processes", "nodes", "shards", "parameters", "trained", "micro_batch")
    }
    plan |= {
        "peak_gpu_gb": gb(peak),
        "reserve_gb": gb(reserve(simulation, peak)),
        "moments": {moment: gb(of.bytes) for moment, of in simulation.peaks.items() if moment != "first step"},
        "holders": {holder: gb(size) for holder, size in simulation.peak.by_holder.items() if gb(size)},
        "peak_host_gb": gb(needed_host_memory(simulation)),
        "disk_gb": gb(disk_space(simulation)),
        "moved_gb": {kind: gb(size) for kind, size in moved_bytes(simulation).items() if gb(size)},
        "tflops": round(sum(simulation.step.flops.values()) / 1e12, 1),
        "kernels_per_step": round(simulation.step.launches),
        "tokens_per_step": tokens,
        "steps": steps,
        "steps_are_estimated": simulation.steps_are_estimated,
        "no_steps": simulation.no_steps,
        "generation": describe_generation(simulation),
        "fits": {card.name: fits(card, simulation, peak) for card in all_cards},
        "free_gb": {card.name: gb(card.memory - peak - reserve(simulation, peak, card)) for card in all_cards},
        "largest_micro_batch": {card.name: largest_micro_batch(card, simulation) for card in all_cards},
    }
    able = [card for card in all_cards if card.bf16 or not simulation.needs_bf16]
    seconds = {card.name: step_seconds(card, simulation) for card in able}
    plan["step_seconds"] = {name: round(number, 3) for name, number in seconds.items()}
    plan["generating_seconds"] = {card.name: round(generating_seconds(card, simulation), 3) for card in able}
    plan["tokens_per_second"] = {name: round(tokens / number) for name, number in seconds.items()}
    plan["hours"] = {name: round(steps * number / 3600, 6) for name, number in seconds.items()} if steps else {}
    return plan


def describe_generation(simulation: Simulation) -> dict[str, Any] | None:
    """The texts that a GPU generates for training, None if it generates none."""
    if not simulation.completion:
        return None
    return {
        "texts": simulation.generated_rows,  # at once
        "prompt_tokens": simulation.prompt,
        "tokens": simulation.completion,
        "times_per_step": simulation.generations,
        "kernels_per_token": round(simulation.token.launches),
        "gathered_gb_per_token": gb(simulation.token.moved.get("gathered", 0)),
    }


def gb(size: float) -> float:
    return round(size / GB, 3)
