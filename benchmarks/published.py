"""Compares `--plan` with what others measured: memory and speed, with their settings.

    .venv/bin/python benchmarks/published.py           # asks the Hub, or HF_ENDPOINT, for config.json of eight models
    .venv/bin/python benchmarks/published.py 0 3       # the first and the fourth only

What their libraries did differently is a setting of benchmarks/published_recipe.py: copies of the logits, kernels. FSDP2 replaces
FSDP1, and compiled layers are simulated as if they were not. Memory is what the source reports: allocated, or reserved by
PyTorch's allocator. Prints the table of benchmarks/README.md. Needs no GPU.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
LORA = ("--use_peft", "--lora_target_modules")
QKVO, QV = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "v_proj")
NF4 = ("--load_in_4bit", "--bnb_4bit_quant_type", "nf4", "--use_bnb_nested_quant")
LLAMA2, LLAMA2_70, LLAMA3 = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf", "meta-llama/Meta-Llama-3-8B"
LLAMA31, LLAMA31_70, LLAMA32 = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.2-3B"
QWEN3, MISTRAL = "Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1"

# FSDP on so many GPUs; weights of 16 bits, without float32 copies, unless mixed_precision says otherwise.
SHARDED = {"base": "4gpu_full_shard", "mixed_precision": "no"}
OFFLOADED = {**SHARDED, "fsdp_offload_params": True}
UPCAST = {"base": "4gpu_full_shard", "mixed_precision": "bf16"}
PURE, AUTOCAST = {"base": "1x3090", "mixed_precision": "no"}, {"base": "1x3090"}
COPIES = {"base": "4gpu_ddp", "mixed_precision": "no"}

# By source, the flags of all its runs; and how the allocator was set, if reserved memory was measured (assumed).
FSDP1, HALF = ("--keeps_embedding", "true"), ("--has_half_adapter", "true")
A_R64 = (*LORA, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "--lora_r", "64", *HALF)
A_LORA = (*FSDP1, "--optim", "adamw_torch", *A_R64, "--lora_dropout", "0.1")
A_QLORA = (*A_LORA, *NF4)
F_FLAGS = (*FSDP1, "--has_norm_kernel", "true", "--logits", "in_place")
F_LIGER = (*F_FLAGS, "--logits", "fused")
F_R16 = (*LORA, *QKVO, "--lora_r", "16", "--lora_dropout", "0.1")
P_FLAGS = ("--dtype", "float32", "--logits", "whole", "--gradient_accumulation_steps", "2", "--optim", "adamw_torch")
T_FLAGS = ("--logits", "chunks", "--has_norm_kernel", "true")
T_OFFLOAD = (*T_FLAGS, "--activation_checkpointing_kwargs", '{"offload": true}')
T_R8 = (*LORA, *QV, "--lora_r", "8", "--lora_dropout", "0", *HALF)
T_R16 = (*LORA, "q_proj", "k_proj", "v_proj", "--lora_r", "16", "--lora_dropout", "0", *HALF)
T_R64 = (*LORA, *QV, "o_proj", "gate_proj", "up_proj", "down_proj", "--lora_r", "64", "--lora_dropout", "0", *HALF)


class Setting(NamedTuple):
    """A published measurement, and the run that is nearest to it."""

    source: str  # see benchmarks/README.md
    title: str
    card: str
    config: dict[str, Any]  # a config of this project, and what is different
    processes: int
    model: str
    micro_batch: int
    length: int
    flags: tuple[str, ...]
    gib: float  # measured, per GPU
    tokens_per_second: float  # measured, of all GPUs


SETTINGS = (
    Setting("P", "Qwen3-0.6B full", "H100 80 GB", UPCAST, 1, QWEN3, 1, 8192, P_FLAGS, 31.7, 26005),
    Setting("P", "Qwen3-0.6B full", "H100 80 GB", UPCAST, 1, QWEN3, 1, 16384, P_FLAGS, 52.8, 25486),
    Setting("F", "Llama-3-8B LoRA", "A100 80 GB", UPCAST, 4, LLAMA3, 4, 4096, (*F_FLAGS, *F_R16), 25.7, 4 * 3593),
    Setting("F", "Llama-3-8B QLoRA", "A100 80 GB", SHARDED, 4, LLAMA3, 4, 4096, (*F_FLAGS, *F_R16, *NF4), 23.4, 4 * 3867),
    Setting("F", "Llama-3-8B full", "A100 80 GB", UPCAST, 4, LLAMA3, 4, 4096, F_FLAGS, 44.3, 4 * 3202),
    Setting("F", "Llama-3-8B LoRA", "A100 80 GB", AUTOCAST, 1, LLAMA3, 4, 4096, (*F_FLAGS, *F_R16), 35.1, 3829),
    Setting("F", "Llama-3-8B QLoRA", "A100 80 GB", AUTOCAST, 1, LLAMA3, 8, 4096, (*F_FLAGS, *F_R16, *NF4), 45.3, 4078),
    Setting("F", "Llama-3-8B LoRA, Liger", "A100 80 GB", UPCAST, 4, LLAMA3, 8, 4096, (*F_LIGER, *F_R16), 29.8, 4 * 3721),
    Setting("F", "Llama-3-8B full, Liger", "A100 80 GB", UPCAST, 4, LLAMA3, 8, 4096, F_LIGER, 41.0, 4 * 3342),
    Setting("F", "Mistral-7B LoRA", "A100 80 GB", AUTOCAST, 1, MISTRAL, 8, 4096, (*F_FLAGS, *F_R16), 30.2, 3937),
    Setting("A", "Llama-2-70B QLoRA, offload", "RTX 3090", OFFLOADED, 2, LLAMA2_70, 2, 2048, A_QLORA, 14.9, 178),
    Setting("A", "Llama-2-7B QLoRA", "RTX 3090", SHARDED, 2, LLAMA2, 4, 2048, A_QLORA, 11.2, 2101),
    Setting("A", "Llama-2-7B QLoRA", "RTX 3090", SHARDED, 2, LLAMA2, 10, 2048, A_QLORA, 21.0, 2240),
    Setting("A", "Llama-2-7B LoRA", "RTX 3090", SHARDED, 2, LLAMA2, 4, 2048, A_LORA, 16.1, 1535),
    Setting("A", "Llama-2-7B LoRA", "RTX 3090", SHARDED, 2, LLAMA2, 6, 2048, A_LORA, 21.4, 1749),
    Setting("A", "Llama-2-7B QLoRA, no sharding", "RTX 3090", COPIES, 2, LLAMA2, 8, 2048, A_QLORA, 20.9, 2396),
    Setting("A", "Llama-2-7B LoRA, no sharding", "RTX 3090", COPIES, 2, LLAMA2, 4, 2048, A_LORA, 22.0, 2380),
    Setting("A", "Llama-2-7B LoRA, offload", "RTX 4090", OFFLOADED, 2, LLAMA2, 10, 2048, A_LORA, 22.7, 4350),
    Setting("A", "Mistral-7B QLoRA, offload", "RTX 4090", OFFLOADED, 2, MISTRAL, 12, 2048, A_QLORA, 22.5, 4341),
    Setting("T", "Llama-3.1-8B LoRA r8", "RTX 4090", PURE, 1, LLAMA31, 2, 2048, (*T_OFFLOAD, *T_R8), 16.2, 3083),
    Setting("T", "Llama-3.1-70B LoRA r16", "A100 80 GB", SHARDED, 8, LLAMA31_70, 2, 2048, (*T_FLAGS, *T_R16), 27.6, 3497),
    Setting("T", "Llama-3.2-3B full", "A100 80 GB", PURE, 1, LLAMA32, 2, 4096, T_FLAGS, 24.9, 7210),
    Setting("T", "Llama-3.2-3B LoRA", "A100 80 GB", PURE, 1, LLAMA32, 2, 4096, (*T_OFFLOAD, *T_R64), 8.5, 8210),
    Setting("T", "Llama-3.2-3B QLoRA", "A100 80 GB", PURE, 1, LLAMA32, 2, 4096, (*T_OFFLOAD, *T_R64, *NF4), 4.6, 8035),
)


def plan(setting: Setting) -> dict[str, Any]:
    """The plan of a setting, from ./launch.sh --plan."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(setting.config, Path(folder))
        command = [ROOT / "launch.sh", "--plan", ROOT / "benchmarks/published_recipe.py", config, "--json"]
        command += ["--per_device_train_batch_size", str(setting.micro_batch), "--gradient_accumulation_steps", "1"]
        command += ["--max_length", str(setting.length), "--model_name_or_path", setting.model, *setting.flags]
        environment = os.environ | {"NPROC_PER_NODE": str(setting.processes), "PYTHON": sys.executable}
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout)


