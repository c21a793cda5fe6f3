"""A measurement: a recipe at its real size, started by ./launch.sh, that finds its model and data on a hub on loopback."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import material
import yaml

CARDS = {"3090": 24e9, "t4": 15e9}  # bytes that PyTorch can have of such a card, beside CUDA's context
BRIEF = ["--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--max_eval_samples", "8", "--max_steps"]
SMALL = ["--use_cpu", "--max_length", "256", "--per_device_train_batch_size", "2", "--global_batch_size", "4"]
NUMBERS = [
    *("tokens_per_second", "loss_tokens_per_second", "peak_gpu_gb", "peak_gpu_reserved_gb", "peak_host_gb", "gpu_utilization"),
    *("world_size", "global_batch_size", "model_params_b", "trainable_params_b", "tokens", "seconds_to_first_step"),
    *("attention", "losses"),
]


def gpu(dtype: str) -> dict:
    """How many GPUs, name and bytes of the first, and its TFLOP/s in a large product of matrices; of the CPU without one."""
    import torch

    found = {"gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0, "device": "CPU", "bytes": 0}
    if found["gpus"]:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "bytes": properties.total_memory}
    size, device = (8192, "cuda") if found["gpus"] else (512, "cpu")
    factor = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    for repeats in (10, 50):  # the first to warm up
        began = time.perf_counter()
        for _ in range(repeats):
            product = factor @ factor
        float(product[0, 0])  # waits for the GPU
    return found | {"matrix_tflops": round(repeats * 2 * size**3 / (time.perf_counter() - began) / 1e12, 3)}


def ask_gpu(dtype: str = "bfloat16") -> dict:
    """`gpu`, in a process of its own, which gives the GPU's memory back."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(gpu, (dtype,))


def settings_of(config: str) -> dict:
    return yaml.safe_load((material.ROOT / f"accelerate_configs/{config}.yaml").read_text("utf-8"))


@contextlib.contextmanager
def served(recipe: str, is_tiny: bool, **sizes):
    """A folder to work in, the environment in which the recipe finds its model and data, how many matrix parameters it has."""
    from stand_in_hub import serve

    source = (material.ROOT / f"recipes/{recipe}.py").read_text("utf-8")
    names = dict(re.findall(r'^ +(model_name_or_path|dataset_name|dataset_config)="(.*?)"', source, re.MULTILINE))
    model, data = names["model_name_or_path"], names["dataset_name"]
    with tempfile.TemporaryDirectory() as folder:
        matrices = material.make_model(model, Path(folder, "hub/models", model), is_tiny, **sizes)
        material.make_data(data, names.get("dataset_config"), Path(folder, "hub/datasets", data))
        others = ("SLURM_", "SKYPILOT_", "PYTORCH_", "HF_", "NPROC", "NNODES")  # would change what is measured
        environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        with serve(Path(folder, "hub")) as hub:
            environment |= {"PYTHON": sys.executable, "HF_HOME": f"{folder}/cache", "HF_ENDPOINT": hub.url}
            download = f"import huggingface_hub; huggingface_hub.snapshot_download({model!r})"
            subprocess.run([sys.executable, "-c", download], env=environment, stderr=subprocess.DEVNULL)
            yield Path(folder), environment, matrices


def run(words: list[str], folder: Path, environment: dict) -> dict:
    """Runs ./launch.sh; what its run wrote, its losses, the seconds until the first was seen, and all it said."""
    from harness.folder import read_json

    output, began, first, said = folder / "output", time.monotonic(), None, ""
    shutil.rmtree(output, ignore_errors=True)
    command = [material.ROOT / "launch.sh", *words, "--output_dir", output]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        said += line
        if first is None and re.search(r"\bloss\W+\d", line):
            first = round(time.monotonic() - began, 1)
    results = read_json(output / "train_results.json") if process.wait() == 0 else {"failed": said[-2000:]}
    history = read_json(output / "trainer_state.json").get("log_history", [])
    return results | {"losses": [e["loss"] for e in history if "loss" in e], "seconds_to_first_step": first, "said": said}


def measure(recipe: str, config: str, changes: dict, found: dict, steps: int, words: tuple = (), **sizes) -> dict:
    """One measurement: a recipe with a config, changed by `changes`, and flags `words`; its model changed by `sizes`."""
    its = settings_of(config)
    fsdp = its.get("fsdp_config", {})
    card = next((card for card in CARDS if card in config), None)
    # On fewer processes each has a larger part of the model, unless that is in host RAM.
    fewer, whole = changes.get("num_processes", its["num_processes"]), its["num_processes"]
    said = [f"{fewer} of {whole} processes"] * (fewer < whole)
    said += [f"{name} {value}" for part in (changes.get("fsdp_config", {}), sizes) for name, value in part.items()]
    limit = CARDS[card] if card and (fewer == whole or fsdp.get("fsdp_offload_params")) and found["gpus"] else None
    words = [*BRIEF, str(steps), *words, *([] if found["gpus"] else SMALL)]
    with served(recipe, not found["gpus"], **sizes) as (folder, environment, matrices):
        path = folder / f"{config}.yaml"
        path.write_text(yaml.safe_dump(its | changes | {"fsdp_config": fsdp | changes.get("fsdp_config", {})}), "utf-8")
        if its["mixed_precision"] == "no" and found["gpus"]:  # so that it is not in the seconds to the first step
            subprocess.run([material.ROOT / "launch.sh", "--prepare", recipe], cwd=folder, env=environment)
        if limit:
            share = f"per_process_memory_fraction:{min(1.0, limit / found['bytes']):.4f}"
            environment["PYTORCH_ALLOC_CONF"] = f"expandable_segments:True,{share}"
        results = run([recipe, str(path) if changes else config, *words], folder, environment)
    rate = ask_gpu("float16" if its["mixed_precision"] == "fp16" else "bfloat16")["matrix_tflops"]
    record = {
        **{"measurement": ", ".join([f"{recipe} × {config}", *said]), "recipe": recipe, "config": config},
        **{"changes": changes, "sizes": sizes},
        **{"command": shlex.join(["./launch.sh", recipe, config, *words]), "device": found["device"]},
        **{"limit_gb": limit and limit / 1e9, "matrix_tflops": rate},
        **{name: results[name] for name in [*NUMBERS, "failed"] if name in results},
    }
    if "failed" not in results:
        flops = (4 if results["use_peft"] else 6) * matrices  # without attention and what is computed twice
        record["share_of_matrix_rate"] = round(flops * results["tokens_per_second"] / results["world_size"] / rate / 1e12, 4)
        record["seconds_per_step"] = round(results["tokens"] / results["tokens_per_second"] / steps, 3)
        if proof := re.findall(r"The 4-bit weights are used.*", results["said"]):
            record["bytes_of_4bit_weights"] = proof[0]
    return record
