"""Measures recipes at their real size on the GPUs of this machine: speed, memory, and whether rehearsals give the same losses.

    .venv/bin/python benchmarks/on_gpu.py                                   # all with packed rows
    .venv/bin/python benchmarks/on_gpu.py qwen2_fineweb_edu --minutes 9     # one, in at most nine minutes
    .venv/bin/python benchmarks/on_gpu.py qwen2_fineweb_edu --config 1x3090_offload --steps 10
    .venv/bin/python benchmarks/on_gpu.py --only_table                      # the table of the recipes from the files in --results

It needs no network and no git: the weights are random, the text is Python's documentation, and a Hub on this machine serves both
to ./launch.sh. A process may use as much memory as the card that its config is for. Every measurement becomes a JSON file in
benchmarks/results as soon as it is made. Those of an unchanged config replace the forecasts in docs/which-recipe.md. A run that
does not train on all tokens is a failure. A config for more GPUs than there are runs on those there are. Of the 70B, one of two
processes trains some of the 80 layers; the rest is extrapolated, and its file says so. Also of the 70B: every gradient of some
layers in host memory is compared with the gradients of the same layers on the GPU. Without a GPU everything runs on the CPU, with
models of two tiny layers, and the files go to outputs/on_gpu.
"""

import argparse
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inputs
import yaml
from measuring import ON_CPU, SHORT_RUN, find_device_in_process, measure, run, served_inputs, settings_of, values_of

TABLE_ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (?:yes|no) \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)
TABLE = inputs.ROOT / "docs/which-recipe.md"
LAYERS_OF_70B = 80
BYTES_OF_LAYER = 4e9  # on disk: twice in bf16, once in 4 bits
FASTER = ("--torch_compile true", "--use_liger_kernel true", "--per_device_train_batch_size 8")  # measured one by one
SAME_GRADIENT = 0.02  # difference of two gradients, as a share of their norm: kernels add in another order each time


def pairs(recipe: str, gpus: int, only: str = "") -> list[tuple[str, dict[str, Any]]]:
    """The configs of a recipe in the table of all recipes that these GPUs can run, unchanged, or `only` this one.

    If there is none, the first of its configs, with the changes that make it run on these GPUs.
    """
    rows = TABLE_ROW.findall(TABLE.read_text("utf-8"))
    configs = {config: settings_of(config) for name, config, *_ in rows if name == recipe and config in (only or config,)}
    fitting = [
        (config, {})
        for config, settings in configs.items()
        if settings["num_processes"] <= gpus and settings.get("num_machines", 1) == 1
    ]
    if fitting:
        return fitting
    if not configs:
        return []
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


def measure_some_layers(recipe: str, config: str, device: dict, steps: int, deadline: float) -> Iterator[dict]:
    """Measures a model that is too large: with few layers, then with as many as time and disk allow; then extrapolates."""
    processes = settings_of(config)["num_processes"]
    changes = {"num_processes": min(processes, max(1, device["gpus"]))}
    few, many, flags = 1, 2, ()
    if device["gpus"]:
        few, flags = 4, ("--global_batch_size", str(8 * changes["num_processes"]))
    began = time.monotonic()
    first = measure(recipe, config, changes, device, steps, flags, deadline, num_hidden_layers=few)
    yield first
    if device["gpus"]:
        seconds = time.monotonic() - began
        by_time = int(few * min(LAYERS_OF_70B, (deadline - time.monotonic()) / seconds) * 0.8)  # it must not take all the time
        by_disk = int(shutil.disk_usage(tempfile.gettempdir()).free / BYTES_OF_LAYER) - 4  # the embeddings need room for 4
        many = max(2 * few, min(LAYERS_OF_70B, by_time, by_disk))
    second = measure(recipe, config, changes, device, steps, flags, deadline, num_hidden_layers=many)
    yield second
    if "failed" not in first and "failed" not in second:
        yield extrapolate(first, second, LAYERS_OF_70B, processes)


