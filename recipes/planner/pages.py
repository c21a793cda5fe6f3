"""A plan for people: text, a table of configs, a picture."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from harness.commands.report import print_table
from harness.data.reading import too_few_steps
from harness.messages import plural
from planner import cards
from planner.hardware import host_memory
from planner.memory import fits, reserve
from planner.simulation import Refused, Simulation

LINES = (16, 24, 40, 80)  # GB, of the picture
# What holds memory on a GPU.
HOLDERS = {
    "weights": "weights",
    "cache": "keys and values of the texts that are generated",
    "gathered": "gathered layers, weights in bf16 or fp16",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "loss",
    "images": "pixels of all images of a step",
    "rest": "other",
}
KINDS = {
    "to_gpu": "to the GPU",
    "to_host": "to the host",
    "activations": "activations to the host and back",
    "added_on_host": "added on the host",
    "all_reduced": "all-reduced",
    "across_nodes": "across nodes",
}
FEWER_KERNELS = "a larger --per_device_train_batch_size or --torch_compile true needs fewer kernels for a step"
NOT_SIMULATED = """\
The margin is for what is not simulated: CUDA's context, NCCL's buffers, cuBLAS workspaces, fragmentation. The time is computed
from FLOPs, bytes and kernels: matrix products run at 60 % of a GPU's rate, transfers overlap with them, a host starts a kernel
in 26 µs (17 µs when it generates), and every token counts in the loss."""


def print_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def holders_of(plan: dict[str, Any]) -> dict[str, str]:
    """What holds memory on a GPU: names and descriptions, also of the models that a trainer holds next to the trained one."""
    described = dict(HOLDERS)
    if plan["shards"] == 1:
        described["gathered"] = "the layers' weights in bf16 or fp16"
    for name in plan["holders"]:
        described.setdefault(name, f"{name}, which the trainer holds too")
    return described


def print_plan(plan: dict[str, Any], wanted: set[str]) -> None:
    """One plan, from memory to time, on the wanted cards and the first one on which the run fits."""
    peak = plan["peak_gpu_gb"]
    margin = plan["reserve_gb"]
    gpus = plural(plan["processes"], "GPU")
    print(f"{plan['recipe']} × {plan['config']}, {gpus} (forecast)\n")
    print(f"GPU memory   {peak:.1f} GB peak + {margin:.1f} GB margin = {peak + margin:.1f} GB per GPU")
    for holder, description in holders_of(plan).items():
        if size := plan["holders"].get(holder):
            print(f"             {size:7.2f}  {description}")
    moments = plan["moments"]
    phases = ", ".join(f"{moment} {size:.1f}" for moment, size in moments.items())
    print(f"by phase     {phases}; peak in {max(moments, key=moments.get)}")
    print(f"host memory  {plan['peak_host_gb']:.0f} GB per node (this machine has {host_memory() / cards.GB:.0f})")
    print(f"disk         {plan['disk_gb']:.0f} GB (free here: {shutil.disk_usage('.').free / cards.GB:.0f})")
    moved = ", ".join(f"{KINDS.get(kind, kind)} {size:.2f} GB" for kind, size in plan["moved_gb"].items())
    print(f"one step     {plan['tokens_per_step']:,} tokens, {plan['tflops']:,.0f} TFLOP per GPU; {moved or 'no transfers'}")
    kernels = plan["kernels_per_step"]
    print(f"             {kernels:,} kernels, which a host starts in {kernels * cards.LAUNCH:.2f} s")
    if plan["generation"]:
        print_generation(plan["generation"])
    print(f"the run      {describe_length(plan)}\n")
    rows = [("GPU", "fits", "largest micro-batch", "s per step", "tokens/s", "time")]
    waiting = []
    for name, is_enough in plan["fits"].items():
        if name not in wanted and name != first_that_fits(plan):
            continue
        largest = str(plan["largest_micro_batch"][name])
        rows.append((name, describe_fit(plan, name), largest, *describe_speed(plan, name)))
        if is_enough and waits_for_host(plan, name):
            waiting.append(name)
    print_table(rows)
    print(f"For all {len(plan['fits'])} GPUs that --plan knows, pass --json.")
    if waiting:
        print(f"\n{', '.join(waiting)} would wait for the host: {FEWER_KERNELS}.")
    print(f"\n{NOT_SIMULATED}")


def print_generation(generation: dict[str, Any]) -> None:
    """What a GPU generates for training."""
    print(
        f"generating   {generation['texts']} texts at once, {generation['times_per_step']:g} times a step: "
        f"{generation['tokens']} tokens each, after prompts of {generation['prompt_tokens']} (assumed)"
    )
    print(f"             {generation['kernels_per_token']:,} kernels for a token of all texts")
    if gathered := generation["gathered_gb_per_token"]:
        print(
            f"             each GPU gathers {gathered:.1f} GB of weights for a token, because they are sharded; with DDP nothing"
        )


def first_that_fits(plan: dict[str, Any]) -> str | None:
    """The first card on which a run fits, None if there is none."""
    for name, is_enough in plan["fits"].items():
        if is_enough:
            return name
    return None


def print_side_by_side(plans: list[dict[str, Any]]) -> None:
    """One line per config."""
    rows = [("config", "GPUs", "GB per GPU", "with margin", "GB host", "smallest GPU", "tokens/s on it")]
    for plan in plans:
        if "refused" not in plan:
            card = first_that_fits(plan) or "none"
            peak = plan["peak_gpu_gb"]
            need = f"{peak + plan['reserve_gb']:.1f}"
            host = f"{plan['peak_host_gb']:.0f}"
            speed = f"{plan['tokens_per_second'].get(card, 0):,}"
            rows.append((plan["config"], str(plan["processes"]), f"{peak:.1f}", need, host, card, speed))
    print_table(rows)
    for plan in plans:
        if "refused" in plan:
            print(f"{plan['config']}: {plan['refused']}")
    print(f"\n{NOT_SIMULATED}")


def print_proposal(card: cards.Card, flags: list[str], found: Simulation | Refused) -> None:
    """What a run needs with these flags, which could make it fit a card."""
    if isinstance(found, Simulation):
        peak = found.peak.bytes
        size = (peak + reserve(found, peak, card)) / cards.GB
        fit = "fits" if fits(card, found, peak) else "does not fit"
        print(f"with {shlex.join(flags)}: {size:.1f} GB per GPU with margin, {fit} {card.name}")


def print_choice(plan: dict[str, Any]) -> None:
    """The choice for one machine as a command, and the runners-up."""
    if plan["config"] is None:
        print(f"No combination of configs, micro-batches and activation checkpointing fits {plan['machine']} with its margin.")
        print(plan["proposals"])
        return
    here = plan["on_machine"]
    print(f"{plan['recipe']} on {plan['processes']} × {plan['gpu']} (forecast), chosen by the plan; the same by hand:\n")
    print(f"    {plan['command']}\n")
    rows = [("config and flags", "s per step", "slower", "GB per GPU with margin", "GB host")]
    for choice in plan["choices"]:
        rows.append(
            (
                shlex.join([choice["config"], *choice["flags"]]),
                f"{choice['step_seconds']:.2f}",
                f"{choice['slower']:.0%}",
                f"{choice['gpu_gb']:.1f}",
                f"{choice['host_gb']:.0f}",
            )
        )
    print_table(rows)
    if plan["compiling"]:
        print(f"\n{plan['compiling']}")
    length = ""
    if here["hours"]:
        length = f"; {plan['steps']:,} steps: {describe_time(here['hours'])}"
    print(f"\n{here['tokens_per_second']:,} tokens/s{length}.")
    if plan["generation"]:
        print(f"{here['generating_seconds']:.1f} of {here['step_seconds']:.1f} s of a step generate texts.")
    if here["signal_seconds"]:
        print(
            f"On SLURM, pass `sbatch --signal USR1@{here['signal_seconds']}`: without it, the signal comes 300 s before the time "
            f"limit, and two steps can take longer."
        )
    if plan["steps_are_estimated"] and (few := too_few_steps(plan["steps"])):
        print(f"warning: {few}")
    if not here["has_disk"]:
        print(f"warning: the run needs {plan['disk_gb']:.0f} GB of disk, {plan['machine']} has less.")


def describe_length(plan: dict[str, Any]) -> str:
    if not plan["steps"]:
        return f"unknown number of steps, pass --max_steps to see hours: {plan['no_steps']}"
    if plan["steps_are_estimated"]:
        few = too_few_steps(plan["steps"])
        return f"about {plan['steps']:,} steps, estimated from the first rows of the dataset{few and f'. {few}'}"
    return f"{plan['steps']:,} steps"


def describe_fit(plan: dict[str, Any], name: str) -> str:
    free = plan["free_gb"][name]
    if name not in plan["step_seconds"]:
        return "no bf16"
    if plan["fits"][name]:
        return f"yes, {free:.1f} GB free"
    return f"no, {-free:.1f} GB missing"


def describe_speed(plan: dict[str, Any], name: str) -> tuple[str, str, str]:
    """Seconds per step, tokens/s, and the run's time."""
    if name not in plan["step_seconds"]:
        return "", "", ""
    seconds = f"{plan['step_seconds'][name]:.2f}"
    if plan["generation"]:
        seconds += f", {plan['generating_seconds'][name]:.2f} to generate"
    time = ""
    if plan["hours"]:
        time = describe_time(plan["hours"][name])
    return seconds, f"{plan['tokens_per_second'][name]:,}", time


