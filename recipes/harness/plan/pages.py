"""A plan as a person reads it: text, a table of configs, a picture."""

import shutil
import sys
from pathlib import Path

from harness.launched import fail
from harness.plan import cards

# What holds memory on a GPU, and how it is called.
NAMES = {
    "weights": "weights",
    "gathered": "gathered layers, weights in bf16 or fp16",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "loss",
    "rest": "the rest",
}
NOT_SIMULATED = """\
Not simulated: CUDA's context, NCCL's buffers, cuBLAS' workspaces, the allocator's fragments; the reserve is for them. Time is a
roofline, not measured. It is a range: at best products run at 80 % of a card's rate and all that moves hides behind them, at
worst at 40 % with nothing hidden. Every token counts as one that trains."""


def progress(message: str):
    print(message, file=sys.stderr, flush=True)


def whole(plan: dict):
    """One plan, from memory to money."""
    need = plan["peak_gpu_gb"] + plan["reserve_gb"]
    print(f"{plan['recipe']} × {plan['config']}, {plan['processes']} GPU{'s' * (plan['processes'] > 1)} (forecast)\n")
    print(f"GPU memory   {plan['peak_gpu_gb']:.1f} GB at its peak, {plan['reserve_gb']:.1f} GB in reserve: {need:.1f} GB a GPU")
    for name in NAMES:
        if size := plan["holders"].get(name):
            print(f"             {size:7.2f}  {NAMES[name]}")
    print("by moment    " + ", ".join(f"{name} {size:.1f}" for name, size in plan["moments"].items()))
    print(f"host memory  {plan['peak_host_gb']:.0f} GB a node{_against(plan['peak_host_gb'], _own_memory())}")
    free = _against(plan["disk_gb"], shutil.disk_usage(".").free / cards.GB)
    print(f"disk         {plan['disk_gb']:.0f} GB{free}, of which {plan['download_gb']:.1f} GB are downloaded")
    kinds = {"to_gpu": "to the GPU", "to_host": "to the host", "all_reduced": "all-reduced", "across_nodes": "across nodes"}
    moved = ", ".join(f"{kinds.get(kind, kind)} {size:.2f} GB" for kind, size in plan["moved_gb"].items())
    print(f"one step     {plan['tokens_a_step']:,} tokens, {plan['tflops']:,.0f} TFLOP a GPU; {moved or 'nothing is moved'}")
    print(f"the run      {_length(plan)}\n")
    rows = [("card", "fits", "largest micro-batch", "s a step", "tokens/s", "hours", "price")]
    for name, fits in plan["fits"].items():
        rows.append((name, _fits(plan, name, fits), str(plan["largest_micro_batch"][name]), *_ranges(plan, name)))
    _table(rows)
    print(f"\n{NOT_SIMULATED}")


def side_by_side(plans: list[dict]):
    """A line for every config."""
    rows = [("config", "GPUs", "GB a GPU", "with reserve", "GB host", "smallest card", "tokens/s on it")]
    for plan in (plan for plan in plans if "refused" not in plan):
        card = next((name for name, fits in plan["fits"].items() if fits), None)
        speed = plan["tokens_per_second"].get(card)
        rows.append(
            (
                plan["config"],
                str(plan["processes"]),
                f"{plan['peak_gpu_gb']:.1f}",
                f"{plan['peak_gpu_gb'] + plan['reserve_gb']:.1f}",
                f"{plan['peak_host_gb']:.0f}",
                card or "none",
                f"{speed[0]:,}–{speed[1]:,}" if speed else "",
            )
        )
    if len(rows) > 1:
        _table(rows)
    for plan in (plan for plan in plans if "refused" in plan):
        print(f"{plan['config']}: {plan['refused']}")
    print(f"\n{NOT_SIMULATED}")


def proposals(tried: list[dict]):
    """What was tried to make it fit, in the order of what it costs."""
    if not tried:
        return
    print(f"\nTo fit {tried[0]['card']}, each tried by a simulation:")
    _table([("change", "GB a GPU with reserve", "fits")] + [(t["change"], f"{t['needs']:.1f}", t["fits"]) for t in tried])


def _length(plan: dict) -> str:
    if not plan["steps"]:
        return "as many steps as its data give, which nobody here knows: --max_steps N says hours"
    about = "about {:,} steps, by the first rows of its data" if plan["steps_are_estimated"] else "{:,} steps"
    return about.format(plan["steps"])


def _fits(plan: dict, name: str, fits: bool) -> str:
    card = next(card for card in cards.CARDS if card.name == name)
    left = card.memory / cards.GB - plan["peak_gpu_gb"] - plan["reserve_gb"]
    if name not in plan["step_seconds"]:
        return "no bf16"
    return f"yes, {left:.1f} GB left" if fits else f"no, {-left:.1f} GB short"


def _ranges(plan: dict, name: str) -> tuple[str, str, str, str]:
    def span(values, style):
        return f"{values[0]:{style}}–{values[1]:{style}}" if values else ""

    step, speed = plan["step_seconds"].get(name), plan["tokens_per_second"].get(name)
    return span(step, ".2f"), span(speed, ","), span(plan["hours"].get(name), ".1f"), span(plan["price"].get(name), ".2f")


def _against(needed: float, there: float) -> str:
    return f" (this machine has {there:.0f})" if there >= needed else f" (this machine has only {there:.0f})"


def _own_memory() -> float:
    import psutil

    return psutil.virtual_memory().total / cards.GB


def _table(rows: list[tuple]):
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in used}
    for number, row in enumerate(rows):
        print("| " + " | ".join(row[column].ljust(widths[column]) for column in used) + " |")
        if number == 0:
            print("|" + "|".join("-" * (widths[column] + 2) for column in used) + "|")


def draw(plan: dict, curve: list[dict], path: Path = Path("plan.png")) -> Path:
    """Memory over the step, stacked by what holds it, with lines at the cards' sizes."""
    from matplotlib.figure import Figure

    curve = [point for point in curve if point["moment"] not in ("load", "first step")]
    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    layers = {name: [point["by"].get(name, 0) / cards.GB for point in curve] for name in NAMES}
    layers = {name: sizes for name, sizes in layers.items() if max(sizes) > 0.01}
    axes.stackplot(range(len(curve)), *layers.values(), labels=[NAMES[name] for name in layers])
    begins = [n for n, point in enumerate(curve) if n == 0 or curve[n - 1]["moment"] != point["moment"]]
    top = max(sum(point["by"].values()) for point in curve) / cards.GB
    for begin, end in zip(begins, [*begins[1:], len(curve)], strict=True):
        if end - begin > len(curve) / 40:
            axes.text((begin + end) / 2, top * 1.04, curve[begin]["moment"], ha="center", fontsize="small")
    for size in cards.LINES:
        if size < 2.5 * top:
            axes.axhline(size, linestyle="--", color="grey", linewidth=0.8)
            axes.text(len(curve), size, f" {size} GB", va="center", fontsize="small")
    axes.set(ylabel="GB on one GPU", xticks=[], title=f"{plan['recipe']} × {plan['config']} (forecast)", xlim=(0, len(curve)))
    figure.legend(fontsize="small", loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        fail(f"{path.absolute()} cannot be written ({error.strerror}): call --plan from another folder")
    return path.absolute()