def compare_offloaded_gradients(recipe: str, config: str, device: dict, deadline: float) -> dict[str, Any]:
    """Trains some layers with their weights in host memory, and again with them on the GPU; compares all gradients.

    A run whose gradients are wrong can have a healthy loss for long.
    """
    settings = settings_of(config)
    flags = ["--lora_dropout", "0", "--max_grad_norm", "0", "--warmup_steps", "0", "--learning_rate", "1e-3", "--load_in_4bit"]
    on_device = ["--global_batch_size", "8"] if device["gpus"] else ON_CPU
    words = [str(inputs.ROOT / "benchmarks/gradients.py"), f"{config}.yaml", *SHORT_RUN, "3", *flags, *on_device]
    folders, results = {}, {}
    with served_inputs(recipe, not device["gpus"], 10**6, num_hidden_layers=2) as (folder, environment, _):
        for name, is_offloaded in (("offloaded", True), ("on the GPU", False)):
            fsdp_config = settings["fsdp_config"] | {"fsdp_offload_params": is_offloaded}
            changed = settings | {"num_processes": 1, "fsdp_config": fsdp_config}
            (folder / f"{config}.yaml").write_text(yaml.safe_dump(changed), "utf-8")
            folders[name] = folder / name
            results[name] = run(words, folders[name], environment, deadline)
        record = {
            "measurement": f"gradients of {recipe} × {config}, offloaded and not",
            "recipe": recipe,
            "config": config,
            "device": device["device"],
            "command": " ".join(["./launch.sh", *words]),
            "losses": results["offloaded"]["losses"],
            "losses_on_gpu": results["on the GPU"]["losses"],
        }
        if failed := results["offloaded"].get("failed") or results["on the GPU"].get("failed"):
            return record | {"failed": failed}
        return record | compare_gradients(*(folder / "gradients" for folder in folders.values()))


def compare_gradients(folder: Path, other: Path) -> dict[str, Any]:
    """How many gradients in two folders are the same; `failed` if one is not."""
    from safetensors.torch import load_file

    differences = {}
    for file in sorted({path.name for path in (*folder.iterdir(), *other.iterdir())}):
        first, second = (load_file(place / file) if (place / file).is_file() else {} for place in (folder, other))
        for name in first.keys() | second.keys():
            key, share = f"{file} {name}", 1.0  # of a gradient that only one of the runs has
            if name in first and name in second:
                norm = max(first[name].norm().item(), second[name].norm().item())
                share = (first[name] - second[name]).norm().item() / norm if norm else 0.0
            differences[key] = share
    worst = max(differences, key=differences.get, default="")
    wrong = [name for name, difference in differences.items() if not difference <= SAME_GRADIENT]
    found = {"gradients": len(differences), "wrong_gradients": len(wrong), "largest_in": worst}
    found["largest_difference"] = differences.get(worst)
    if wrong or not differences:
        found["failed"] = f"{len(wrong)} of {len(differences)} gradients differ, most {worst}"
    return found


