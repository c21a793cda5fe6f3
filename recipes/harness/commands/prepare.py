"""Downloads everything a run needs: model, dataset, 4-bit weights. Afterwards it trains without internet. launch.sh calls it:

`python -m harness.commands.prepare [--tiny] RECIPE.py [--flag value …]`.

It first prints how much there is to download, and stops if this machine has no space for it. At the end it runs the recipe
until its trainer is built, so that the recipe's own code opens and tokenizes the data.
"""

import dataclasses
import glob
import math
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.batches import ASSUMED_LENGTH, is_packed, length_of_rows
from harness.commands import arguments
from harness.contexts import BuildingContext
from harness.folder import write_json
from harness.hub import hub_errors
from harness.messages import UserError, exit_on_user_error, print_once, readable_size
from harness.start import flags
from harness.start.launch import gpu_features, hide_library_warnings, set_environment
from harness.start.processes import build_trainer

import yaml

SETTINGS = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]  # files of a model besides its weights
MARGIN = 1.1  # rows differ in length, and the sample that measures it is small
SAMPLE = 100  # rows
PROCESSES = 8  # of a run whose config is not known yet, where the number matters

Wanted = dict[tuple[str, str], dict[str, Any]]  # ("model" or "dataset", its Hub ID): options of `snapshot_download`


def main(*words: str) -> int:
    """Returns the exit code."""
    from harness.start.machine import print_untested_versions

    parsed = arguments.prepare().read(words)
    flags.check_flags(parsed.recipe, parsed.flags)
    prepare = Prepare(str(parsed.recipe), tiny=parsed.tiny, on_cpu=True)
    set_environment(prepare.tiny)
    prepare.attention, prepare.no_flash, prepare.no_triton, prepare.gpu_problem = gpu_features()
    hide_library_warnings()
    print_untested_versions()
    with tempfile.TemporaryDirectory(prefix="prepare-") as output_dir:
        build_trainer(prepare, [*parsed.flags, "--output_dir", output_dir])
    print_once("Everything this run needs is on this machine: the same flags train without internet.")
    return 0


@dataclasses.dataclass
class Prepare(BuildingContext):
    """Downloads what a run needs when its arguments are known, then runs the recipe until it has built its trainer.

    The recipe's own code opens and tokenizes the data, so that it is in the caches.
    """

    is_sharded = True  # the config is not known, and only sharded 4-bit weights must be made before a run

    def prepare(self, arguments: tuple[Any, Any, Any]) -> None:
        from harness.compat.transformers import load_tokenizers_as_offline
        from harness.model.loading import load_small_models
        from harness.model.quantized import quantize_once, use_quantized_weights
        from harness.start import preparing

        _, training_args, model_args = arguments
        preparing.check_all_arguments(self, arguments)
        preparing.set_model_options(self, arguments)
        preparing.check_model_and_dataset(self, arguments)
        if not self.tiny:
            download(*arguments, self.attention, self.gpu_problem)
        load_tokenizers_as_offline()
        preparing.replace_model_and_dataset(self, arguments)
        if model_args.load_in_4bit:
            quantize_once(model_args)
            use_quantized_weights(model_args, training_args)
        preparing.prepare_process(self, arguments)
        load_small_models()


def download(script_args: Any, training_args: Any, model_args: Any, attention: list[str], gpu_problem: str) -> None:
    """Downloads the files of model and dataset that are not here. An interrupted download continues."""
    from harness.model.attention import has_documents

    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    of_datasets, streams, converted_bytes = wanted_of_datasets(script_args, training_args, model_args)
    wanted = wanted_of_model(model_args) | of_datasets
    check_space(wanted, model_args, converted_bytes)
    if not training_args.disable_tqdm:
        enable_progress_bars()
    snapshots = {}
    for (kind, name), options in wanted.items():
        with hub_errors(kind, name):
            snapshots[kind, name] = Path(snapshot_download(name, **options))
    for source, files, record in streams:
        link_stream_files(source, files, record, snapshots["dataset", source.name])
    if not has_documents(training_args):  # for packed rows PyTorch has it
        print_once(about_flash_attention(attention, gpu_problem))


def will_quantize(model_args: Any) -> bool:
    """Whether the 4-bit weights are still to be made."""
    from harness.model.quantized import quantized_folder

    return model_args.load_in_4bit and not quantized_folder(model_args).is_dir()


def wanted_of_model(model_args: Any) -> Wanted:
    """The files of a model on the Hub; without its weights if only its 4-bit ones are loaded, and these are on this machine."""
    from harness.model.quantized import DOWNLOAD_OF_WEIGHTS

    name = model_args.model_name_or_path
    if not name or Path(name).is_dir():  # without a name the recipe makes its model itself
        return {}
    has_quantized = model_args.load_in_4bit and not will_quantize(model_args)
    patterns = SETTINGS if has_quantized else [*SETTINGS, *DOWNLOAD_OF_WEIGHTS["allow_patterns"]]
    return {("model", name): {**DOWNLOAD_OF_WEIGHTS, "revision": model_args.model_revision, "allow_patterns": patterns}}


