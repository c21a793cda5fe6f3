"""Quantizes and merges a few full-size layers of Llama-3.1-70B: time, peak host memory, and a forecast for 80 layers.

    .venv/bin/python benchmarks/full_size_layers.py            # 4 layers: 7 GB of disk, about ten minutes on two cores
    .venv/bin/python benchmarks/full_size_layers.py attention  # one layer of each model with both attentions, on a GPU or CPU

The second command times forward and backward of one layer on a packed micro-batch of the recipe, with documents of half a row,
and SDPA with its mask against `varlen`. On a CPU `varlen` is one SDPA per document, and ROWS=1 makes it shorter.

The layers have the real shapes (hidden size 8,192, 28,672 in the MLP, 8 key-value heads) and random bf16 weights; the vocabulary
is small. Every step runs in its own process. Its peak is the maximum resident set, which includes pages of memory-mapped files.
Quantizing and merging hold one file and one weight at a time, so their peaks do not grow with the number of layers.
LAYERS sets the number of layers.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import inputs

NAME = "meta-llama/Llama-3.1-70B"
LAYERS = int(os.environ.get("LAYERS", 4))
VOCABULARY = 2048
EMBEDDING_AND_HEAD = 4.2  # GB in bf16, with the real vocabulary
# Rows and their length in a micro-batch of the recipes that pack.
MICRO_BATCHES = {"Qwen/Qwen2-0.5B": (2, 1024), "meta-llama/Llama-3.1-8B": (1, 2048), "meta-llama/Llama-3.1-70B": (4, 1024)}


def import_libraries() -> None:
    from trl import SFTTrainer  # noqa: F401


def make_model(folder: Path) -> None:
    inputs.make_model(NAME, folder, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)


def quantize(folder: Path, out: Path) -> None:
    from harness.model import quantized

    import trl

    model_args = trl.ModelConfig(
        model_name_or_path=str(folder),
        load_in_4bit=True,
        use_bnb_nested_quant=True,
        bnb_4bit_quant_storage="float32",
        dtype="bfloat16",
    )
    quantized.quantize_files(model_args, out)


def load(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, dtype="bfloat16")


def make_adapter(folder: Path, out: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), settings)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    weights = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    model.save_pretrained(out, state_dict={name: torch.randn(weight.shape) * 0.01 for name, weight in weights.items()})


def merge(adapter: Path, out: Path) -> None:
    from harness.commands import merge

    merge.main(str(adapter), str(out))


def attention() -> None:
    """Times one layer of each model of MICRO_BATCHES with SDPA and with `varlen`."""
    from harness.model.attention import VARLEN, register_varlen
    from harness.rehearsal import tiny

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    register_varlen()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores"
    print(f"one layer in bf16 on {where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for name, (rows, length) in MICRO_BATCHES.items():
        rows = int(os.environ.get("ROWS", rows))
        sizes = inputs.SHAPES[name] | {"num_hidden_layers": 1, "vocab_size": VOCABULARY}
        config = AutoConfig.for_model(**tiny.family_of(name)["config"] | sizes)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            ends = torch.arange(0, rows * length + 1, length // 2, dtype=torch.int32)
            batch = {
                "input_ids": torch.randint(0, VOCABULARY, (1, rows * length)),
                "position_ids": torch.arange(length // 2).repeat(2 * rows)[None],
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
            }
        batch |= {"max_length_q": length // 2, "max_length_k": length // 2, "use_cache": False}
        seconds, peaks = {}, {}
        for implementation in ("sdpa", VARLEN):
            model.set_attn_implementation(implementation)
            times = []
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for _ in range(6 if device == "cuda" else 2):  # the first one is not counted
                began = time.monotonic()
                model.model(**batch).last_hidden_state.sum().backward()
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.monotonic() - began)
            seconds[implementation] = statistics.median(times[1:])
            if device == "cuda":
                peaks[implementation] = torch.cuda.max_memory_allocated() / 1e9
        measured = ", ".join(f"{key} {value:.3f} s" for key, value in seconds.items())
        memory = "".join(f", {key} {value:.2f} GB" for key, value in peaks.items())
        print(f"{name}, {rows} x {length:,} tokens: {measured}{memory}", flush=True)


STEPS = {step.__name__: step for step in (import_libraries, make_model, quantize, load, make_adapter, merge, attention)}


def measure(title: str, step: str, *folders: Path) -> tuple[float, float]:
    """Runs a step in its own process; returns its seconds and peak GB."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, __file__, step, *folders], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    seconds, peak = time.monotonic() - began, usage.ru_maxrss * 1024 / 1e9
    if status:
        sys.exit(f"error: {step} failed: {errors[-2000:]}")
    print(f"{title:<44} {seconds:7.1f} s {peak:6.2f} GB", flush=True)
    return seconds, peak


def weights_in(folder: Path) -> list[float]:
    """GB of each file with weights."""
    return [file.stat().st_size / 1e9 for file in folder.glob("*.safetensors")]


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        bf16, in_4bit, adapter, merged = (Path(scratch, name) for name in ("bf16", "4bit", "adapter", "merged"))
        print(f"{LAYERS} layers of the 70B shape, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
        measure("import torch, transformers and trl", "import_libraries")
        measure("make the model", "make_model", bf16)
        quantizing, _ = measure("quantize it, once", "quantize", bf16, in_4bit)
        loading, _ = measure("load the quantized model, at every start", "load", in_4bit)
        measure("make an adapter", "make_adapter", bf16, adapter)
        _, merging_peak = measure("merge the adapter", "merge", adapter, merged)
        largest_file, quantized_size = max(weights_in(bf16)), sum(weights_in(in_4bit))
        print(f"bf16 {sum(weights_in(bf16)):.2f} GB, 4 bits {quantized_size:.2f} GB, largest file {largest_file:.2f} GB")
        print(f"merging peaks at {merging_peak:.2f} GB; twice the largest file plus 1 GB is {2 * largest_file + 1:.2f} GB")
        factor = 80 / LAYERS
        forecast = {
            "quantizing_minutes": round(quantizing * factor / 60),
            "loading_minutes": round(loading * factor / 60, 1),
            "gigabytes_in_4_bits": round(quantized_size * factor + EMBEDDING_AND_HEAD, 1),
        }
        print(f"forecast for 80 layers, with {EMBEDDING_AND_HEAD} GB of embedding and head:", json.dumps(forecast, indent=2))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        STEPS[sys.argv[1]](*map(Path, sys.argv[2:]))
    else:
        main()
