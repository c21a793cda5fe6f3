"""A plan for people: text, a table of configs, a picture."""

import itertools
import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from harness.batches import too_few_steps
from harness.commands.report import print_table
from harness.messages import UserError
from planner import cards
from planner.simulation import Refused

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
from FLOPs, bytes and kernels: matrix products run at 60 % of a GPU's rate, transfers overlap with them, and every token counts
in the loss."""


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
    """One plan, from memory to time, on the cards that `shown_cards` returns."""
    need = plan["peak_gpu_gb"] + plan["reserve_gb"]
    gpus = f"{plan['processes']} GPU{'s' if plan['processes'] > 1 else ''}"
    print(f"{plan['recipe']} × {plan['config']}, {gpus} (forecast)\n")
    print(f"GPU memory   {plan['peak_gpu_gb']:.1f} GB peak + {plan['reserve_gb']:.1f} GB margin = {need:.1f} GB per GPU")
    for holder, description in holders_of(plan).items():
        if size := plan["holders"].get(holder):
            print(f"             {size:7.2f}  {description}")
    print(f"reserved     {plan['reserved_gb']:.1f} GB by PyTorch's allocator if there is room")
    peak = max(plan["moments"], key=plan["moments"].get)
    print("by phase     " + ", ".join(f"{moment} {size:.1f}" for moment, size in plan["moments"].items()) + f"; peak in {peak}")
    print(f"host memory  {plan['peak_host_gb']:.0f} GB per node ({of_this_machine(plan['peak_host_gb'], total_memory())})")
    free = of_this_machine(plan["disk_gb"], shutil.disk_usage(".").free / cards.GB)
    print(f"disk         {plan['disk_gb']:.0f} GB ({free}), {plan['download_gb']:.1f} GB of it to download")
    moved = ", ".join(f"{KINDS.get(kind, kind)} {size:.2f} GB" for kind, size in plan["moved_gb"].items())
    print(f"one step     {plan['tokens_per_step']:,} tokens, {plan['tflops']:,.0f} TFLOP per GPU; {moved or 'no transfers'}")
    print(f"             {plan['kernels_per_step']:,} kernels, which a host starts in {plan['host_seconds']:.2f} s")
    if plan["generation"]:
        print_generation(plan["generation"])
    print(f"the run      {describe_length(plan)}\n")
    rows = [("GPU", "fits", "largest micro-batch", "s per step", "to generate", "tokens/s", "slower host", "time")]
    shown = shown_cards(plan, wanted)
    for name in shown:
        rows.append((name, describe_fit(plan, name), str(plan["largest_micro_batch"][name]), *describe_speed(plan, name)))
    print_table(without_empty_columns(rows))
    print(f"For all {len(plan['fits'])} GPUs that --plan knows, pass --json.")
    print(f"\n{describe_host(plan['kernel_seconds'])}")
    waiting = [name for name in shown if plan["fits"][name] and waits_for_host(plan, name)]
    if waiting:
        print(f"The host can be slower than {', '.join(waiting)}: {FEWER_KERNELS}.")
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


def shown_cards(plan: dict[str, Any], wanted: set[str]) -> list[str]:
    """The wanted cards, those of --card, and the first one on which the run fits."""
    known = {card.name for card in cards.CARDS}
    first = first_that_fits(plan)
    return [name for name in plan["fits"] if name not in known or name in wanted or name == first]


def first_that_fits(plan: dict[str, Any]) -> str | None:
    """The first card on which a run fits, None if there is none."""
    return next((name for name, is_enough in plan["fits"].items() if is_enough), None)


def print_side_by_side(plans: list[dict[str, Any] | Refused]) -> None:
    """One line per config."""
    rows = [("config", "GPUs", "GB per GPU", "with margin", "GB host", "smallest GPU", "tokens/s on it")]
    for plan in plans:
        if isinstance(plan, Refused):
            continue
        card = first_that_fits(plan)
        speed = plan["tokens_per_second"].get(card)
        rows.append(
            (
                plan["config"],
                str(plan["processes"]),
                f"{plan['peak_gpu_gb']:.1f}",
                f"{plan['peak_gpu_gb'] + plan['reserve_gb']:.1f}",
                f"{plan['peak_host_gb']:.0f}",
                card or "none",
                f"{speed:,}" if speed else "",
            )
        )
    if len(rows) > 1:
        print_table(without_empty_columns(rows))
    for plan in plans:
        if isinstance(plan, Refused):
            print(f"{plan.config}: {plan.reason}")
    print(f"\n{describe_host(cards.LAUNCH)}\n{NOT_SIMULATED}")


def print_proposals(tried: list[dict[str, Any]]) -> None:
    """What was tried to make the run fit, in the order of its cost."""
    if not tried:
        return
    print(f"\nTo fit {tried[0]['card']}, each simulated:")
    rows = [(change["change"], f"{change['needs']:.1f}", f"{change['needs_host']:.0f}", change["fits"]) for change in tried]
    print_table([("change", "GB per GPU with margin", "GB host", "fits"), *rows])


def print_choice(plan: dict[str, Any]) -> None:
    """The choice for one machine as a command, and the runners-up."""
    if plan["config"] is None:
        print(f"No combination of configs, micro-batches and activation checkpointing fits {plan['machine']} with its margin.")
        print_proposals(plan["proposals"])
        return
    here = plan["on_machine"]
    gpus = f"{plan['processes']} × {plan['gpu']}"
    print(f"{plan['recipe']} on {gpus} (forecast), chosen by the plan; the same by hand:\n\n    {plan['command']}\n")
    rows = [("config and flags", "s per step", "", "GB per GPU with margin", "GB host")]
    for choice in plan["choices"]:
        slower = f"+{choice['slower']:.0%}".replace("%", " %") if rows[1:] else "chosen"
        rows.append(
            (
                shlex.join([choice["config"], *choice["flags"]]),
                f"{choice['step_seconds']:.2f}",
                slower,
                f"{choice['gpu_gb']:.1f}",
                f"{choice['host_gb']:.0f}",
            )
        )
    print_table(rows)
    if plan.get("compiling"):
        print(f"\n{plan['compiling']}")
    tokens = here["tokens_per_second"]
    slower = here["tokens_per_second_with_slower_host"]
    speed = f"{tokens:,} tokens/s" + (f", {slower:,} with a slower host" if slower < tokens else "")
    length = f"; {plan['steps']:,} steps: {describe_time(here['hours'])}" if here["hours"] else ""
    print(f"\n{speed}{length}. {describe_host(here['kernel_seconds'])}")
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
    return f"yes, {free:.1f} GB free" if plan["fits"][name] else f"no, {-free:.1f} GB missing"


def describe_speed(plan: dict[str, Any], name: str) -> tuple[str, str, str, str, str]:
    """Seconds per step, those of it to generate, tokens/s, those with a slower host if it is the limit, and the run's time."""
    if name not in plan["step_seconds"]:
        return "", "", "", "", ""
    slower = f"{plan['tokens_per_second_with_slower_host'][name]:,}" if waits_for_host(plan, name) else ""
    hours = describe_time(plan["hours"][name]) if plan["hours"] else ""
    generating = f"{plan['generating_seconds'][name]:.2f}" if plan["generation"] else ""
    return f"{plan['step_seconds'][name]:.2f}", generating, f"{plan['tokens_per_second'][name]:,}", slower, hours