def write_config(changes: dict[str, Any], folder: Path) -> Path:
    """Writes a copy of the config `base` with other values of some keys."""
    keys = yaml.safe_load((ROOT / f"accelerate_configs/{changes['base']}.yaml").read_text())
    for key, value in changes.items():
        if key.startswith("fsdp_"):
            keys["fsdp_config"][key] = value
        elif key != "base":
            keys[key] = value
    path = folder / f"{changes['base']}.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def error_in_percent(share: float) -> str:
    number = round(100 * share)
    return f"{number:+} %".replace("-", "−") if number else "0 %"


def row(setting: Setting, planned: dict[str, Any]) -> list[str]:
    gib = planned["peak_gpu_gb"] * 1e9 / 2**30
    tokens = planned["tokens_per_second"][setting.card]
    return [
        setting.source,
        setting.title,
        f"{setting.processes} × {setting.card}",
        f"{setting.micro_batch} × {setting.length:,}",
        str(setting.gib),
        f"{gib:.1f}",
        error_in_percent(gib / setting.gib - 1),
        f"{setting.tokens_per_second:,}",
        f"{tokens:,}",
        error_in_percent(tokens / setting.tokens_per_second - 1),
    ]


def main(numbers: list[int]) -> None:
    print("| by | what | GPUs | micro-batch | GiB measured | planned | error | tokens/s measured | planned | error |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for setting in (SETTINGS[number] for number in numbers):
        print(f"| {' | '.join(row(setting, plan(setting)))} |", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(range(len(SETTINGS))))
