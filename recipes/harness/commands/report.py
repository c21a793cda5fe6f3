"""Finished runs side by side: a table, and a picture of their losses and speed-up. Called by `launch.sh --report RUN…`.

Speed-up is measured against the run with the fewest processes, by tokens/s, so that runs of different length compare.
"""

import sys
from pathlib import Path

from harness.folder import RESULTS, read_json
from harness.launched import fail

COLUMNS = (
    "run",
    "nodes",
    "processes",
    "time (s)",
    "speed-up",
    "efficiency",
    "tokens/s",
    "GB a GPU",
    "GPU %",
    "GB in use",
    "GB host",
    "loss",
)

NUMBERS = ("num_nodes", "world_size", "train_runtime", "tokens_per_second", "peak_gpu_gb", "peak_host_gb", "final_loss")


def main(*folders: str):
    runs = sorted((_read(Path(folder)) for folder in folders), key=lambda run: run["world_size"])
    base = runs[0]
    for run in runs:
        run["speed_up"] = run["tokens_per_second"] / base["tokens_per_second"]
        run["efficiency"] = run["speed_up"] * base["world_size"] / run["world_size"]
    rows = [COLUMNS, *map(_row, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    differing = [
        name for name in ("recipe", "model", "dataset", "device", "tiny") if len({str(run.get(name)) for run in runs}) > 1
    ]
    if differing:
        print(f"\nwarning: these runs differ in {', '.join(differing)}, so their speeds may not compare", file=sys.stderr)
    print(f"\nSpeed-up is over {base['name']}, the run on the fewest processes. Picture: {_draw(runs)}")


def _read(folder: Path) -> dict:
    try:
        results = read_json(folder / RESULTS)
    except ValueError:
        results = {}
    if absent := [name for name in NUMBERS if not isinstance(results.get(name), int | float)]:
        fail(f"{folder} is not the folder of a finished run: its {RESULTS} is missing or does not say {absent[0]}")
    if not results["tokens_per_second"]:
        fail(f"{folder} holds no measurement: its run trained no step")
    history = read_json(folder / "trainer_state.json").get("log_history", [])
    return results | {"name": str(folder), "history": [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]}


def _row(run: dict) -> tuple[str, ...]:
    return (
        run["name"],
        str(run["num_nodes"]),
        str(run["world_size"]),
        f"{run['train_runtime']:.0f}",
        f"{run['speed_up']:.2f}",
        f"{run['efficiency']:.0%}",
        f"{run['tokens_per_second']:,.0f}",
        f"{run['peak_gpu_gb']:.1f}" if run["peak_gpu_gb"] else "CPU",
        " ".join(f"{percent:.0f}" for percent in run.get("gpu_utilization", [])),
        " ".join(f"{used:.1f}" for used in run.get("gpu_memory_gb", [])),
        f"{run['peak_host_gb']:.1f}",
        f"{run['final_loss']:.4f}",
    )


def _draw(runs: list[dict]) -> Path:
    """Draws losses over steps, and speed-up over processes beside the ideal, into report.png of the folder one stands in."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="tight")
    losses, speed = figure.subplots(1, 2)
    for run in runs:
        if run["history"]:
            losses.plot(*zip(*run["history"], strict=True), label=run["name"])
    losses.set(xlabel="step", ylabel="loss (nats per token)")
    sizes = [run["world_size"] for run in runs]
    speed.plot(sizes, [size / sizes[0] for size in sizes], "--", color="grey", label="ideal")
    speed.plot(sizes, [run["speed_up"] for run in runs], "o-", label="measured")
    speed.set(xlabel="processes", ylabel=f"speed-up over {sizes[0]}", xticks=sorted(set(sizes)))
    for axes in (losses, speed):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    path = Path("report.png").absolute()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        fail(f"{path} cannot be written ({error.strerror}): call --report from another folder")
    return path


if __name__ == "__main__":
    main(*sys.argv[1:])
