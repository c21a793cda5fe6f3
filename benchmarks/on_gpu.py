"""Measures every recipe at its real size on the GPUs of this machine: speed, memory, and whether rehearsals give the same losses.

    .venv/bin/python benchmarks/on_gpu.py                                   # all recipes
    .venv/bin/python benchmarks/on_gpu.py qwen2_fineweb_edu                 # one: some minutes
    .venv/bin/python benchmarks/on_gpu.py llama31_70b_qlora --minutes 30    # more layers of the 70B

It needs no network: the weights are random, the text is Python's documentation, and a Hub on this machine serves both to
./launch.sh. A process may use as much memory as the card that its config is for. Every measurement becomes a JSON file in
benchmarks/results, and those of an unchanged config replace the forecasts in README's table. A config for more GPUs than there
are runs on those there are. Of the 70B, one of two processes trains some of the 80 layers; the rest is extrapolated, and its file
says so. Without a GPU everything runs on the CPU, with models of two tiny layers, and the files go to outputs/on_gpu.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import inputs
from measuring import SHORT_RUN, find_device_in_process, measure, run, settings_of

README_ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (?:yes|no) \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)
LAYERS_OF_70B = 80
BYTES_OF_LAYER = 4e9  # on disk: twice in bf16, once in 4 bits


def pairs(recipe: str, gpus: int) -> list[tuple[str, dict[str, Any]]]:
    """The configs of a recipe in README's table that these GPUs can run, unchanged.

    If there is none, the first of its configs, with the changes that make it run on these GPUs.
    """
    rows = README_ROW.findall((inputs.ROOT / "README.md").read_text("utf-8"))
    configs = {config: settings_of(config) for name, config, *_ in rows if name == recipe}
    fitting = [
        (config, {})
        for config, settings in configs.items()
        if settings["num_processes"] <= gpus and settings.get("num_machines", 1) == 1
    ]
    if fitting:
        return fitting
    config, settings = next(iter(configs.items()))
    return [(config, {"num_machines": 1, "num_processes": min(settings["num_processes"], gpus)})]


def extrapolate(few: dict, more: dict, layers: int, processes: int) -> dict[str, Any]:
    """Continues a line through two measurements with different numbers of layers to all layers and processes."""
    first, second = (record["sizes"]["num_hidden_layers"] for record in (few, more))
    values = {}
    for name in ("seconds_per_step", "peak_gpu_gb", "peak_gpu_reserved_gb", "peak_host_gb"):
        per_layer = (more[name] - few[name]) / (second - first)
        values[name] = round(few[name] + per_layer * (layers - first), 3)
    tokens_per_step = more["tokens_per_second"] * more["seconds_per_step"] / more["world_size"]  # of one process
    return {
        "measurement": f"{more['recipe']} × {more['config']}, extrapolated from {first} and {second} layers to all",
        "recipe": more["recipe"],
        "config": more["config"],
        "device": more["device"],
        "limit_gb": more["limit_gb"],
        "extrapolated": True,
        "tokens_per_second": round(processes * tokens_per_step / values["seconds_per_step"], 1),
        **values,
    }


def measure_some_layers(recipe: str, config: str, device: dict, minutes: float, steps: int) -> list[dict]:
    """Measures a model that is too large: with few layers, then with as many as time and disk allow; then extrapolates."""
    processes = settings_of(config)["num_processes"]
    changes = {"num_processes": min(processes, max(1, device["gpus"]))}
    few, many, flags = 1, 2, ()
    if device["gpus"]:
        few, flags = 4, ("--global_batch_size", str(8 * changes["num_processes"]))
    began = time.monotonic()
    records = [measure(recipe, config, changes, device, steps, flags, num_hidden_layers=few)]
    if device["gpus"]:
        by_time = int(few * minutes * 60 / (time.monotonic() - began))
        by_disk = int(shutil.disk_usage(tempfile.gettempdir()).free / BYTES_OF_LAYER) - 4  # the embeddings need room for 4
        many = max(2 * few, min(LAYERS_OF_70B, by_time, by_disk))
    records.append(measure(recipe, config, changes, device, steps, flags, num_hidden_layers=many))
    if any("failed" in record for record in records):
        return records
    return [*records, extrapolate(*records, LAYERS_OF_70B, processes)]


def rehearse(recipe: str, config: str, device: dict) -> dict[str, Any]:
    """Runs the same rehearsal on the GPU and on the CPU, and compares their losses."""
    words, environment = ["--tiny", recipe, config, *SHORT_RUN, "20"], os.environ | {"PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        on_gpu = run(words, Path(folder), environment)
        on_cpu = run(words, Path(folder), environment | {"CUDA_VISIBLE_DEVICES": ""})
    record = {
        "measurement": f"rehearsal of {recipe} × {config}",
        "recipe": recipe,
        "config": config,
        "device": device["device"],
        "losses": on_gpu["losses"],
        "losses_on_cpu": on_cpu["losses"],
    }
    if failed := on_gpu.get("failed") or on_cpu.get("failed"):
        return record | {"failed": failed}
    return record | compare(on_gpu["losses"], on_cpu["losses"])


def compare(losses: list[float], on_cpu: list[float]) -> dict[str, Any]:
    """The largest difference between two runs, as a share of the loss, and its step."""
    differences = [abs(loss - other) / other for loss, other in zip(losses, on_cpu, strict=True)]
    largest = max(differences)
    return {"largest_difference": round(largest, 6), "in_step": differences.index(largest) + 1}


def is_out_of_memory(record: dict) -> bool:
    return "out of memory" in record.get("failed", "").lower()


def with_measurements(readme: str, records: list[dict]) -> str:
    """README with the newest measurement of each pair in its row. Measurements with changes or on a CPU are left out."""
    unchanged = [r for r in records if "changes" in r and not r["changes"] and not r["sizes"] and r["device"] != "CPU"]
    newest = {(r["recipe"], r["config"]): r for r in sorted(unchanged, key=lambda r: r["date"])}

    def row(match: re.Match) -> str:
        record = newest.get((match[1], match[2]))
        if not record or ("failed" in record and not is_out_of_memory(record)):
            return match[0]
        limit = f" limited to {record['limit_gb']:.0f} GB" if record["limit_gb"] else ""
        source = f"({record['device']}{limit}, {record['date']})"
        if "failed" in record:
            cells = [f" out of memory {source} "] * 2
        else:
            cells = [f" {record['peak_gpu_gb']:.1f} GB {source} ", f" {record['tokens_per_second']:,.0f} {source} "]
        before = match[0][: match.start(5) - match.start()]
        return before + "|".join(cells) + "|"

    return README_ROW.sub(row, readme)


def main(recipes: list[str], minutes: float, steps: int, results: Path | None) -> None:
    from harness.folder import read_json, write_json

    device = find_device_in_process()
    results = results or (inputs.RESULTS if device["gpus"] else Path("outputs/on_gpu"))
    results.mkdir(parents=True, exist_ok=True)
    provenance, failed = inputs.provenance(), []

    def keep(record: dict) -> dict:
        name = re.sub(r"[^\w.]+", "-", f"{record['measurement']} {record['device']}").strip("-")
        write_json(results / f"{name}.json", record | provenance)
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        print(f"{record['measurement']}: {numbers}", flush=True)
        if "failed" in record and not is_out_of_memory(record):
            failed.append(record["measurement"])
        return record

    for recipe in recipes:
        for config, changes in pairs(recipe, max(1, device["gpus"])):
            settings = settings_of(config)
            if settings["mixed_precision"] == "no":
                for record in measure_some_layers(recipe, config, device, minutes, max(2, steps // 5)):
                    keep(record)
                continue
            record = keep(measure(recipe, config, changes, device, steps))
            if settings["num_processes"] > 1:
                continue
            if settings.get("fsdp_config", {}).get("fsdp_offload_params") and "failed" not in record:
                without = keep(measure(recipe, config, {"fsdp_config": {"fsdp_offload_params": False}}, device, steps))
                if "failed" not in without:
                    ratio = without["tokens_per_second"] / record["tokens_per_second"]
                    keep(record | {"without_offload_faster": round(ratio, 2)})
            keep(rehearse(recipe, config, device))
    if device["gpus"]:
        readme = inputs.ROOT / "README.md"
        records = [read_json(path) for path in results.glob("*.json")]
        readme.write_text(with_measurements(readme.read_text("utf-8"), records), "utf-8")
    if failed:
        sys.exit(f"error: {len(failed)} measurements failed: {', '.join(failed)}. See `failed` in their files in {results}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names of recipes; all without one")
    parser.add_argument("--minutes", type=float, default=20, help="time for the layers of a model that is too large")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps per measurement")
    parser.add_argument("--results", type=Path, help="folder for the JSON files")
    arguments = parser.parse_args()
    known = sorted(path.stem for path in (inputs.ROOT / "recipes").glob("*.py"))
    if unknown := set(arguments.recipes) - set(known):
        parser.error(f"unknown recipe: {', '.join(sorted(unknown))}. There are: {', '.join(known)}")
    main(arguments.recipes or known, arguments.minutes, arguments.steps, arguments.results)
