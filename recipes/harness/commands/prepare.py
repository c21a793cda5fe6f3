"""Downloads everything a run needs: model, dataset, 4-bit weights. Afterwards it trains without internet. launch.sh calls it:

`python -m harness.commands.prepare [--tiny] RECIPE.py [--flag value …]`.

It first prints how much there is to download, and stops if this machine has no space for it. At the end it runs the recipe
until its trainer is built, so that the recipe's own code opens and tokenizes the data.
"""

import glob
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.commands import arguments
from harness.hub import hub_errors
from harness.messages import UserError, exit_on_user_error, print_once, readable_size
from harness.runs import Run
from harness.start.environment import hide_library_warnings, set_environment
from harness.start.recipes import build_trainer

SETTINGS = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]  # files of a model besides its weights

Wanted = dict[tuple[str, str], dict[str, Any]]  # ("model" or "dataset", its Hub ID): options of `snapshot_download`


def main(*words: str) -> int:
    """Returns the exit code."""
    from harness.start.machine import print_untested_versions

    parsed = arguments.prepare().read(words)
    set_environment(parsed.tiny)
    from harness.model.gpu_features import find_gpu_features

    run = Run(str(parsed.recipe), tiny=parsed.tiny, any_config=True, on_cpu=True, gpu=find_gpu_features())
    hide_library_warnings()
    print_untested_versions()
    with tempfile.TemporaryDirectory(prefix="prepare-") as output_dir:
        build_trainer(run, [*parsed.flags, "--output_dir", output_dir], prepare_run)
    print_once("Everything this run needs is on this machine: the same flags train without internet.")
    return 0


def prepare_run(run: Run, arguments: tuple[Any, Any, Any]) -> Run:
    """Downloads what a run needs, once its arguments are known."""
    from harness.compat.transformers import load_tokenizers_as_offline
    from harness.model.loading import load_small_models
    from harness.model.quantized import quantize_once, use_quantized_weights
    from harness.start import preparing

    script_args, training_args, model_args = arguments
    preparing.check_all_arguments(run, arguments)
    preparing.set_model_options(run, arguments)
    preparing.check_model_and_dataset(run, arguments)
    if not run.tiny:
        download(wanted_of_model(model_args) | wanted_of_datasets(script_args), model_args)
    load_tokenizers_as_offline()
    preparing.replace_model_and_dataset(run, arguments)
    if model_args.load_in_4bit:
        quantize_once(model_args)
        use_quantized_weights(model_args, training_args)
    preparing.prepare_process(run, arguments)
    load_small_models()
    return run


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


def wanted_of_datasets(script_args: Any) -> Wanted:
    """The files of the chosen config of each dataset on the Hub, unless `datasets` has converted them already."""
    from harness.data import reading

    from datasets import load_dataset_builder

    wanted: Wanted = {}
    for source in script_args.data.sources:
        if reading.is_local(source.name):
            continue
        with hub_errors("dataset", source.name):
            builder = load_dataset_builder(source.name, source.config)
        if not script_args.dataset_streaming and Path(builder.cache_dir).is_dir():  # it has this name when it is complete
            continue
        # Of `hf://datasets/OWNER/NAME@REVISION/PATH`. README.md has the configs, by which the files are found without the Hub.
        addresses = [address for files in builder.config.data_files.values() for address in files]
        paths = [glob.escape(address.split("@")[1].split("/", 1)[1]) for address in addresses]
        options = wanted.setdefault(("dataset", source.name), {"repo_type": "dataset", "allow_patterns": ["README.md"]})
        options["allow_patterns"] += paths
    return wanted


def download(wanted: Wanted, model_args: Any) -> None:
    """Downloads files that are not here. Raises UserError if disk or host memory is too small for what follows."""
    from harness.model.quantized import quantized_folder

    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    missing, weights = {}, []  # bytes by repository; bytes of each file with weights
    for (kind, name), options in wanted.items():
        with hub_errors(kind, name):
            files = snapshot_download(name, **options, dry_run=True)
        missing[kind, name] = sum(file.file_size or 0 for file in files if file.will_download)
        weights += [file.file_size or 0 for file in files if file.filename.endswith(".safetensors")]
        if "*.safetensors" in options["allow_patterns"] and not weights:
            raise UserError(f"--model_name_or_path: {name} has no weights in safetensors, the only format that is loaded")
    parts = [f"{kind} {name} {readable_size(size)}" for (kind, name), size in missing.items() if size]
    print_once(f"To download: {', '.join(parts) or 'nothing, model and dataset are on this machine'}.")
    folders = [(HF_HUB_CACHE, sum(missing.values()))]
    if will_quantize(model_args):
        weights = weights or [file.stat().st_size for file in Path(model_args.model_name_or_path).glob("*.safetensors")]
        folders.append((quantized_folder(model_args), round(0.3 * sum(weights))))  # 4.5 bits of 16, and what stays in 16 bits
        check_memory_to_quantize(model_args.model_name_or_path, max(weights, default=0))
    check_disk(folders)
    for (kind, name), options in wanted.items():
        with hub_errors(kind, name):
            snapshot_download(name, **options)


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
