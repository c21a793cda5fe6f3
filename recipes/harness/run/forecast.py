"""A run on GPUs against its forecast: plan.json in the output directory, which the launcher makes while the run trains.

What a run has measured is kept next to the caches, and `plan/cards.py` reads it. Nothing is uploaded.
"""

import contextlib
import math
import re
from pathlib import Path
from typing import Any

from harness.folder import read_json, write_json

PLAN = "plan.json"
TOLERANCE = 0.1  # a larger difference is explained
LEAST_STEPS, LEAST_SECONDS = 5, 30  # of a run that is kept; in a shorter one the first step, which is slower, weighs too much
# What is kept of train_results.json.
KEPT = (
    *("recipe", "config", "device", "world_size", "num_nodes", "global_step", "gpu_utilization", "finished"),
    *("peak_gpu_gb", "peak_gpu_reserved_gb", "peak_host_gb", "forecast"),
)


def read_forecast(output_dir: Path, device: str) -> dict[str, Any] | None:
    """The forecast of the run for its card, None if there is none. Memory in GB (1e9 bytes), speeds as [slow, fast] ends."""
    try:
        plan = read_json(output_dir / PLAN)
    except ValueError:
        return None
    if "peak_mb" in plan:  # of a rehearsal on CPU
        return plan
    return forecast_of(plan, device) if "peak_gpu_gb" in plan else None


def forecast_of(plan: dict[str, Any], device: str) -> dict[str, Any]:
    """What a plan (`--plan … --json`) says about a run on `device`, PyTorch's name of a GPU."""
    card = next((name for name in plan["tokens_per_second"] if words_of(name) <= words_of(device)), None)
    memory = ("peak_gpu_gb", "peak_host_gb", "tokens_per_step")
    return {name: plan.get(name) for name in memory} | {
        "card": card,
        "reserved_gb": plan.get("reserved_on_gb", {}).get(card, plan.get("reserved_gb")),
        "tokens_per_second": plan["tokens_per_second"].get(card),
        "step_seconds": plan.get("step_seconds", {}).get(card),
        **({"step_parts": plan["step_parts"][card]} if card in plan.get("step_parts", {}) else {}),
    }


def words_of(name: str) -> set[str]:
    """The parts of a card's name: those of "A100 80 GB" are among those of "NVIDIA A100-SXM4-80GB"."""
    return set(re.findall(r"[A-Z0-9]+", re.sub(r"(\d) GB", r"\1GB", name).upper()))


def measurement_of(results: dict[str, Any]) -> dict[str, Any] | None:
    """What a run says about its GPU: `results` without what calibration does not need, with seconds and tokens of a step.

    None if it says too little: it has no forecast for its card, was resumed, or had fewer than 5 steps or 30 seconds of steps.
    A run that was stopped has no results; of one with --profile or --torch_compile nothing is kept.
    """
    forecast, steps = results.get("forecast") or {}, results["global_step"]
    if "step_parts" not in forecast or results["resumed_from_step"] or not results["tokens_per_second"]:
        return None
    seconds = results["tokens"] / results["tokens_per_second"]
    if steps < LEAST_STEPS or seconds < LEAST_SECONDS:
        return None
    versions = {name: results["versions"][name] for name in ("torch", "transformers", "trl")}
    of_step = {"step_seconds": seconds / steps, "tokens_per_step": results["tokens"] / steps}
    return {name: results.get(name) for name in KEPT} | of_step | {"versions": versions}


def keep_measurement(results: dict[str, Any]) -> None:
    """Writes what a run says about its GPU, if it says enough. A folder that cannot be written is no error."""
    if measurement := measurement_of(results):
        name = re.sub(r"[^\w.]+", "-", " ".join(str(measurement[key]) for key in ("device", "recipe", "config", "finished")))
        with contextlib.suppress(OSError):
            measurements_folder().mkdir(parents=True, exist_ok=True)
            write_json(measurements_folder() / f"{name}.json", measurement)


def measurements_folder() -> Path:
    """Where all runs of this user keep what they have measured, next to the caches."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME, "measurements")


def describe_forecast(results: dict[str, Any]) -> list[str]:
    """Lines that compare the results of a run with `results["forecast"]`, and explain differences above 10 %."""
    forecast, lines = results["forecast"], []
    step_tokens = results["tokens"] / max(1, results["global_step"])
    if "peak_mb" in forecast:  # of a rehearsal on CPU
        return describe_rehearsal(results, step_tokens)
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


def describe_rehearsal(results: dict[str, Any], step_tokens: float) -> list[str]:
    """Lines that compare a rehearsal on CPU, which had `step_tokens` tokens per step, with its forecast."""
    forecast = results["forecast"]
    lines = [f"tokens per step: {step_tokens:,.0f} measured, {forecast['tokens_per_step']:,} forecast"]
    if step_tokens < 0.99 * forecast["tokens_per_step"]:
        lines[0] += "; some rows are shorter than the maximum, which the forecast assumes"
    for name, key in (("weights", "weights_mb"), ("optimizer states", "optimizer_mb"), ("peak of a step", "peak_mb")):
        if key not in results:  # the run had one step
            continue
        measured, planned = results[key], forecast[key]
        difference = f" ({measured / planned - 1:+.1%})" if planned else ""
        lines.append(f"MB of process 0, {name}: {measured:.3f} measured, {planned:.3f} forecast{difference}")
    lines.append(
        f"GB host: {results['peak_host_gb']:.1f} measured, {forecast['peak_host_gb']:.1f} forecast; "
        "the forecast has 2.5 GB per process, for Python with CUDA's libraries"
    )
    return lines
