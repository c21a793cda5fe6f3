"""Measures every recipe at its real size on the GPUs of this machine: speed, memory, and whether rehearsals told the truth.

    .venv/bin/python benchmarks/on_gpu.py                                   # all of them
    .venv/bin/python benchmarks/on_gpu.py qwen2_fineweb_edu                 # one: some minutes
    .venv/bin/python benchmarks/on_gpu.py llama31_70b_qlora --minutes 30    # more layers of the 70B

Needs no network: the weights are random, the text is Python's documentation, and a hub on loopback serves both to
./launch.sh. A process may use as much memory as the card that its config is for. Every measurement is a JSON file in
benchmarks/results, and those of a config as it stands go into README's table. A config for more GPUs than are here runs on
those that are; of the 70B, one process of two trains some of the 80 layers, and the rest is extrapolated and marked so.
Without a GPU all of it runs on the CPU, on models of two tiny layers; the files then go to outputs/on_gpu.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import material
from measuring import BRIEF, ask_gpu, measure, run, settings_of

ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (?:yes|no) \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)


def pairs(recipe: str, gpus: int) -> list[tuple[str, dict]]:
    """The recipe's configs that these GPUs are enough for; else the first one, with what makes it run on them."""
    configs = {
        row[1]: settings_of(row[1]) for row in ROW.findall((material.ROOT / "README.md").read_text("utf-8")) if row[0] == recipe
    }
    fitting = [(name, {}) for name, its in configs.items() if its["num_processes"] <= gpus and its.get("num_machines", 1) == 1]
    name, its = next(iter(configs.items()))
    return fitting or [(name, {"num_machines": 1, "num_processes": min(its["num_processes"], gpus)})]


def extrapolate(few: dict, more: dict, layers: int, processes: int) -> dict:
    """Not measured: a straight line through two measurements that differ in their layers, for all layers and processes."""
    first, second = (record["sizes"]["num_hidden_layers"] for record in (few, more))
    names = ("seconds_per_step", "peak_gpu_gb", "peak_gpu_reserved_gb", "peak_host_gb")
    numbers = {name: round(few[name] + (more[name] - few[name]) * (layers - first) / (second - first), 3) for name in names}
    tokens = more["tokens_per_second"] * more["seconds_per_step"] / more["world_size"]  # of a process in a step
    return {
        "measurement": f"{more['recipe']} × {more['config']}, extrapolated from {first} and {second} layers to all",
        **{name: more[name] for name in ("recipe", "config", "device", "limit_gb")},
        **{"extrapolated": True, "tokens_per_second": round(processes * tokens / numbers["seconds_per_step"], 1), **numbers},
    }


def layer_by_layer(recipe: str, config: str, found: dict, minutes: float, steps: int) -> list[dict]:
    """A model too large to measure whole: few layers, then as many as time and disk allow, then the extrapolation."""
    processes, layers = settings_of(config)["num_processes"], 80
    changes = {"num_processes": min(processes, max(1, found["gpus"]))}
    one_batch = ("--global_batch_size", str(8 * changes["num_processes"])) if found["gpus"] else ()
    few, began = 4 if found["gpus"] else 1, time.monotonic()
    records = [measure(recipe, config, changes, found, steps, one_batch, num_hidden_layers=few)]
    by_time = int(few * minutes * 60 / (time.monotonic() - began))
    by_disk = int(shutil.disk_usage(tempfile.gettempdir()).free / 4e9) - 4  # twice in bf16, once in 4 bits; the embeddings
    many = max(2 * few, min(layers, by_time, by_disk)) if found["gpus"] else 2
    records.append(measure(recipe, config, changes, found, steps, one_batch, num_hidden_layers=many))
    failed = any("failed" in record for record in records)
    return records if failed else [*records, extrapolate(*records, layers, processes)]


