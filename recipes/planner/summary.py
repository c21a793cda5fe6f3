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
    steps = None
    if simulation.max_steps > 0:
        steps = simulation.max_steps
    moments = {moment: gb(of.bytes) for moment, of in simulation.peaks.items()}
    moments.pop("first step", None)
    step = simulation.step
    plan: dict[str, Any] = {
        "recipe": simulation.recipe,
        "config": simulation.config,
        "processes": simulation.processes,
        "nodes": simulation.nodes,
        "shards": simulation.shards,
        "parameters": simulation.parameters,
        "trained": simulation.trained,
        "micro_batch": simulation.micro_batch,
        "peak_gpu_gb": gb(peak),
        "reserve_gb": gb(reserve(simulation, peak)),
        "moments": moments,
        "holders": in_gb(simulation.peak.by_holder),
        "peak_host_gb": gb(needed_host_memory(simulation)),
        "disk_gb": gb(disk_space(simulation)),
        "moved_gb": in_gb(moved_bytes(simulation)),
        "tflops": round(sum(step.flops.values()) / 1e12, 1),
        "kernels_per_step": round(step.launches),
        "tokens_per_step": tokens,
        "steps": steps,
        "steps_are_estimated": simulation.steps_are_estimated,
        "no_steps": simulation.no_steps,
        "generation": describe_generation(simulation),
    }
    of_cards = ("fits", "free_gb", "largest_micro_batch", "step_seconds", "generating_seconds", "tokens_per_second", "hours")
    plan |= {key: {} for key in of_cards}
    for card in all_cards:
        name = card.name
        plan["fits"][name] = fits(card, simulation, peak)
        plan["free_gb"][name] = gb(card.memory - peak - reserve(simulation, peak, card))
        plan["largest_micro_batch"][name] = largest_micro_batch(card, simulation)
        if simulation.needs_bf16 and not card.bf16:
            continue
        seconds = step_seconds(card, simulation)
        plan["step_seconds"][name] = round(seconds, 3)
        plan["generating_seconds"][name] = round(generating_seconds(card, simulation), 3)
        plan["tokens_per_second"][name] = round(tokens / seconds)
        if steps:
            plan["hours"][name] = round(steps * seconds / 3600, 6)
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


def in_gb(sizes: dict[str, float]) -> dict[str, float]:
    """Sizes in GB, without those that are rounded to zero."""
    return {name: gb(size) for name, size in sizes.items() if gb(size)}


def gb(size: float) -> float:
    return round(size / GB, 3)