def waits_for_host(plan: dict[str, Any], name: str) -> bool:
    """Whether a slower host makes a run on a card slower."""
    return plan["tokens_per_second_with_slower_host"][name] < plan["tokens_per_second"][name]


def describe_host(seconds: float) -> str:
    """What is assumed of the host, which starts a kernel in so many seconds."""
    source = "as on two servers that were measured" if seconds == cards.LAUNCH else "measured here"
    return f"A host starts a kernel in {1e6 * seconds:.0f} µs ({source}), a slower host in {2e6 * seconds:.0f} µs."


def describe_time(hours: float) -> str:
    """Hours in hours, minutes or seconds, whichever there is at least one of."""
    if hours >= 1:
        return f"{two_digits(hours)} h"
    if hours * 60 >= 1:
        return f"{two_digits(60 * hours)} min"
    return f"{two_digits(3600 * hours)} s"


def two_digits(number: float) -> str:
    """A number above 0 with two significant digits and without an exponent: 0.034, 2.3, 1,200."""
    rounded = float(f"{number:.1e}")
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(rounded)))}f}" if rounded else "0"


def of_this_machine(needed: float, available: float) -> str:
    return f"this machine has {'' if available >= needed else 'only '}{available:.0f}"


def total_memory() -> float:
    import psutil

    return psutil.virtual_memory().total / cards.GB


def without_empty_columns(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    columns = zip(*rows, strict=True)
    used = [column for column in columns if any(column[1:])]
    return list(zip(*used, strict=True))


def draw(plan: dict[str, Any], curve: list[tuple[str, dict[str, int]]], path: Path = Path("plan.png")) -> Path:
    """Draws memory over the step, stacked by holder, with lines at the sizes of cards."""
    from matplotlib.figure import Figure

    curve = [(moment, held) for moment, held in curve if moment not in ("load", "first step")]
    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    top = max(sum(held.values()) for _, held in curve) / cards.GB
    described = holders_of(plan)
    for _, held in curve:
        for holder in held:
            described.setdefault(holder, holder)
    shown = []
    labels = []
    for holder, label in described.items():
        sizes = [held.get(holder, 0) / cards.GB for _, held in curve]
        if max(sizes) > 0.005 * top:
            shown.append(sizes)
            labels.append(label)
    axes.stackplot(range(len(curve)), *shown, labels=labels)
    start = 0
    for moment, group in itertools.groupby(moment for moment, _ in curve):
        count = len(list(group))
        if count > len(curve) / 40:
            axes.text(start + count / 2, top * 1.04, moment, ha="center", fontsize="small")
        start += count
    for size in LINES:
        if size < 2.5 * top:
            axes.axhline(size, linestyle="--", color="grey", linewidth=0.8)
            axes.text(len(curve), size, f" {size} GB", va="center", fontsize="small")
    axes.set(ylabel="GB on one GPU", xticks=[], title=f"{plan['recipe']} × {plan['config']} (forecast)", xlim=(0, len(curve)))
    figure.legend(fontsize="small", loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"{path.absolute()} cannot be written ({error.strerror}): call --plan from another folder") from error
    return path.absolute()
