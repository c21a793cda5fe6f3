"""A run on GPUs against the plan that was made for it: plan.json in the output directory, from `start/plans.py`."""

import math
import re
from pathlib import Path
from typing import Any

from harness.folder import DamagedFile, read_json

PLAN = "plan.json"
TOLERANCE = 0.1  # a larger difference is explained


def read_forecast(output_dir: Path, device: str) -> dict[str, Any] | None:
    """The forecast of the run for its card, None if there is none. Memory in GB (1e9 bytes), speeds as [slow, fast] ends."""
    try:
        plan = read_json(output_dir / PLAN, "tokens_per_second")
    except DamagedFile:
        return None
    return forecast_of(plan, device) if plan else None


def forecast_of(plan: dict[str, Any], device: str) -> dict[str, Any]:
    """What a plan (`--plan … --json`) says about a run on `device`, PyTorch's name of a GPU."""
    card = next((name for name in plan["tokens_per_second"] if words_of(name) <= words_of(device)), None)
    memory = ("peak_gpu_gb", "peak_host_gb", "tokens_per_step")
    return {name: plan.get(name) for name in memory} | {
        "card": card,
        "reserved_gb": plan.get("reserved_on_gb", {}).get(card, plan.get("reserved_gb")),
        "tokens_per_second": plan["tokens_per_second"].get(card),
        "step_seconds": plan.get("step_seconds", {}).get(card),
    }


def words_of(name: str) -> set[str]:
    """The parts of a card's name: those of "A100 80 GB" are among those of "NVIDIA A100-SXM4-80GB"."""
    return set(re.findall(r"[A-Z0-9]+", re.sub(r"(\d) GB", r"\1GB", name).upper()))


def describe_forecast(results: dict[str, Any]) -> list[str]:
    """Lines that compare the results of a run with `results["forecast"]`, and explain differences above 10 %."""
    forecast, lines = results["forecast"], []
    step_tokens = results["tokens"] / max(1, results["global_step"])
    step_seconds = step_tokens / results["tokens_per_second"] if results["tokens_per_second"] else 0.0
    is_short = bool(forecast["tokens_per_step"]) and step_tokens < (1 - TOLERANCE) * forecast["tokens_per_step"]
    rows = [
        ("GB per GPU", results["peak_gpu_gb"], forecast["peak_gpu_gb"]),
        ("GB reserved", results["peak_gpu_reserved_gb"], forecast["reserved_gb"]),
        ("GB host", results["peak_host_gb"], forecast["peak_host_gb"]),
    ]
    for name, measured, planned in rows:
        if not measured or not planned:
            continue
        line = f"{name}: {measured:.1f} measured, {planned:.1f} forecast ({measured / planned - 1:+.0%})"
        is_explained = name != "GB host"  # which has much that libraries allocate, and is not simulated
        if abs(measured / planned - 1) > TOLERANCE and is_explained:
            if measured > planned:
                line += "; the simulation lacks something that this run allocates: please open an issue with plan.json"
            elif is_short:
                line += f"; the steps had {step_tokens:,.0f} tokens, and the forecast assumes {forecast['tokens_per_step']:,}"
        lines.append(line)
    if forecast["step_seconds"] and step_seconds:
        fast, slow = forecast["step_seconds"]
        line = f"seconds per step: {step_seconds:.2f} measured, {fast:.2f}–{slow:.2f} forecast on {forecast['card']}"
        utilization = min(results.get("gpu_utilization") or [math.nan])  # of the GPU that waited most, if it is known
        if step_seconds > (1 + TOLERANCE) * slow:
            if utilization < 90:
                line += f"; a GPU was busy for {utilization:.0f} % of the time only: --profile shows what it waited for"
            elif utilization >= 90:
                line += "; the GPUs were busy: their clock, power limit or connections may be slower than assumed"
        elif step_seconds < (1 - TOLERANCE) * fast and is_short:
            line += f"; the steps had {step_tokens:,.0f} tokens, and the forecast assumes {forecast['tokens_per_step']:,}"
        lines.append(line)
    return lines
