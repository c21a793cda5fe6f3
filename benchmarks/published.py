"""Holds `--plan` against what others measured: memory and speed of ten settings, with the deviation of each.

    HF_ENDPOINT=… .venv/bin/python benchmarks/published.py           # asks the hub for config.json of five models

Each is simulated with the nearest that this project has: FSDP2 where they had FSDP1, SDPA where they had FlashAttention,
no compilation, the allocator's peak where they give what it reserved. Prints the table of docs/will-it-fit.md. No GPU.
"""

import os
import subprocess
import sys
from json import loads
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAIN, TRL = "benchmarks/published_recipe.py", "llama31_8b_lora"
LORA = ("--use_peft", "--lora_target_modules")
R16 = (*LORA, "q_proj", "k_proj", "v_proj", "o_proj", "--lora_r", "16")
R64 = (*LORA, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "--lora_r", "64")
FOUR = ("--load_in_4bit", "--bnb_4bit_quant_type", "nf4")
LLAMA3, LLAMA2, LLAMA2_70 = "meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf"
QWEN3, LLAMA31_70 = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-70B"
# Who, what, card, recipe, config, processes, model, micro-batch, length, more flags, GiB a GPU, tokens/s in all.
ROWS = (
    ("P", "Qwen3-0.6B full", "H100 80 GB", PLAIN, "1x3090", 1, QWEN3, 1, 8192, ("--dtype", "float32"), 31.7, 26005),
    ("P", "Qwen3-0.6B full", "H100 80 GB", PLAIN, "1x3090", 1, QWEN3, 1, 16384, ("--dtype", "float32"), 52.8, 25486),
    ("F", "Llama-3-8B LoRA", "A100 80 GB", PLAIN, "4gpu_full_shard", 4, LLAMA3, 4, 4096, R16, 25.7, 4 * 3593),
    ("F", "Llama-3-8B QLoRA", "A100 80 GB", PLAIN, "4gpu_full_shard", 4, LLAMA3, 4, 4096, (*R16, *FOUR), 23.4, 4 * 3867),
    ("F", "Llama-3-8B full", "A100 80 GB", PLAIN, "4gpu_full_shard", 4, LLAMA3, 4, 4096, (), 44.3, 4 * 3202),
    ("A", "Llama-2-70B QLoRA, offload", "RTX 3090", PLAIN, "2x3090_qlora", 2, LLAMA2_70, 2, 2048, (*R64, *FOUR), 14.9, 178),
    ("A", "Llama-2-7B QLoRA", "RTX 3090", PLAIN, "4gpu_full_shard", 2, LLAMA2, 4, 2048, (*R64, *FOUR), 11.2, 2101),
    ("A", "Llama-2-7B LoRA", "RTX 3090", PLAIN, "4gpu_full_shard", 2, LLAMA2, 4, 2048, R64, 16.1, 1535),
    ("T", "Llama-3.1-8B LoRA r8", "RTX 4090", TRL, "1x3090", 1, None, 2, 2048, ("--lora_r", "8"), 16.2, 3083),
    ("T", "Llama-3.1-70B LoRA r16", "A100 80 GB", TRL, "4gpu_full_shard", 8, LLAMA31_70, 2, 2048, (), 27.6, 3497),
)


def plan(recipe: str, config: str, processes: int, model: str | None, batch: int, length: int, flags: tuple) -> dict:
    command = [ROOT / "launch.sh", "--plan", ROOT / recipe if "/" in recipe else recipe, config, "--json", *flags]
    command += ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", "1", "--max_length", str(length)]
    command += ["--model_name_or_path", model] if model else []
    environment = os.environ | {"NPROC_PER_NODE": str(processes), "PYTHON": sys.executable}
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return loads(process.stdout)


def main():
    print("| by | what | GPUs | micro-batch | GiB measured | planned | | tokens/s measured | planned | |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for who, what, card, recipe, config, processes, model, batch, length, flags, gib, speed in ROWS:
        found = plan(recipe, config, processes, model, batch, length, flags)
        ours = found["peak_gpu_gb"] * 1e9 / 2**30
        low, high = found["tokens_per_second"][card]
        place = "within" if low <= speed <= high else f"{speed / (low if speed < low else high) - 1:+.0%} of the range"
        print(
            f"| {who} | {what} | {processes} × {card} | {batch} × {length:,} | {gib} | {ours:.1f} | {ours / gib - 1:+.0%} "
            f"| {speed:,} | {low:,}–{high:,} | {place} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
