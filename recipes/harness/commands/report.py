"""Finished runs next to each other: a table, and a picture of their losses and speed-up. launch.sh calls it:

`python -m harness.commands.report [--json] RUN…`.

The speed-up is over the run with the fewest processes, by tokens/s, so that runs of different length can be compared; runs with
equally many processes have no efficiency.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness.commands import arguments
from harness.folder import RESULTS, read_json
from harness.messages import UserError, exit_on_user_error
from harness.restarts import in_words
from harness.run.metrics import metrics_of

COLUMNS = (
    "run",
    "nodes",
    "processes",
    "time (s)",
    "speed-up",
    "efficiency",
    "tokens/s",
    "GB per GPU",
    "GB host",
    "loss",
    "mean loss",
    "eval loss before",
    "eval loss",
)
LOSSES = ("final_loss", "train_loss", "eval_loss_on_start", "eval_loss")
COMPARED = ("recipe", "model", "dataset", "device", "tiny")
DESCRIBED = (*COMPARED, "recipe_digest", "config", "dataset_config", "use_peft", "load_in_4bit", "attention", "global_step")


def main(*words: str) -> None:
    """Prints a table and draws a picture, or prints the runs as JSON."""
    parsed = arguments.report().read(words)
    runs = sorted(map(read_run, parsed.paths), key=lambda run: run["world_size"])
    base = runs[0]
    for run in runs:
        run["speed_up"] = speed_of(run) / speed_of(base)
        run["efficiency"] = run["speed_up"] * base["world_size"] / run["world_size"]
    if parsed.json:
        print(json.dumps(runs, indent=2))
        return
    own = list(dict.fromkeys(name for run in runs for name in metrics_of(run)))
    have_equal_size = len({run["world_size"] for run in runs}) == 1  # of which an efficiency says nothing
    kept = [place for place, name in enumerate(COLUMNS) if name != "efficiency" or not have_equal_size]
    rows = [tuple(row[place] for place in kept) for row in (COLUMNS, *map(table_row, runs))]
    print_table([(*rows[0], *own), *((*row, *cells_of(run, own)) for row, run in zip(rows[1:], runs, strict=True))])
    if differing := differences_of(runs):
        print("\nDifferences between these runs:\n")
        print_table([("setting", *(run["name"] for run in runs)), *differing])
    differences = [name for name in COMPARED if len({str(run.get(name)) for run in runs}) > 1]
    if differences:
        print(f"\nwarning: these runs differ in {', '.join(differences)}, so their speeds may not be comparable", file=sys.stderr)
    which = "the first run" if have_equal_size else "the run with the fewest processes"
    print(f"\nSpeed-up is over {base['name']}, {which}. Picture: {draw(runs)}")


def read_run(folder: Path) -> dict[str, Any]:
    """The results of a run, with its name and its training and evaluation losses as (step, loss)."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: pass the output directories of finished runs")
    results = read_json(folder / RESULTS, "world_size", "tokens_per_second")
    if not results:
        raise UserError(f"{folder} is not the folder of a finished run: it has no {RESULTS}, which a run writes at its end")
    if results["world_size"] < 1 or not speed_of(results) > 0:
        raise UserError(f"{folder} has no speed: its run trained no step")
    history = read_json(folder / "trainer_state.json").get("log_history", [])
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    eval_losses = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    return results | {"name": str(folder), "losses": losses, "eval_losses": eval_losses}


def speed_of(run: dict[str, Any]) -> float:
    """Tokens per second; rows per second of a run whose rows have no tokens."""
    return run["tokens_per_second"] or run.get("rows_per_second") or 0.0


def cells_of(run: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    return tuple(f"{run[name]:.4g}" if isinstance(run.get(name), int | float) else "" for name in names)


def table_row(run: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a run, in the order of COLUMNS."""
    return (
        run["name"],
        str(run["num_nodes"]),
        str(run["world_size"]),
        f"{run['train_runtime']:.0f}",
        f"{run['speed_up']:.2f}",
        f"{run['efficiency']:.0%}",
        f"{run['tokens_per_second']:,.0f}",
        f"{run['peak_gpu_gb']:.1f}" if run["peak_gpu_gb"] else "CPU",
        f"{run['peak_host_gb']:.1f}",
        *("" if run.get(name) is None else f"{run[name]:.4f}" for name in LOSSES),
    )


def differences_of(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for everything in which runs differ: what they trained, their settings, the versions of packages."""
    described = []
    for run in runs:
        files = run.get("data_files") or []
        data = {"data_files": f"{len(files)} with {sum(size for _, size, _ in files):,} bytes"} if files else {}
        told = {name: run.get(name) for name in DESCRIBED} | data | run.get("settings", {}) | run.get("versions", {})
        described.append({name: value for name, value in told.items() if name not in ("output_dir", "run_name")})
    names = dict.fromkeys(name for told in described for name in told)
    rows = [(name, *("" if told.get(name) is None else in_words(told[name]) for told in described)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows, the first of them a header, as a Markdown table."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def draw(runs: list[dict[str, Any]]) -> Path:
    """Draws losses over steps, and speed-up over processes with the ideal, into report.png of the working directory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="tight")
    losses, speed = figure.subplots(1, 2)
    for run in runs:
        name = run["name"].replace("$", r"\$")  # which begins a formula
        line = losses.plot(*zip(*run["losses"], strict=True), label=name) if run["losses"] else []
        if run["eval_losses"]:
            colour = line[0].get_color() if line else None
            losses.plot(*zip(*run["eval_losses"], strict=True), "o--", color=colour, label=f"{name}, evaluation")
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
        raise UserError(f"{path} cannot be written ({error.strerror}): call --report from another folder") from error
    return path


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