def rehearse(recipe: str, config: str, device: dict, deadline: float) -> dict[str, Any]:
    """Runs the same rehearsal on the GPU and on the CPU, and compares their losses."""
    words, environment = ["--tiny", recipe, config, *SHORT_RUN, "20"], os.environ | {"PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        on_gpu = run(words, Path(folder, "on_gpu"), environment, deadline)
        on_cpu = run(words, Path(folder, "on_cpu"), environment | {"CUDA_VISIBLE_DEVICES": ""}, deadline)
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


def with_measurements(table: str, records: list[dict]) -> str:
    """The table of all recipes with the newest measurement of each pair. Those with changes or on a CPU are left out."""
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

    return TABLE_ROW.sub(row, table)


def measurements(
    recipe: str, config: str, changes: dict[str, Any], device: dict, steps: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Everything that is measured of a recipe with a config, one record after the other."""
    settings = settings_of(config)
    if settings["mixed_precision"] == "no":
        yield from measure_some_layers(recipe, config, device, max(2, steps // 5), deadline)
        yield compare_offloaded_gradients(recipe, config, device, deadline)
        return
    record = measure(recipe, config, changes, device, steps, (), deadline)
    yield record
    if device["gpus"] and "failed" not in record:
        for flags in FASTER:
            if "liger" not in flags or importlib.util.find_spec("liger_kernel"):
                faster = measure(recipe, config, changes, device, steps, tuple(flags.split()), deadline)
                # As a change, so that it does not become the row of the table.
                yield faster | {"measurement": f"{faster['measurement']} {flags}", "changes": changes | {"flags": flags}}
    if settings["num_processes"] > 1:
        return
    if settings.get("fsdp_config", {}).get("fsdp_offload_params") and "failed" not in record:
        without = measure(recipe, config, {"fsdp_config": {"fsdp_offload_params": False}}, device, steps, (), deadline)
        yield without
        if "failed" not in without:
            ratio = without["tokens_per_second"] / record["tokens_per_second"]
            yield record | {"without_offload_faster": round(ratio, 2)}
    yield rehearse(recipe, config, device, deadline)


def write_table(results: Path) -> None:
    """Writes the measurements in a folder into the table of all recipes."""
    from harness.folder import read_json

    records = [read_json(path) for path in results.glob("*.json")]
    TABLE.write_text(with_measurements(TABLE.read_text("utf-8"), records), "utf-8")


def main(recipes: list[str], config: str, minutes: float, steps: int, results: Path | None) -> None:
    from harness.folder import write_json

    deadline = time.monotonic() + minutes * 60
    device = find_device_in_process()
    results = results or (inputs.RESULTS if device["gpus"] else Path("outputs/on_gpu"))
    results.mkdir(parents=True, exist_ok=True)
    provenance, failed, left = inputs.provenance(), [], []
    for recipe in recipes:
        for name, changes in pairs(recipe, max(1, device["gpus"]), config):
            if time.monotonic() > deadline:
                left.append(f"{recipe} --config {name}")
                continue
            for record in measurements(recipe, name, changes, device, steps, deadline):
                file = re.sub(r"[^\w.]+", "-", f"{record['measurement']} {record['device']}").strip("-")
                write_json(results / f"{file}.json", record | provenance)
                if device["gpus"]:
                    write_table(results)
                numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
                print(f"{record['measurement']}: {numbers}", flush=True)
                if "failed" in record and not is_out_of_memory(record):
                    failed.append(record["measurement"])
    if left:
        print(f"Not measured, {minutes:g} minutes are over: {', '.join(left)}")
    if failed:
        sys.exit(f"error: {len(failed)} measurements failed: {', '.join(failed)}. See `failed` in their files in {results}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names of recipes; without one all with packed rows")
    parser.add_argument("--config", default="", help="only this config")
    parser.add_argument(
        "--minutes", type=float, default=120, help="when they are over, a run is stopped, and no other is started"
    )
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps per measurement")
    parser.add_argument("--results", type=Path, help="folder for the JSON files")
    parser.add_argument("--only_table", action="store_true", help="measure nothing, write the table of all recipes")
    arguments = parser.parse_args()
    known = sorted(path.stem for path in (inputs.ROOT / "recipes").glob("*.py"))
    if unknown := set(arguments.recipes) - set(known):
        parser.error(f"unknown recipe: {', '.join(sorted(unknown))}. There are: {', '.join(known)}")
    if arguments.only_table:
        write_table(arguments.results or inputs.RESULTS)
    else:
        # The steps of the others have different numbers of tokens.
        packed = [recipe for recipe in known if recipe == "gpt2_xl_wikitext" or values_of(recipe).get("packing")]
        main(arguments.recipes or packed, arguments.config, arguments.minutes, arguments.steps, arguments.results)
