"""Models and datasets for benchmarks, made on this machine: real shapes with random weights, real text in the real columns.

Also the facts that every result has: hardware, versions, commit and date.
"""

import datetime
import hashlib
import importlib.metadata
import math
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests")]

# The sizes in each model's config.json on the Hub. recipes/harness/rehearsal/tiny_model.yaml has the rest of its config.
_QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4_864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "vocab_size": 151_936,
}
_QWEN3_4B = {
    "hidden_size": 2_560,
    "intermediate_size": 9_728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "vocab_size": 151_936,
}
SHAPES = {
    "Qwen/Qwen2-0.5B": _QWEN2,
    "Qwen/Qwen2-0.5B-Instruct": _QWEN2,
    "Qwen/Qwen3-8B": {
        "hidden_size": 4_096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "vocab_size": 151_936,
    },
    "Qwen/Qwen3-0.6B": {
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "vocab_size": 151_936,
    },
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "meta-llama/Llama-3.1-8B": {
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 128_256,
    },
    "Qwen/Qwen3.5-4B": {
        "text_config": {
            "hidden_size": 2_560,
            "intermediate_size": 9_216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_value_heads": 32,
            "vocab_size": 248_320,
        },
    },
    "meta-llama/Llama-3.1-70B": {
        "hidden_size": 8_192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "vocab_size": 128_256,
    },
    "openai-community/gpt2-xl": {"n_embd": 1_600, "n_layer": 48, "n_head": 25, "vocab_size": 50_257},
}
FILE_BYTES = 2_000_000_000  # weights per file
SHARDS = 8  # files per split
TOKENS_PER_LETTER = 0.2  # at least, in the training split; a rehearsal's tokenizers make 0.28 of Python's documentation


def meta_model(name: str, tokenizer: "PreTrainedTokenizerFast", is_tiny: bool = False, **sizes: int) -> "PreTrainedModel":
    """The model `name` on the meta device, in its real shape except for `sizes`, or tiny; with the tokenizer's special tokens."""
    from harness.rehearsal import tiny

    import torch
    from transformers import AutoConfig

    token_ids = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    family, shape = tiny.family_of(name)["config"], SHAPES[name]
    shape = {key: family[key] | value if isinstance(value, dict) else value for key, value in shape.items()}
    config = AutoConfig.for_model(**family | shape | token_ids | sizes)
    if is_tiny:
        config = tiny.shrink(config, {"vocab_size": len(tokenizer), **token_ids})
    with torch.device("meta"):
        model = tiny.make_model(config)
    config.architectures = [type(model).__name__]
    return model


def make_model(name: str, folder: Path, is_tiny: bool = False, **sizes: int) -> int:
    """Writes the model `name` as it is on the Hub, but with random weights, a rehearsal's tokenizer, and other `sizes`.

    Returns the number of parameters that every token is multiplied with: all matrices except embeddings.
    """
    from harness.folder import write_json
    from harness.rehearsal import tiny

    import torch
    from safetensors.torch import save_file

    tokenizer = tiny.make_tokenizer(tiny.family_of(name))
    model = meta_model(name, tokenizer, is_tiny, **sizes)
    parts = [model.config, tokenizer]
    if tiny.has_vision_part(model.config):
        processor = tiny.make_processor(name, "main", tiny.family_of(name), tokenizer, model.config)
        processor.image_processor.size = type(processor.image_processor)().size  # not that of a rehearsal
        parts.append(processor)
    for part in parts:
        part.save_pretrained(folder)
    # The same values are repeated: to draw billions takes minutes, and no result depends on them.
    dtype, spread = model.dtype, model.config.get_text_config().initializer_range
    values = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).mul(spread).to(dtype)
    weight_map, waiting = {}, {}

    def write_file() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(waiting, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(waiting, file))
        waiting.clear()

    for key, weight in model.named_parameters():
        if weight.dim() > 1:
            tensor = values.repeat(math.ceil(weight.numel() / len(values)))[: weight.numel()].clone()
        else:  # norms and biases
            tensor = torch.full((weight.numel(),), float(key.endswith("weight")), dtype=dtype)
        waiting[key] = tensor.view(weight.shape)
        if sum(tensor.nbytes for tensor in waiting.values()) > FILE_BYTES:
            write_file()
    if waiting:
        write_file()
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    head = model.get_output_embeddings().weight
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    looked_up = sum(weight.numel() for weight in embeddings if weight is not head)
    return sum(weight.numel() for weight in model.parameters() if weight.dim() > 1) - looked_up