def wanted_of_datasets(script_args: Any, training_args: Any, model_args: Any) -> tuple[Wanted, list[tuple], int]:
    """The files of the datasets on the Hub, what `link_stream_files` needs of each stream, and the bytes of the others."""
    from harness.data import reading

    wanted, streams, converted_bytes = {}, [], 0
    for source in script_args.data.sources:
        if reading.is_local(source.name):
            continue
        with hub_errors("dataset", source.name):
            files, record, size = files_of_dataset(source, script_args, training_args, model_args)
        converted_bytes += size
        names = [glob.escape(path_in_repository(address)) for addresses in files.values() for address in addresses]
        if names:
            wanted.setdefault(("dataset", source.name), {"repo_type": "dataset", "allow_patterns": []})
            wanted["dataset", source.name]["allow_patterns"] += names
        if record:
            streams.append((source, files, record))
    return wanted, streams, converted_bytes


def check_space(wanted: Wanted, model_args: Any, converted_bytes: int) -> None:
    """Prints how much there is to download. Raises UserError if disk or host memory is too small for what follows."""
    from harness.model.quantized import quantized_folder

    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    model = model_args.model_name_or_path
    sizes = {repository: sizes_to_download(*repository, options) for repository, options in wanted.items()}
    missing = {repository: sum(size for size, is_here in files if not is_here) for repository, files in sizes.items()}
    parts = [f"{kind} {name} {readable_size(size)}" for (kind, name), size in missing.items() if size]
    print_once(f"To download: {', '.join(parts) or 'nothing, model and dataset are on this machine'}.")
    folders = [(HF_HUB_CACHE, sum(missing.values())), (HF_DATASETS_CACHE, converted_bytes)]
    if will_quantize(model_args):
        weights = [size for size, _ in sizes.get(("model", model), ())]
        weights = weights or [file.stat().st_size for file in Path(model).glob("*.safetensors")]
        folders.append((quantized_folder(model_args), round(0.3 * sum(weights))))  # 4.5 bits of 16, and what stays in 16 bits
        check_memory_to_quantize(model, max(weights, default=0))
    check_disk(folders)


def about_flash_attention(attention: list[str], gpu_problem: str) -> str:
    """The kernels were downloaded when `gpu_features` asked whether this machine can use them."""
    from harness.model.gpu_features import FLASH

    import torch

    if not torch.cuda.is_available():
        return "FlashAttention: skipped, because its kernels depend on the GPU and this machine has none."
    if FLASH in attention:
        return "FlashAttention: available."
    if gpu_problem:
        return f"FlashAttention: not known, because the GPU cannot be used now: {gpu_problem}"
    return (
        f"FlashAttention: not available, so PyTorch's SDPA is used; `{sys.executable} -m pip install kernels` allows "
        "kernels from the Hub."
    )


def files_of_dataset(
    source: Any, script_args: Any, training_args: Any, model_args: Any
) -> tuple[dict[str, list[str]], dict | None, int]:
    """What --prepare downloads of a dataset: addresses of files by split, the record of a stream, and the bytes of the cache.

    For a stream: enough files for the run, and for how many tokens they are enough. For other data: all files, or none if the
    dataset is in the cache of `datasets`, and the bytes that it will have there.
    """
    from datasets import load_dataset_builder

    builder = load_dataset_builder(source.name, source.config)
    files = {str(split): list(names) for split, names in builder.config.data_files.items()}
    if script_args.dataset_streaming:
        return *choose_stream_files(source, script_args, training_args, model_args, files), 0
    if Path(builder.cache_dir).is_dir():  # `datasets` gives it this name when it is complete
        return {}, None, 0
    return files, None, builder.info.dataset_size or 0


