"""What the benchmarks train, made on this machine: models of the real shapes with random weights, text in real columns.

And what a measurement says of where it was made: hardware, versions, commit, date.
"""

import datetime
import importlib.metadata
import math
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests")]

# The sizes in a model's config.json on the hub; the rest is in its family of recipes/harness/rehearsal/tiny_model.yaml.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SHAPES = {
    "Qwen/Qwen2-0.5B": dict(zip(_SIZES, (896, 4_864, 24, 14, 151_936), strict=True)),
    "Qwen/Qwen2-0.5B-Instruct": dict(zip(_SIZES, (896, 4_864, 24, 14, 151_936), strict=True)),
    "meta-llama/Llama-3.1-8B": dict(zip(_SIZES, (4_096, 14_336, 32, 32, 128_256), strict=True)),
    "meta-llama/Llama-3.1-70B": dict(zip(_SIZES, (8_192, 28_672, 80, 64, 128_256), strict=True)),
    "openai-community/gpt2-xl": {"n_embd": 1_600, "n_layer": 48, "n_head": 25, "vocab_size": 50_257},
}


def on_meta(name: str, tokenizer, is_tiny: bool = False, **sizes):
    """The model `name` without weights, in its real shape or a rehearsal's but for `sizes`, with `tokenizer`'s special tokens."""
    from harness.rehearsal import tiny_model

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(**tiny_model.family_of(name)["config"] | SHAPES[name] | tokens | sizes)
    if is_tiny:
        config = tiny_model.shrink(config, {"vocab_size": len(tokenizer), **tokens})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    return model


def make_model(name: str, folder: Path, is_tiny: bool = False, **sizes) -> int:
    """Writes the model `name` as it is on the hub, with random weights, the tokenizer of a rehearsal and what `sizes` change.

    Returns the number of parameters that every token is multiplied with: all matrices but the embeddings looked up.
    """
    from harness.commands.shards import Shards
    from harness.rehearsal import tiny_model

    import torch

    tokenizer = tiny_model.make_tokenizer(tiny_model.family_of(name))
    model = on_meta(name, tokenizer, is_tiny, **sizes)
    for part in (model.config, tokenizer):
        part.save_pretrained(folder)
    # The same numbers again and again: to draw billions takes minutes, and nothing that is measured depends on them.
    dtype, spread = model.config.dtype, model.config.initializer_range
    numbers = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).mul(spread).to(dtype)
    files = Shards(folder)
    for key, weight in model.named_parameters():
        if weight.dim() > 1:
            value = numbers.repeat(math.ceil(weight.numel() / len(numbers)))[: weight.numel()].clone()
        else:  # norms and biases
            value = torch.full((weight.numel(),), float(key.endswith("weight")), dtype=dtype)
        files.add({key: value.view(weight.shape)})
    files.close()
    head = model.get_output_embeddings().weight
    looked_up = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.weight is not head]
    return sum(weight.numel() for weight in model.parameters() if weight.dim() > 1) - sum(w.numel() for w in looked_up)


def make_data(name: str, config: str | None, folder: Path):
    """Python's documentation in the columns, splits and files of the data set `name`."""
    from harness.rehearsal import tiny_data

    import datasets

    datasets.disable_progress_bars()
    tiny_data.make(SimpleNamespace(dataset_name=name, dataset_config=config), folder)


def make_documents(folder: Path, tokenizer, count: int, median: float, mean: float):
    """Python's documentation cut to `count` texts, log-normal in tokens, as a data set with a column `text`."""
    from harness.rehearsal import tiny_data

    from datasets import Dataset

    words = " ".join(tiny_data.documents()).split(" ")
    a_word = len(tokenizer(" ".join(words[:5000]))["input_ids"]) / 5000
    chance, rows, place = random.Random(0), [], 0
    for _ in range(count):
        length = max(8, round(chance.lognormvariate(math.log(median / a_word), math.sqrt(2 * math.log(mean / median)))))
        rows.append({"text": " ".join(words[(place + i) % len(words)] for i in range(length))})
        place += length
    folder.mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(str(folder / "00000.parquet"))
    card = "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: 00000.parquet\n---\n"
    (folder / "README.md").write_text(card, "utf-8")


def provenance() -> dict:
    """Hardware, versions, commit and date."""
    from harness.run.results import PACKAGES

    import psutil
    import torch

    names = [line for line in _output("lscpu").splitlines() if line.startswith("Model name:")]
    cpu = names[0].partition(":")[2].strip() if names else platform.machine()
    query = "name,memory.total,power.limit,pcie.link.gen.max,pcie.link.width.current,driver_version"
    return {
        "hardware": {
            "cpu": cpu,
            "cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count(),
            "host_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "gpus": _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines(),
        },
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12").strip(),
        "date": datetime.date.today().isoformat(),
    }


def _output(program: str, *arguments: str) -> str:
    """What a program prints, "" where there is none or it fails."""
    if not shutil.which(program):
        return ""
    return subprocess.run([program, *arguments], capture_output=True, text=True).stdout