def make_dataset(name: str, config: str | None, folder: Path, tokens: int) -> None:
    """Writes Python's documentation in the columns, splits and files of the dataset `name`.

    It is repeated until the training split has at least `tokens` tokens: a step at the end of an epoch could have fewer
    micro-batches than the others.
    """
    from harness.rehearsal import tiny

    from datasets import concatenate_datasets, disable_progress_bars, load_dataset

    disable_progress_bars()
    source = tiny.DATASETS[name]
    for split, rows in load_dataset(str(source)).items():
        if "images" in rows.column_names:  # those of a rehearsal are small
            rows = rows.map(lambda row: {"images": [image.resize((1024, 1024)) for image in row["images"]]})
        longest = None if {"text", "messages"} & set(rows.column_names) else 200  # several columns share the first letters
        letters = sum(len(text[:longest]) for text in tiny.documents())
        repeated = concatenate_datasets([rows] * math.ceil(tokens / (TOKENS_PER_LETTER * letters)))
        (folder / split).mkdir(parents=True)
        for shard in range(SHARDS):
            repeated.shard(SHARDS, shard).to_parquet(str(folder / split / f"{shard:05}.parquet"))
    card = (source / "README.md").read_text("utf-8")
    (folder / "README.md").write_text(card.replace("default", config or "default"), "utf-8")


def make_documents(folder: Path, tokenizer: "PreTrainedTokenizerFast", count: int, median: float, mean: float) -> None:
    """Writes a dataset with a column `text`: Python's documentation cut into `count` texts of log-normal lengths in tokens."""
    from harness.rehearsal import tiny

    from datasets import Dataset

    words = " ".join(tiny.documents()).split(" ")
    tokens_per_word = len(tokenizer(" ".join(words[:5000]))["input_ids"]) / 5000
    location, scale = math.log(median / tokens_per_word), math.sqrt(2 * math.log(mean / median))
    generator, rows, start = random.Random(0), [], 0
    for _ in range(count):
        length = max(8, round(generator.lognormvariate(location, scale)))
        rows.append({"text": " ".join(words[(start + index) % len(words)] for index in range(length))})
        start += length
    folder.mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(str(folder / "00000.parquet"))
    card = "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: 00000.parquet\n---\n"
    (folder / "README.md").write_text(card, "utf-8")


def provenance() -> dict[str, Any]:
    """Hardware, versions, commit and date."""
    from harness.run.results import PACKAGES

    import psutil
    import torch

    names = [line for line in output_of("lscpu").splitlines() if line.startswith("Model name:")]
    cpu = names[0].partition(":")[2].strip() if names else platform.machine()
    query = "name,memory.total,power.limit,pcie.link.gen.max,pcie.link.width.current,driver_version"
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "hardware": {
            "cpu": cpu,
            "cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count(),
            "host_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "gpus": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines(),
        },
        "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12").strip()
        or digest_of_files(),
        "date": datetime.date.today().isoformat(),
    }


def digest_of_files() -> str:
    """Stands for the commit where there is no git: a digest of the code that was measured."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.glob("recipes/**/*.py")) + sorted(ROOT.glob("accelerate_configs/*.yaml")):
        digest.update(path.read_bytes())
    return f"files-{digest.hexdigest()[:12]}"


def output_of(program: str, *arguments: str) -> str:
    """What a program prints; "" if it is not installed or fails."""
    if not shutil.which(program):
        return ""
    return subprocess.run([program, *arguments], capture_output=True, text=True).stdout