def rehearse(recipe: str, config: str, found: dict) -> dict:
    """The same rehearsal on the GPU and on the CPU, and how far their losses are apart."""
    words, on_gpu = ["--tiny", recipe, config, *BRIEF, "20"], os.environ | {"PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        one, other = (run(words, Path(folder), variables) for variables in (on_gpu, on_gpu | {"CUDA_VISIBLE_DEVICES": ""}))
    failed = one.get("failed") or other.get("failed")
    return {
        **{"measurement": f"rehearsal of {recipe} × {config}", "recipe": recipe, "config": config, "device": found["device"]},
        **{"losses": one["losses"], "losses_on_cpu": other["losses"]},
        **({"failed": failed} if failed else compare(one["losses"], other["losses"])),
    }


def compare(losses: list[float], on_cpu: list[float]) -> dict:
    """How far two runs are apart at most, as a share of the loss, and in which step."""
    apart = [abs(one - other) / other for one, other in zip(losses, on_cpu, strict=True)]
    return {"largest_difference": round(max(apart), 6), "in_step": apart.index(max(apart)) + 1}


def is_out_of_memory(record: dict) -> bool:
    return "out of memory" in record.get("failed", "").lower()


def with_cells(readme: str, records: list[dict]) -> str:
    """README with the newest measurement of each pair in its row; one of a changed config is not of the pair."""
    ours = [r for r in records if "changes" in r and not r["changes"] and not r["sizes"] and r["device"] != "CPU"]
    newest = {(r["recipe"], r["config"]): r for r in sorted(ours, key=lambda r: r["date"])}

    def row(match: re.Match) -> str:
        record = newest.get((match[1], match[2]))
        if not record or ("failed" in record and not is_out_of_memory(record)):
            return match[0]
        limit = f" held to {record['limit_gb']:.0f} GB" if record["limit_gb"] else ""
        where = f"({record['device']}{limit}, {record['date']})"
        cells = [f" out of memory {where} "] * 2
        if "failed" not in record:
            cells = [f" {record['peak_gpu_gb']:.1f} GB {where} ", f" {record['tokens_per_second']:,.0f} {where} "]
        return match[0][: match.start(5) - match.start()] + "|".join(cells) + "|"

    return ROW.sub(row, readme)


def main(recipes: list[str], minutes: float, steps: int, results: Path | None):
    from harness.folder import read_json, write_json

    found = ask_gpu()
    results = results or (material.RESULTS if found["gpus"] else Path("outputs/on_gpu"))
    results.mkdir(parents=True, exist_ok=True)
    provenance, failed = material.provenance(), []

    def keep(record: dict):
        slug = re.sub(r"[^\w.]+", "-", f"{record['measurement']} {record['device']}")
        write_json(results / f"{slug.strip('-')}.json", record | provenance)
        print(f"{record['measurement']}:", {k: v for k, v in record.items() if isinstance(v, int | float)}, flush=True)
        if "failed" in record and not is_out_of_memory(record):
            failed.append(record["measurement"])
        return record

    for recipe in recipes:
        for config, changes in pairs(recipe, max(1, found["gpus"])):
            its = settings_of(config)
            if its["mixed_precision"] == "no":
                for record in layer_by_layer(recipe, config, found, minutes, max(2, steps // 5)):
                    keep(record)
                continue
            record = keep(measure(recipe, config, changes, found, steps))
            if its["num_processes"] > 1:
                continue
            if its.get("fsdp_config", {}).get("fsdp_offload_params") and "failed" not in record:
                other = keep(measure(recipe, config, {"fsdp_config": {"fsdp_offload_params": False}}, found, steps))
                if "failed" not in other:
                    keep(record | {"without_offload_faster": round(other["tokens_per_second"] / record["tokens_per_second"], 2)})
            keep(rehearse(recipe, config, found))
    if found["gpus"]:
        readme = material.ROOT / "README.md"
        readme.write_text(with_cells(readme.read_text("utf-8"), [read_json(path) for path in results.glob("*.json")]), "utf-8")
    if failed:
        sys.exit(f"error: {len(failed)} did not finish, see `failed` in their files in {results}: {', '.join(failed)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="all unless some are named")
    parser.add_argument("--minutes", type=float, default=20, help="for the layers of a model too large to measure whole")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a measurement")
    parser.add_argument("--results", type=Path, help="where the JSON files go")
    given, known = parser.parse_args(), sorted(path.stem for path in (material.ROOT / "recipes").glob("*.py"))
    if unknown := set(given.recipes) - set(known):
        parser.error(f"no recipe is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    given.recipes = given.recipes or known
    main(**vars(given))
