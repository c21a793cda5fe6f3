"""Quantizes and merges a few full-size layers of Llama-3.1-70B: time, peak host memory, and what 80 layers would take.

    .venv/bin/python benchmarks/full_size_layers.py            # 4 layers: 7 GB of disk, about ten minutes on two cores

The layers have the real shapes (hidden 8,192, 28,672 in the MLP, 8 key-value heads) and random bf16 weights made here;
the vocabulary is small. Each step runs in a process of its own; the peak is that process's largest resident set, which
counts the pages of files it has mapped. Quantizing and merging hold one file and one weight at a time, so their peaks
do not grow with the number of layers.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = int(os.environ.get("LAYERS", 4))
SHARD = 2_000_000_000

MODEL = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
sys.path.insert(0, {recipes!r})
from harness.rehearsal import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
folder = Path({folder!r}); folder.mkdir()
tokenizer = tiny_model.make_tokenizer(tiny_model.FAMILIES["meta-llama/Llama-3.1-[78]*B"]); tokenizer.save_pretrained(folder)
config = AutoConfig.for_model("llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers={layers},
    num_attention_heads=64, num_key_value_heads=8, vocab_size=len(tokenizer), dtype="bfloat16", tie_word_embeddings=False)
config.architectures = ["LlamaForCausalLM"]; config.save_pretrained(folder)
with torch.device("meta"):
    shapes = {{name: tuple(w.shape) for name, w in AutoModelForCausalLM.from_config(config).named_parameters()}}
state, number = {{}}, 0
for name, shape in shapes.items():
    state[name] = torch.randn(shape, dtype=torch.bfloat16) * 0.02
    if sum(w.numel() * 2 for w in state.values()) > {shard} or name == list(shapes)[-1]:
        save_file(state, folder / f"model-{{number:05}}.safetensors", {{"format": "pt"}}); state, number = {{}}, number + 1
import json
from safetensors import safe_open
index = {{name: file.name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}}
(folder / "model.safetensors.index.json").write_text(json.dumps({{"metadata": {{}}, "weight_map": index}}))
"""
QUANTIZE = """
import sys; sys.path.insert(0, {recipes!r})
import trl; from pathlib import Path; from harness.commands import quantize
model = trl.ModelConfig(model_name_or_path={folder!r}, load_in_4bit=True, use_bnb_nested_quant=True,
    bnb_4bit_quant_storage="float32", dtype="bfloat16")
quantize._quantize(model, Path({out!r}))
"""
LOAD = """
import torch; from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({folder!r}, device_map={{"": "cpu"}}, dtype="bfloat16")
print(sum(p.untyped_storage().nbytes() for p in model.parameters()))
"""
ADAPTER = """
import torch; from peft import LoraConfig, get_peft_model; from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("meta"):
    model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({folder!r})),
        LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
model.peft_config["default"].base_model_name_or_path = {folder!r}
state = {{n: torch.randn(p.shape) * 0.01 for n, p in model.named_parameters() if "lora_" in n}}
model.save_pretrained({out!r}, state_dict=state)
"""


def measure(what: str, command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak GB and output of a command."""
    before = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds, peak = time.monotonic() - before, usage.ru_maxrss * 1024 / 1e9
    assert status == 0, f"{what} failed"
    print(f"{what:<44} {seconds:7.1f} s {peak:6.2f} GB", flush=True)
    return seconds, peak, output


def size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9


def main():
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        paths = {name: str(Path(scratch, name)) for name in ("bf16", "4bit", "adapter", "merged")}
        recipes = str(ROOT / "recipes")

        def python(text, **values):
            return [sys.executable, "-c", text.format(recipes=recipes, layers=LAYERS, shard=SHARD, **values)]

        print(f"{LAYERS} layers of the 70B shape, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
        measure("importing torch, transformers and trl", [sys.executable, "-c", "from trl import SFTTrainer"])
        measure("making the model", python(MODEL, folder=paths["bf16"]))
        seconds, _, _ = measure("quantizing it, once", python(QUANTIZE, folder=paths["bf16"], out=paths["4bit"]))
        quantized = size(Path(paths["4bit"]))
        loading, _, _ = measure("loading it quantized, on every start", python(LOAD, folder=paths["4bit"]))
        measure("making an adapter", python(ADAPTER, folder=paths["bf16"], out=paths["adapter"]))
        merge = [sys.executable, "-m", "harness.commands.merge", paths["adapter"], paths["merged"]]
        os.environ["PYTHONPATH"] = recipes
        _, merging, _ = measure("merging the adapter", merge)
        shard = max(file.stat().st_size for file in Path(paths["bf16"]).glob("*.safetensors")) / 1e9
        bound = 2 * shard + 1
        print(f"bf16 {size(Path(paths['bf16'])):.2f} GB, 4 bits {quantized:.2f} GB, largest shard {shard:.2f} GB")
        print(f"merging peaks at {merging:.2f} GB; twice the largest shard plus 1 GB is {bound:.2f} GB")
        whole = 80 / LAYERS
        result = {
            "quantizing_minutes": round(seconds * whole / 60),
            "loading_minutes": round(loading * whole / 60, 1),
            "gigabytes_in_4_bits": round(quantized * whole + 4.2, 1),
        }
        print("forecast for 80 layers, with 4.2 GB of embedding and head:", json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
