"""One measurement: starts ./launch.sh with a recipe at its real size, whose model and dataset come from a Hub on this machine."""

import argparse
import ast
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import inputs
import yaml

CARDS = {"3090": 24e9, "t4": 15e9}  # bytes that PyTorch can use on such a card, besides CUDA's context
SHORT_RUN = [
    *("--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"),
    *("--max_eval_samples", "8", "--max_steps"),
]
ON_CPU = ["--use_cpu", "--max_length", "256", "--per_device_train_batch_size", "2", "--global_batch_size", "4"]
# What a record has of train_results.json.
RESULT_KEYS = (
    "tokens_per_second",
    "loss_tokens_per_second",
    "peak_gpu_gb",
    "peak_gpu_reserved_gb",
    "peak_host_gb",
    "world_size",
    "global_batch_size",
    "model_params_b",
    "trainable_params_b",
    "tokens",
    "seconds_to_first_step",
    "attention",
    "losses",
)
FULL_ROWS = 0.95  # share of the tokens of full rows that a run must have at least: packed rows are not quite full
# Variables that would change what is measured.
IGNORED_VARIABLES = ("SLURM_", "SKYPILOT_", "PYTORCH_", "HF_", "NPROC", "NNODES")


def find_device(dtype: str) -> dict[str, Any]:
    """The number of GPUs, name and memory of the first, and its TFLOP/s in a large matrix product; without GPUs the CPU's."""
    import torch

    device = {"gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0, "device": "CPU", "bytes": 0}
    if device["gpus"]:
        properties = torch.cuda.get_device_properties(0)
        device |= {"device": properties.name, "bytes": properties.total_memory}
    size, place = (8192, "cuda") if device["gpus"] else (512, "cpu")
    factor = torch.randn(size, size, device=place).to(getattr(torch, dtype))
    for repeats in (10, 50):  # the first ones warm up
        began = time.perf_counter()
        for _ in range(repeats):
            product = factor @ factor
        float(product[0, 0])  # waits for the GPU
    seconds = time.perf_counter() - began
    return device | {"matrix_tflops": round(repeats * 2 * size**3 / seconds / 1e12, 3)}


def find_device_in_process(dtype: str = "bfloat16") -> dict[str, Any]:
    """`find_device` in a process of its own, which releases the GPU's memory when it exits."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(find_device, (dtype,))


def settings_of(config: str) -> dict[str, Any]:
    """The content of an Accelerate config."""
    return yaml.safe_load((inputs.ROOT / f"accelerate_configs/{config}.yaml").read_text("utf-8"))


def values_of(recipe: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """The numbers and texts that a recipe passes to `parse`, or those of flags in `words` instead."""
    tree = ast.parse((inputs.ROOT / f"recipes/{recipe}.py").read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "parse"]
    values = {keyword.arg: keyword.value.value for keyword in calls[0].keywords if isinstance(keyword.value, ast.Constant)}
    return values | {flag[2:]: value for flag, value in itertools.pairwise(words) if flag.startswith("--")}


@contextlib.contextmanager
def served_inputs(recipe: str, is_tiny: bool, tokens: int, **sizes: int) -> Iterator[tuple[Path, dict[str, str], int]]:
    """Serves a recipe's model and dataset, which has at least `tokens` tokens, with the model in the cache.

    Yields a working directory, the environment for launch.sh, and the number of parameters in matrices.
    """
    from local_hub import serve

    values = values_of(recipe)
    model, dataset = values["model_name_or_path"], values["dataset_name"]
    with tempfile.TemporaryDirectory() as folder:
        matrix_parameters = inputs.make_model(model, Path(folder, "hub/models", model), is_tiny, **sizes)
        inputs.make_dataset(dataset, values.get("dataset_config"), Path(folder, "hub/datasets", dataset), tokens)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(IGNORED_VARIABLES)}
        with serve(Path(folder, "hub")) as hub:
            environment |= {"PYTHON": sys.executable, "HF_HOME": f"{folder}/cache", "HF_ENDPOINT": hub.url}
            download = f"import huggingface_hub; huggingface_hub.snapshot_download({model!r})"
            subprocess.run([sys.executable, "-c", download], env=environment, stderr=subprocess.DEVNULL)
            yield Path(folder), environment, matrix_parameters


def run(words: list[str], output_dir: Path, environment: dict[str, str], deadline: float = math.inf) -> dict[str, Any]:
    """Runs ./launch.sh; returns its results, losses, output, and the seconds until it printed the first loss.

    It is killed at the `deadline`, a time of `time.monotonic`.
    """
    from harness.folder import read_json

    began, seconds_to_first_step, output = time.monotonic(), None, ""
    shutil.rmtree(output_dir, ignore_errors=True)
    command = [inputs.ROOT / "launch.sh", *words, "--output_dir", output_dir]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=output_dir.parent, env=environment, start_new_session=True, **pipes) as process:
        timer = threading.Timer(max(0, min(deadline - began, threading.TIMEOUT_MAX)), os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        for line in process.stdout:
            output += line
            if seconds_to_first_step is None and re.search(r"\bloss\W+\d", line):
                seconds_to_first_step = round(time.monotonic() - began, 1)
        timer.cancel()
    results = read_json(output_dir / "train_results.json") if process.returncode == 0 else {"failed": output[-2000:]}
    if process.returncode == -signal.SIGKILL:
        results["failed"] = f"not finished after {time.monotonic() - began:.0f} s: pass more --minutes. {output[-500:]}"
    history = read_json(output_dir / "trainer_state.json").get("log_history", [])
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return results | {"losses": losses, "seconds_to_first_step": seconds_to_first_step, "output": output}


def forecast(recipe: str, path: Path, flags: Sequence[str], environment: dict[str, str], device: str) -> dict[str, Any] | None:
    """What `--plan` says about a run with the config at `path`, None if it cannot."""
    words = [inputs.ROOT / f"recipes/{recipe}.py", path, "--json", *flags]
    command = [sys.executable, "-m", "planner.command", *words]
    variables = environment | {"PYTHONPATH": str(inputs.ROOT / "recipes")}
    process = subprocess.run(command, cwd=path.parent, env=variables, capture_output=True, text=True)
    return forecast_of(json.loads(process.stdout), device) if process.returncode == 0 else None


def forecast_of(plan: dict[str, Any], device: str) -> dict[str, Any]:
    """What a plan (`--plan … --json`) says about a run on `device`, PyTorch's name of a GPU."""
    card = next((name for name in plan["tokens_per_second"] if words_of(name) <= words_of(device)), None)
    memory = ("peak_gpu_gb", "peak_host_gb", "tokens_per_step")
    return {name: plan.get(name) for name in memory} | {
        "card": card,
        "tokens_per_second": plan["tokens_per_second"].get(card),
        "step_seconds": plan.get("step_seconds", {}).get(card),
    }


def words_of(name: str) -> set[str]:
    """The parts of a card's name: those of "A100 80 GB" are among those of "NVIDIA A100-SXM4-80GB"."""
    return set(re.findall(r"[A-Z0-9]+", re.sub(r"(\d) GB", r"\1GB", name).upper()))


def measure(
    recipe: str,
    config: str,
    changes: dict[str, Any],
    device: dict[str, Any],
    steps: int,
    flags: tuple[str, ...] = (),
    deadline: float = math.inf,
    **sizes: int,
) -> dict[str, Any]:
    """Measures a recipe with a config; returns the record. It has `failed` if the run did not train on all its tokens.

    Args:
        changes: keys of the config with other values.
        device: what `find_device` returned.
        flags: further flags of the recipe.
        sizes: keys of the model's config with other values.
    """
    from harness import configs
    from harness.start.machine import allocator_settings

    settings = settings_of(config)
    fsdp_config = settings.get("fsdp_config", {})
    is_offloaded, is_on_gpu = bool(fsdp_config.get("fsdp_offload_params")), device["gpus"] > 0
    all_processes = settings["num_processes"]
    processes = changes.get("num_processes", all_processes)
    limit = None
    card = next((card for card in CARDS if card in config), None)
    # With fewer processes each has a larger part of the model, unless it is in host memory.
    if card and is_on_gpu and (processes == all_processes or is_offloaded):
        limit = CARDS[card]
    words = [recipe, config, *SHORT_RUN, str(steps), *flags]
    if not is_on_gpu:
        words += ON_CPU
    precision = settings["mixed_precision"]
    values = values_of(recipe, words)
    expected = steps * int(values["global_batch_size"]) * int(values["max_length"])
    with served_inputs(recipe, not is_on_gpu, expected, **sizes) as (folder, environment, matrix_parameters):
        path = folder / f"{config}.yaml"
        changed = settings | changes | {"fsdp_config": fsdp_config | changes.get("fsdp_config", {})}
        path.write_text(yaml.safe_dump(changed), "utf-8")
        if precision == "no" and is_on_gpu:  # quantizing does not count in the seconds to the first step
            subprocess.run([inputs.ROOT / "launch.sh", "--prepare", recipe], cwd=folder, env=environment)
        if limit:
            share = f"per_process_memory_fraction:{min(1.0, limit / device['bytes']):.4f}"
            given = {"use_peft": False, "activation_checkpointing_kwargs": None} | values
            usual = allocator_settings(configs.read(str(path)), argparse.Namespace(**given))
            environment["PYTORCH_ALLOC_CONF"] = f"{usual},{share}"
        results = run([recipe, str(path) if changes else config, *words[2:]], folder / "output", environment, deadline)
        if "failed" not in results:
            results["forecast"] = forecast(recipe, path, words[2:], environment, device["device"])
    rate = find_device_in_process("float16" if precision == "fp16" else "bfloat16")["matrix_tflops"]
    record = {
        "measurement": ", ".join([f"{recipe} × {config}", *describe_changes(processes, all_processes, changes, sizes)]),
        "recipe": recipe,
        "config": config,
        "changes": changes,
        "sizes": sizes,
        "command": shlex.join(["./launch.sh", *words]),
        "device": device["device"],
        "limit_gb": limit / 1e9 if limit else None,
        "matrix_tflops": rate,
    }
    if "failed" not in results and not FULL_ROWS * expected <= results["tokens"] <= expected:
        results["failed"] = f"{results['tokens']:,} tokens in {steps} steps, expected {expected:,}: steps lack micro-batches"
    record |= {name: results[name] for name in (*RESULT_KEYS, "failed") if name in results}
    if "failed" not in results:
        flops = (4 if results["use_peft"] else 6) * matrix_parameters  # per token, without attention and recomputation
        tokens_per_second = results["tokens_per_second"]
        record["share_of_matrix_rate"] = round(flops * tokens_per_second / results["world_size"] / rate / 1e12, 4)
        record["seconds_per_step"] = round(results["tokens"] / tokens_per_second / steps, 3)
        record["forecast"] = results["forecast"]
        if match := re.search(r"Sharding kept the 4-bit weights.*", results["output"]):
            record["bytes_of_4bit_weights"] = match[0]
    return record


def describe_changes(processes: int, all_processes: int, changes: dict[str, Any], sizes: dict[str, int]) -> list[str]:
    """In words, how a measurement differs from its recipe and config."""
    words = [f"{processes} of {all_processes} processes"] if processes < all_processes else []
    return words + [f"{name} {value}" for name, value in (changes.get("fsdp_config", {}) | sizes).items()]
