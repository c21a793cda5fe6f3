"""Finished runs next to each other: a table of speeds and losses, and one of the settings that differ. launch.sh calls it:

`python -m harness.commands.report [--json] RUN…`.

The speed-up is over the run with the fewest processes, by tokens/s, so that runs of different length can be compared.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness.commands import arguments
from harness.folder import RESULTS, read_json
from harness.messages import UserError, exit_on_user_error
from harness.restarts import setting_in_words
from harness.run.metrics import metrics_of

COLUMNS = {  # titles, and names in train_results.json
    "run": "name",
    "nodes": "num_nodes",
    "processes": "world_size",
    "time (s)": "train_runtime",
    "tokens/s": "tokens_per_second",
    "speed-up": "speed_up",
    "efficiency": "efficiency",
    "GB per GPU": "peak_gpu_gb",
    "GB host": "peak_host_gb",
    "loss": "final_loss",
    "eval loss": "eval_loss",
}
DESCRIBED = ("recipe", "model", "dataset", "device", "tiny", "recipe_digest", "config", "dataset_config", "use_peft")
DESCRIBED += ("load_in_4bit", "attention", "global_step")


def main(*words: str) -> None:
    """Prints two tables, or the runs as JSON."""
    parsed = arguments.report().read(words)
    runs = sorted(map(read_run, parsed.paths), key=lambda run: run["world_size"])
    base = runs[0]
    for run in runs:
        run["speed_up"] = speed_of(run) / speed_of(base)
        run["efficiency"] = run["speed_up"] * base["world_size"] / run["world_size"]
    if parsed.json:
        print(json.dumps(runs, indent=2))
        return
    columns = COLUMNS
    for run in runs:
        columns = columns | {name: name for name in metrics_of(run)}
    table = [tuple(columns)]
    for run in runs:
        table.append(tuple(cell_of(run.get(name)) for name in columns.values()))
    print_table(table)
    if differing := differences_of(runs):
        print("\nDifferences between these runs:\n")
        print_table([("setting", *(run["name"] for run in runs)), *differing])


def read_run(folder: Path) -> dict[str, Any]:
    """The results of a run, with its name and its training and evaluation losses as (step, loss)."""
    results = read_json(folder / RESULTS, "world_size", "tokens_per_second")
    if not results or not speed_of(results):
        raise UserError(f"{folder} is not the folder of a finished run: it has no speed in a {RESULTS}")
    history = read_json(folder / "trainer_state.json").get("log_history", [])
    results |= {"name": str(folder), "losses": [], "eval_losses": []}
    for entry in history:
        if "loss" in entry:
            results["losses"].append((entry["step"], entry["loss"]))
        if "eval_loss" in entry:
            results["eval_losses"].append((entry["step"], entry["eval_loss"]))
    return results


def speed_of(run: dict[str, Any]) -> float:
    """Tokens per second; rows per second of a run whose rows have no tokens."""
    return run["tokens_per_second"] or run.get("rows_per_second") or 0.0


def cell_of(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def differences_of(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for everything in which runs differ: what they trained, their settings, the versions of packages."""
    cells: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        settings = {name: run.get(name) for name in DESCRIBED} | run.get("settings", {}) | run.get("versions", {})
        for name, value in settings.items():
            if value is not None and name not in ("output_dir", "run_name"):
                cells.setdefault(name, [""] * len(runs))[number] = setting_in_words(value)
    return [(name, *of_runs) for name, of_runs in cells.items() if len(set(of_runs)) > 1]


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows, the first of them a header, as a Markdown table."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
