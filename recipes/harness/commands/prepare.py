"""Everything a run will need, into the caches, on a machine with internet. Called by `launch.sh --prepare RECIPE`.

First it says how much there is to download, and fails when this machine cannot hold it. Then come the files of model and
data, and 4-bit weights. At last the recipe goes on up to its trainer, so that its own lines open the data and tokenize it.
"""

import glob
import shutil
from pathlib import Path

from harness import hub
from harness.commands import quantize, stream_files
from harness.launched import fail, say

SETTINGS = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
GB = 1e9


def download(data, args, model, attention: str):
    """Brings model and data here, where they are not yet. What was interrupted goes on: so do the hub's downloads."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers import tokenization_utils_base

    disable_progress_bars()
    name, source, wanted, record, arrow = model.model_name_or_path, data.dataset_name, {}, None, 0
    packs = model.load_in_4bit and not quantize.folder_of(model).is_dir()
    if not Path(name).is_dir():
        patterns = [*SETTINGS, *([] if model.load_in_4bit and not packs else quantize.WEIGHTS["allow_patterns"])]
        wanted["model", name] = {**quantize.WEIGHTS, "revision": model.model_revision, "allow_patterns": patterns}
    if not Path(source).expanduser().exists():
        with hub.errors("data set", source):
            files, record, arrow = _data(data, args, model)
        names = [glob.escape(stream_files.path_in(address)) for addresses in files.values() for address in addresses]
        wanted["data set", source] = {"repo_type": "dataset", "allow_patterns": names}
    sizes = {what: _sizes(*what, options) for what, options in wanted.items()}
    missing = {what: sum(size for size, is_here in files if not is_here) for what, files in sizes.items()}
    weights = [size for size, _ in sizes.get(("model", name), [])] or [f.stat().st_size for f in Path(name).glob("*.safetensors")]

    parts = [f"{kind} {of} {_size(size)}" for (kind, of), size in missing.items() if size]
    say(f"To download: {', '.join(parts) or 'nothing, model and data are here'}.")
    folders = [(HF_HUB_CACHE, sum(missing.values())), (HF_DATASETS_CACHE, arrow)]
    if packs:
        folders.append((quantize.folder_of(model), 0.3 * sum(weights)))  # 4.5 bits of 16, and what stays as it is
        _fits_memory(name, max(weights, default=0))
    _fits_disk(folders)

    snapshots = {}
    if not args.disable_tqdm:
        enable_progress_bars()
    for (kind, of), options in wanted.items():
        with hub.errors(kind, of):
            snapshots[kind] = snapshot_download(of, **options)
    if record:
        stream_files.link(data, files, record, Path(snapshots["data set"]))
        stream_files.substitute(data, args, stream_files.processes(data))
    say(_about(attention))
    # A tokenizer notes whether it came over the network, and what it tokenizes has another fingerprint when it did.
    tokenization_utils_base.is_offline_mode = lambda: True


def _about(attention: str) -> str:
    """What is said of FlashAttention, whose kernels came with the launcher's question whether they can be had."""
    import torch

    if not torch.cuda.is_available():
        return "FlashAttention: skipped, for which kernels there are depends on the GPU, and here is none."
    if attention:
        return "FlashAttention: here."
    return "FlashAttention: cannot be had, so PyTorch's SDPA will be used; `pip install kernels` lets the hub's be fetched."


def _size(number: float) -> str:
    return f"{number / GB:.1f} GB" if number >= GB / 10 else f"{number / 1e6:.1f} MB"


def _data(data, args, model) -> tuple[dict[str, list[str]], dict | None, int]:
    """The addresses of a data set's files by split, the record of a stream, and the bytes of what is made of the others."""
    from datasets import load_dataset_builder
    from transformers import AutoTokenizer

    builder = load_dataset_builder(data.dataset_name, data.dataset_config)
    files = {str(split): list(names) for split, names in builder.config.data_files.items()}
    if data.dataset_streaming:
        tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)
        return *stream_files.choose(data, args, files, tokenizer), 0
    if Path(builder.cache_dir).is_dir():  # whole, or not there
        return {}, None, 0
    return files, None, builder.info.dataset_size or 0


def _sizes(kind: str, name: str, options: dict) -> list[tuple[int, bool]]:
    """Of every file: its bytes, and whether it is here."""
    from huggingface_hub import snapshot_download

    with hub.errors(kind, name):
        found = snapshot_download(name, **options, dry_run=True)
    if "*.safetensors" in options["allow_patterns"] and not any(file.filename.endswith(".safetensors") for file in found):
        fail(f"model {name} has no weights in safetensors, the only ones that are loaded here")
    return [(file.file_size or 0, not file.will_download) for file in found]


def _fits_disk(folders: list[tuple[str, int]]):
    """Fails when a file system has less room than all that is to be written to it."""
    needed, free = {}, {}
    for folder, size in folders:
        there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        device = there.stat().st_dev
        needed[device], free[device] = needed.get(device, 0) + size, (shutil.disk_usage(there).free, folder)
    for device, size in needed.items():
        room, folder = free[device]
        if size > room:
            fail(
                f"{_size(size)} are to be written to the disk of {folder}, which has {_size(room)} free: make room, or name a "
                "folder on a larger disk, HF_HOME=/a/folder"
            )


def _fits_memory(name: str, largest: int):
    """Fails when quantizing would not fit host memory: a file of the original, what becomes of it, and one weight in float32."""
    import psutil

    needed, available = 2 * largest + 3e9, psutil.virtual_memory().available
    if needed > available:
        fail(
            f"quantizing {name} takes {_size(needed)} of host memory, for its largest file has {_size(largest)}, and "
            f"{_size(available)} are free: prepare it on a machine with more"
        )
