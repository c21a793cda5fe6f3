"""Finished runs next to each other: a table of speeds and losses. launch.sh calls it:

`python -m harness.commands.report [--json] RUN…`.

The speed-up is over the run with the fewest processes, by tokens/s, so that runs of different length can be compared.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness.commands import parsers
from harness.folder import RESULTS, read_json
from harness.messages import UserError, exit_on_user_error, one_message
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


@one_message()
def main(*words: str) -> None:
    """Prints a table, or the runs as JSON."""
    parsed = parsers.report().read(words)
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
    print_table([tuple(columns), *(tuple(cell_of(run.get(name)) for name in columns.values()) for run in runs)])


def read_run(folder: Path) -> dict[str, Any]:
    """The results of a run, with its name."""
    results = read_json(folder / RESULTS, "world_size", "tokens_per_second")
    if not results:
        raise UserError(f"{folder} is not the folder of a finished run: it has no {RESULTS}")
    return results | {"name": str(folder)}


def speed_of(run: dict[str, Any]) -> float:
    """Tokens per second; rows per second of a run whose rows have no tokens."""
    return run["tokens_per_second"] or run["rows_per_second"]


def cell_of(value: Any) -> str:
    if not isinstance(value, float):
        if value is None:
            return ""
        return str(value)
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


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
