"""The plan of a simulated run, as --json prints it: memory and time on all cards."""

from typing import Any

from planner.cards import CARDS, GB, Card
from planner.memory import disk_space, fits, largest_micro_batch, needed_host_memory, reserve, reserved_on
from planner.roofline import generating_seconds, host_seconds, moved_bytes, step_seconds, with_slower_host
from planner.simulation import Simulation


def make_plan(simulation: Simulation, all_cards: tuple[Card, ...] = CARDS) -> dict[str, Any]:
    """The plan as `--json` prints it; memory in GB (1e9 bytes), time in seconds."""
    peak = simulation.peak.bytes
    tokens = simulation.tokens * simulation.accumulation * simulation.processes
    steps = simulation.max_steps if simulation.max_steps > 0 else None
    plan = {
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
        "reserved_gb": gb(simulation.reserved),
        "moments": {moment: gb(of.bytes) for moment, of in simulation.peaks.items() if moment != "first step"},
        "holders": {holder: gb(size) for holder, size in simulation.peak.by_holder.items() if gb(size)},
        "peak_host_gb": gb(needed_host_memory(simulation)),
        "disk_gb": gb(disk_space(simulation)),
        "download_gb": gb(simulation.download),
        "moved_gb": {kind: gb(size) for kind, size in moved_bytes(simulation).items() if gb(size)},
        "tflops": round(sum(simulation.step.flops.values()) / 1e12, 1),
        "kernels_per_step": round(simulation.step.launches),
        "tokens_per_step": tokens,
        "steps": steps,
        "steps_are_estimated": simulation.steps_are_estimated,
        "no_steps": simulation.no_steps,
        "fits": {},
        "reserved_on_gb": {},
        "free_gb": {},
        "largest_micro_batch": {},
        "kernel_seconds": all_cards[0].launch,
        "host_seconds": round(host_seconds(all_cards[0], simulation), 3),
        "generation": describe_generation(simulation),
        "generating_seconds": {},
        "step_seconds": {},
        "tokens_per_second": {},
        "tokens_per_second_with_slower_host": {},
        "hours": {},
    }
    for card in all_cards:
        plan["fits"][card.name] = fits(card, simulation, peak)
        plan["reserved_on_gb"][card.name] = gb(reserved_on(card, simulation))
        plan["free_gb"][card.name] = gb(card.memory - (peak + reserve(simulation, peak, card)))
        plan["largest_micro_batch"][card.name] = largest_micro_batch(card, simulation)
        if simulation.needs_bf16 and not card.bf16:
            continue
        seconds = step_seconds(card, simulation)
        plan["step_seconds"][card.name] = round(seconds, 3)
        plan["generating_seconds"][card.name] = round(generating_seconds(card, simulation), 3)
        plan["tokens_per_second"][card.name] = round(tokens / seconds)
        slower = step_seconds(with_slower_host(card), simulation)
        plan["tokens_per_second_with_slower_host"][card.name] = round(tokens / slower)
        if steps:
            plan["hours"][card.name] = round(steps * seconds / 3600, 6)
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