def waits_for_host(plan: dict[str, Any], name: str) -> bool:
    """Whether a card computes a step in less time than a host needs to start its kernels."""
    training = plan["step_seconds"][name] - plan["generating_seconds"][name]
    return training <= plan["kernels_per_step"] * cards.LAUNCH + 0.001


def describe_time(hours: float) -> str:
    """Hours in hours, minutes or seconds, whichever there is at least one of."""
    if hours >= 1:
        return f"{hours:,.1f} h"
    if hours * 60 >= 1:
        return f"{60 * hours:.1f} min"
    return f"{3600 * hours:.1f} s"


def draw(plan: dict[str, Any], curve: list[tuple[str, dict[str, int]]], path: Path = Path("plan.png")) -> Path:
    """Draws memory over the step, stacked by holder, with lines at the sizes of cards."""
    from matplotlib.figure import Figure

    curve = [(moment, held) for moment, held in curve if moment not in ("load", "first step")]
    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    top = max(sum(held.values()) for _, held in curve) / cards.GB
    described = {holder: holder for _, held in curve for holder in held} | holders_of(plan)
    sizes = {label: [held.get(holder, 0) / cards.GB for _, held in curve] for holder, label in described.items()}
    sizes = {label: row for label, row in sizes.items() if max(row) > 0.005 * top}
    axes.stackplot(range(len(curve)), *sizes.values(), labels=list(sizes))
    moments = [moment for moment, _ in curve]
    for moment in dict.fromkeys(moments):
        if moments.count(moment) > len(curve) / 40:
            axes.text(moments.index(moment), top * 1.04, moment, fontsize="small")
    for size in LINES:
        if size < 2.5 * top:
            axes.axhline(size, linestyle="--", color="grey", linewidth=0.8)
            axes.text(len(curve), size, f" {size} GB", va="center", fontsize="small")
    axes.set(ylabel="GB on one GPU", xticks=[], title=f"{plan['recipe']} × {plan['config']} (forecast)", xlim=(0, len(curve)))
    figure.legend(fontsize="small", loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=120)
    return path.absolute()
