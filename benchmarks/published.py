"""Compares `--plan` with what others measured: memory and speed of ten settings.

    .venv/bin/python benchmarks/published.py           # asks the Hub, or HF_ENDPOINT, for config.json of five models

Each setting is simulated with the nearest that this project has: FSDP2 instead of FSDP1, SDPA unless rows are packed, no
compilation. Memory is what the source reports: allocated, or reserved by PyTorch's allocator. Prints the table of
docs/measurements.md. Needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLAIN, TRL = "benchmarks/published_recipe.py", "llama31_8b_lora"
LORA = ("--use_peft", "--lora_target_modules")
R16 = (*LORA, "q_proj", "k_proj", "v_proj", "o_proj", "--lora_r", "16")
R64 = (*LORA, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "--lora_r", "64")
NF4 = ("--load_in_4bit", "--bnb_4bit_quant_type", "nf4")
LLAMA3, LLAMA2, LLAMA2_70 = "meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf"
QWEN3, LLAMA31_70 = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-70B"

RESERVED = {"P": "expandable_segments:True", "A": "expandable_segments:False", "T": "expandable_segments:True"}  # assumed


class Setting(NamedTuple):
    """A published measurement, and the run that is nearest to it."""

    source: str  # see docs/measurements.md
    title: str
    card: str
    recipe: str
    config: str
    processes: int
    model: str | None  # None: the recipe's
    micro_batch: int
    length: int
    flags: tuple[str, ...]
    gib: float  # measured, per GPU
    tokens_per_second: float  # measured, of all GPUs


SETTINGS = (
    Setting("P", "Qwen3-0.6B full", "H100 80 GB", PLAIN, "1x3090", 1, QWEN3, 1, 8192, ("--dtype", "float32"), 31.7, 26005),
    Setting("P", "Qwen3-0.6B full", "H100 80 GB", PLAIN, "1x3090", 1, QWEN3, 1, 16384, ("--dtype", "float32"), 52.8, 25486),
    Setting("F", "Llama-3-8B LoRA", "A100 80 GB", PLAIN, "4gpu_full_shard", 4, LLAMA3, 4, 4096, R16, 25.7, 4 * 3593),
    Setting("F", "Llama-3-8B QLoRA", "A100 80 GB", PLAIN, "4gpu_full_shard", 4, LLAMA3, 4, 4096, R16 + NF4, 23.4, 4 * 3867),
    Setting("F", "Llama-3-8B full", "A100 80 GB", PLAIN, "4gpu_full_shard", 4, LLAMA3, 4, 4096, (), 44.3, 4 * 3202),
    Setting("A", "Llama-2-70B QLoRA, offload", "RTX 3090", PLAIN, "2x3090_qlora", 2, LLAMA2_70, 2, 2048, R64 + NF4, 14.9, 178),
    Setting("A", "Llama-2-7B QLoRA", "RTX 3090", PLAIN, "4gpu_full_shard", 2, LLAMA2, 4, 2048, R64 + NF4, 11.2, 2101),
    Setting("A", "Llama-2-7B LoRA", "RTX 3090", PLAIN, "4gpu_full_shard", 2, LLAMA2, 4, 2048, R64, 16.1, 1535),
    Setting("T", "Llama-3.1-8B LoRA r8", "RTX 4090", TRL, "1x3090", 1, None, 2, 2048, ("--lora_r", "8"), 16.2, 3083),
    Setting("T", "Llama-3.1-70B LoRA r16", "A100 80 GB", TRL, "4gpu_full_shard", 8, LLAMA31_70, 2, 2048, (), 27.6, 3497),
)


def plan(setting: Setting) -> dict[str, Any]:
    """The plan of a setting, from ./launch.sh --plan."""
    recipe = ROOT / setting.recipe if "/" in setting.recipe else setting.recipe
    command = [ROOT / "launch.sh", "--plan", recipe, setting.config, "--json", *setting.flags]
    command += ["--per_device_train_batch_size", str(setting.micro_batch), "--gradient_accumulation_steps", "1"]
    command += ["--max_length", str(setting.length)]
    if setting.model:
        command += ["--model_name_or_path", setting.model]
    environment = os.environ | {"NPROC_PER_NODE": str(setting.processes), "PYTHON": sys.executable}
    environment["PYTORCH_ALLOC_CONF"] = RESERVED.get(setting.source, "expandable_segments:True")
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout)


def percent(share: float) -> str:
    return f"{abs(share):.0%}".replace("%", " %")


def row(setting: Setting, planned: dict[str, Any]) -> list[str]:
    gib = planned["reserved_gb" if setting.source in RESERVED else "peak_gpu_gb"] * 1e9 / 2**30
    difference = gib / setting.gib - 1
    low, high = planned["tokens_per_second"][setting.card]
    speed = setting.tokens_per_second
    if speed < low:
        position = f"{percent(1 - speed / low)} below"
    elif speed > high:
        position = f"{percent(speed / high - 1)} above"
    else:
        position = "within"
    return [
        setting.source,
        setting.title,
        f"{setting.processes} × {setting.card}",
        f"{setting.micro_batch} × {setting.length:,}",
        str(setting.gib),
        f"{gib:.1f}",
        ("−" if difference < 0 else "+") + percent(difference),
        f"{speed:,}",
        f"{low:,}–{high:,}",
        position,
    ]


def main() -> None:
    print("| by | what | GPUs | micro-batch | GiB measured | planned | | tokens/s measured | planned | |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for setting in SETTINGS:
        print(f"| {' | '.join(row(setting, plan(setting)))} |", flush=True)


if __name__ == "__main__":
    main()