def choose_stream_files(
    source: Any, script_args: Any, training_args: Any, model_args: Any, files: dict[str, list[str]]
) -> tuple[dict[str, list[str]], dict]:
    """The files of a stream that are enough for a run, by split, and the record of how many tokens they are enough for.

    `files` are `hf://` addresses by split. They are chosen from all over the list, because neighbours are often alike.
    Raises UserError for files that do not say how many rows they have; Parquet files do.
    """
    from harness.data.prepared import tokens_of_run
    from harness.data.splits import evaluation_split

    from huggingface_hub import HfFileSystem
    from pyarrow import parquet

    data = script_args.data
    train, test = source.train_split, evaluation_split(source, files, data.needs_test_split)
    names = list(files[train])
    if not all(name.endswith(".parquet") for name in names):
        raise UserError(
            f"--dataset_name: the files of the stream {source.name} are not Parquet, so nothing says how many of "
            "them a run needs: --dataset_streaming false downloads all of them"
        )
    packing, length = is_packed(training_args), length_of_rows(training_args) or ASSUMED_LENGTH
    tokens_per_row = min(mean_tokens(source, data.text_field, model_args), length) if packing else length
    if data.keeps_samples:
        samples = data.samples_of(source)
    else:
        has_fixed_batch = script_args.global_batch_size and "gradient_accumulation_steps" not in script_args.given
        processes = 1 if has_fixed_batch else PROCESSES
        samples = tokens_of_run(source, script_args.max_tokens, training_args, processes) / tokens_per_row
    random.Random(0).shuffle(names)
    chosen, rows = [], 0
    while names and rows < samples * MARGIN + data.max_eval_samples:
        chosen.append(names.pop())
        with HfFileSystem().open(chosen[-1]) as file:
            rows += parquet.read_metadata(file).num_rows
    samples = (rows - data.max_eval_samples) / MARGIN
    record = {
        "packing": packing,
        "tokens": math.ceil(samples * tokens_per_row),
        "samples": math.ceil(samples),
        "files": len(chosen),
        "of": len(chosen) + len(names),
    }
    splits = {train: sorted(chosen)}
    if test in files and test != train:
        splits[test] = files[test][:1]
    return splits, record


def mean_tokens(source: Any, text_field: str, model_args: Any) -> float:
    """The mean number of tokens of the first rows of a stream."""
    from harness.data.chat_templates import load_tokenizer

    from datasets import load_dataset

    tokenizer = load_tokenizer(model_args)
    rows = list(load_dataset(source.name, source.config, split=source.train_split, streaming=True).take(SAMPLE))
    return sum(len(tokenizer(str(row.get(text_field, row)))["input_ids"]) for row in rows) / len(rows)


def path_in_repository(address: str) -> str:
    """PATH of `hf://datasets/OWNER/NAME@REVISION/PATH`."""
    return address.split("@")[1].split("/", 1)[1]


def link_stream_files(source: Any, files: dict[str, list[str]], record: dict, snapshot: Path) -> None:
    """Makes a dataset of these files, with the config and splits of the original, where `use_prepared_files` finds it."""
    from harness.data.prepared import PREPARED, prepared_folder

    folder = prepared_folder(source) / f"{record['files']}-of-{record['of']}"
    splits = []
    for split, addresses in files.items():
        paths = [path_in_repository(address) for address in addresses]
        splits.append({"split": split, "path": paths})
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).unlink(missing_ok=True)
            (folder / path).symlink_to(snapshot / path)
    card = {"configs": [{"config_name": source.config or "default", "data_files": splits}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n", "utf-8")
    write_json(folder / PREPARED, record)


def sizes_to_download(kind: str, name: str, options: dict) -> list[tuple[int, bool]]:
    """Of every wanted file of a repository: its bytes, and whether it is on this machine."""
    from huggingface_hub import snapshot_download

    with hub_errors(kind, name):
        files = snapshot_download(name, **options, dry_run=True)
    if "*.safetensors" in options["allow_patterns"] and not any(file.filename.endswith(".safetensors") for file in files):
        raise UserError(f"--model_name_or_path: {name} has no weights in safetensors, the only format that is loaded")
    return [(file.file_size or 0, not file.will_download) for file in files]


def check_disk(folders: list[tuple[Path | str, int]]) -> None:
    """Raises UserError if a disk has less free space than will be written to it. `folders`: where, and how many bytes."""
    by_disk: dict[int, list[tuple[int, Path]]] = {}  # bytes, and the folder that they go into
    for folder, size in folders:
        existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        by_disk.setdefault(existing.stat().st_dev, []).append((size, existing))
    for written in by_disk.values():
        needed, (_, largest) = sum(size for size, _ in written), max(written)
        free = shutil.disk_usage(largest).free
        if needed > free:
            raise UserError(
                f"{readable_size(needed)} are needed on the disk of {largest}, which has {readable_size(free)} free: free "
                "some space, or set HF_HOME to a folder on a larger disk"
            )


def check_memory_to_quantize(name: str, largest_file: int) -> None:
    """Raises UserError if quantizing, which goes file by file, needs more host memory than is free."""
    import psutil

    # A file, what is made of it (as much for an embedding, which stays in 16 bits), and the libraries.
    needed, available = 2 * largest_file + 3e9, psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"quantizing {name} needs {readable_size(needed)} of host memory, because its largest file has "
            f"{readable_size(largest_file)}; {readable_size(available)} are free: run --prepare on a machine with more"
        )


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(*sys.argv[1:]))
