"""From a run to a plain model, with one file of it in memory at a time if possible. launch.sh calls it:

`python -m harness.commands.merge RUN [OUT]`.

An adapter is added to the model it was trained on; a sharded checkpoint of an unfinished run is put together.
"""

import functools
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.commands import arguments
from harness.commands.saved import read_adapter_settings, read_prompt
from harness.commands.verify import compare_merged
from harness.folder import (
    COMPLETION_MARKER,
    PROMPT,
    RESULTS,
    RUN,
    SHARDED,
    checkpoints,
    read_json,
    write_json,
)
from harness.hub import hub_errors
from harness.messages import UserError, exit_on_user_error, print_once
from harness.signals import set_signal_handler

ROWS_AT_ONCE = 1024  # of a weight that are in memory in float32
FILE_BYTES = 4_000_000_000  # weights in a file of a model that is put together
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "lm_head", "embed_out")  # names of the first and the last layer
WRAPPER = "model."  # accelerate saves the weights of a sharded model below this name


def main(*words: str) -> int:
    """Merges the adapter, or the sharded checkpoint, in RUN into OUT, by default RUN/merged; returns the exit code."""
    parsed = arguments.merge().read(words)
    source = parsed.run
    if not source.is_dir():
        raise UserError(f"{source} is not a folder: pass the folder of a run or of a checkpoint")
    target = Path(os.path.normpath(parsed.out)) if parsed.out else source / "merged"
    write_merged(source, target, parsed.original_weights)
    if parsed.original_weights:
        print_once(
            f"Not compared, because it differs from the trained model. By how much: ./launch.sh --verify {source} {target}"
        )
        return 0
    return compare_if_possible(source, target)


def write_merged(source: Path, target: Path, uses_original: bool) -> None:
    """Merges the run or checkpoint `source` into the new folder `target`, which is complete or missing."""
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already: move it away, or name another folder: ./launch.sh --merge RUN OUT")
    prompt = read_prompt(source)
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
    set_signal_handler(lambda number, frame: sys.exit(128 + number))  # so that the draft is deleted
    try:
        merge(source, draft, uses_original)
        if prompt:
            write_json(draft / PROMPT, prompt)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    (model_class, *_) = read_json(target / "config.json").get("architectures") or ["AutoModelForCausalLM"]
    model_class = "AutoModelForCausalLM" if model_class.endswith("CausalLM") else model_class
    print_once(f"Merged into {target}. To load it: {model_class}.from_pretrained({str(target)!r})")


def compare_if_possible(source: Path, target: Path) -> int:
    """The exit code of the comparison, 0 where it is not possible: the merged model is complete."""
    import torch

    try:
        return compare_merged(source, target)
    except (UserError, torch.OutOfMemoryError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        print_once(f"Not compared with the adapter: {reason}. On another machine: ./launch.sh --verify {source} {target}")
        return 0


def merge(source: Path, target: Path, uses_original: bool) -> None:
    """Writes the model of a run or checkpoint into `target`. `uses_original`: see --original_weights."""
    if (source / "adapter_model.safetensors").is_file():
        from safetensors.torch import load_file

        with hub_errors("adapter", str(source)):
            weights = load_file(source / "adapter_model.safetensors")
        add_adapter(source, weights, target, uses_original)
        return
    if (source / "config.json").is_file() and not (source / SHARDED).is_dir():
        raise UserError(f"{source} is a plain model already")
    checkpoint = find_sharded_checkpoint(source)
    if not (checkpoint / "adapter_config.json").is_file():
        put_together(checkpoint, target)
        return
    weights = {name.removeprefix(WRAPPER): weight for name, weight in read_sharded(checkpoint, None).items()}
    if unexpected := [name for name in weights if not name.startswith("base_model.model.")]:
        raise UserError(f"{checkpoint} has the weight {unexpected[0]}, which is not one of an adapter")
    adapter = {name.replace(".default.", "."): weight for name, weight in weights.items()}
    add_adapter(checkpoint, adapter, target, uses_original)


def find_sharded_checkpoint(source: Path) -> Path:
    """The folder itself if it is a sharded checkpoint, else its newest complete one. Damaged ones are reported and skipped.

    Raises UserError if there is none, or if it is not sharded.
    """
    from harness.run.marker import find_damage
    from harness.run.sharded_files import check_sharded_files

    for path in (source, *checkpoints(source)):
        if not (path / COMPLETION_MARKER).is_file():
            continue
        if damage := find_damage(path):
            print_once(f"{path} is damaged: {damage}.")
            continue
        if (path / "adapter_model.safetensors").is_file():
            raise UserError(f"the run in {source} is not finished: merge its newest checkpoint, ./launch.sh --merge {path}")
        if not (path / SHARDED).is_dir():
            raise UserError(f"{path} is not sharded: it has the model in model.safetensors already")
        check_sharded_files(path)
        return path
    raise UserError(f"{source} has neither an adapter nor a complete checkpoint")


def read_sharded(checkpoint: Path, names: list[str] | None) -> dict[str, Any]:
    """Unsharded tensors of a sharded checkpoint by name; None reads all of them."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(checkpoint / SHARDED)
    metadata = reader.read_metadata().state_dict_metadata
    wanted = {name: metadata[name] for name in names or metadata}
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no other process takes part
        load(state, storage_reader=reader, no_dist=True)
    return state


def put_together(checkpoint: Path, target: Path) -> None:
    """Writes a plain model from a sharded checkpoint, in the dtype of the model that the run started from."""
    from harness.compat.transformers import names_on_hub
    from harness.model.quantized import save_readable
    from harness.model.weight_files import class_of_model
    from harness.rehearsal.tiny import has_vision_part
    from harness.run.saving import copy_processor

    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from tqdm import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config, run = AutoConfig.from_pretrained(checkpoint), read_json(checkpoint.parent / RUN)
    model_class = class_of_model(config)
    with torch.device("meta"):
        model = model_class.from_config(config) if model_class is AutoModelForCausalLM else model_class(config)
    weight_map, waiting = {}, {}

    def write_file() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_readable(waiting, target / file)
        weight_map.update(dict.fromkeys(waiting, file))
        waiting.clear()

    names = FileSystemReader(checkpoint / SHARDED).read_metadata().state_dict_metadata
    for name in tqdm(names, desc="Merging", unit="weight"):
        if config.tie_word_embeddings and name.endswith("lm_head.weight"):
            continue
        (tensor,) = read_sharded(checkpoint, [name]).values()
        # The names on the Hub, which other programs read too, such as one weight for each expert.
        waiting |= names_on_hub(model, {name.removeprefix(WRAPPER): tensor.to(config.dtype)})
        if sum(tensor.nbytes for tensor in waiting.values()) > FILE_BYTES:
            write_file()
    if waiting:
        write_file()
    write_json(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    config.save_pretrained(target)
    if list(checkpoint.glob("tokenizer*")):  # a trainer can have none
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(target)
    if has_vision_part(config) and run.get("model") and not run["tiny"]:
        copy_processor(run["model"], run.get("settings", {}).get("model_revision", "main"), target)


def add_adapter(folder: Path, adapter: dict[str, Any], target: Path, uses_original: bool) -> None:
    """Writes the model an adapter belongs to, with the adapter added to the weights that it was trained on."""
    from harness.compat.transformers import names_in_model
    from harness.model.quantized import read_quantization, read_source, save_readable
    from harness.model.weight_files import check_weights

    from huggingface_hub import snapshot_download
    from safetensors import safe_open
    from tqdm import tqdm
    from transformers import AutoConfig

    settings = read_adapter_settings(folder)
    if settings.task_type == "SEQ_CLS":
        raise UserError(
            f"{folder} has the adapter of a classifier, which --merge does not merge: use AutoPeftModelForSequenceClassification."
            "from_pretrained with its num_labels, then merge_and_unload()"
        )
    base = Path(settings.base_model_name_or_path)
    base = Path(read_source(base).get("model", base))  # not the quantized copy that it was trained on
    with hub_errors("model", str(base)):
        if not base.is_dir():
            patterns = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
            base = Path(snapshot_download(str(base), revision=settings.revision, allow_patterns=patterns))
    model = check_weights(str(base))
    name_in_model = names_in_model(model)
    how = read_quantization(read_json(folder / RESULTS) or read_json(folder / COMPLETION_MARKER))
    print_once(sentence_about_base(str(base), how is not None, uses_original))
    if how and model is None:
        raise UserError(f"the files of {base} are quantized, so an adapter cannot be added to them: use it with its base model")
    quantized = how.weights_in(model) if how else {}  # it changes the model, which is not used afterwards
    is_transposed = any(quantized.values())
    quantized = {} if uses_original else quantized
    unties = AutoConfig.from_pretrained(base).tie_word_embeddings and not settings.ensure_weight_tying
    unties = unties and any(part in EMBEDDINGS for name in adapter for part in name.split("."))
    if unties or is_transposed or needs_peft(adapter, settings):
        merge_in_memory(base, settings, adapter, unties, target, how, quantized)
        copy_other_files(base, folder, target)
        return
    changes = changed_weights(adapter, settings)
    files = sorted(base.glob("*.safetensors"))
    for file in tqdm(files, desc="Merging", unit="file"):
        merged = {}
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open is not a dict)
                weight, known = weights.get_tensor(name), name_in_model(name)
                dtype, change = weight.dtype, changes.pop(known, None)
                if known in quantized:
                    weight = how.as_trained(weight)
                merged[name] = (change(weight, dtype) if change else weight.to(dtype)).contiguous()
            save_readable(merged, target / file.name)
    if changes:
        raise UserError(f"{base} has no weight {next(iter(changes))}: is it the model that this adapter was trained on?")
    copy_other_files(base, folder, target, with_index=True)


def sentence_about_base(base: str, was_4bit: bool, uses_original: bool) -> str:
    """Which weights the adapter is added to."""
    if not was_4bit:
        return f"The adapter is added to the weights of {base}."
    if uses_original:
        return f"The adapter is added to the original weights of {base}, not to the 4-bit ones that it was trained on."
    return (
        f"The adapter is added to the 4-bit weights of {base} that it was trained on, unpacked (--original_weights: to the "
        "original ones)."
    )


def copy_other_files(base: Path, run: Path, target: Path, with_index: bool = False) -> None:
    """Copies configs and tokenizer of the base model that are not in `target`, and the run's tokenizer over them.

    `with_index`: the merged weights are in files of the same names as those of the base, so its index is copied too.
    """
    for file in base.iterdir():
        is_index = file.name.endswith(".index.json")
        is_wanted = file.suffix in (".json", ".jinja", ".model", ".txt") and not is_index
        if with_index and file.name == "model.safetensors.index.json":
            is_wanted = True
        if is_wanted and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
    for file in (*run.glob("*token*"), run / "chat_template.jinja"):
        if file.is_file():
            shutil.copyfile(file, target / file.name)


def needs_peft(adapter: dict[str, Any], settings: Any) -> bool:
    """Whether an adapter changes more than the weights of linear layers by a product: DoRA, biases, embeddings, fused experts.

    Also for GPT-2, whose weights are transposed (`fan_in_fan_out`), and have other names on the Hub.
    """
    is_other = any(".lora_" in name and not name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapter)
    return bool(settings.use_dora or settings.target_parameters or settings.fan_in_fan_out or is_other)


def merge_in_memory(
    base: Path, settings: Any, adapter: dict[str, Any], unties: bool, target: Path, how: Any, quantized: dict[str, bool]
) -> None:
    """Merges with PEFT, which needs the whole model in memory.

    `unties`: the adapter trained the embeddings or the output layer of a model in which both have the same weights, so that
    they are different weights now. `how`, `quantized`: the `TrainedQuantization`, and the weights that it quantized.
    """
    from harness.model.weight_files import class_of_model

    import torch
    from peft import PeftModel, set_peft_model_state_dict
    from transformers import AutoConfig

    model = class_of_model(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype="auto")
    for name, is_transposed in quantized.items():
        weight = model.get_parameter(name)
        weight.data = how.as_trained(weight.data, is_transposed).to(weight.dtype).contiguous()
    if unties:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings, model.all_tied_weights_keys = False, {}
    model = PeftModel(model, settings)
    loaded = set_peft_model_state_dict(model, adapter)
    if loaded.unexpected_keys:
        raise UserError(f"{base} has no place for {loaded.unexpected_keys[0]}: is it the model that this adapter was trained on?")
    try:
        merged = model.merge_and_unload()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(f"PEFT cannot merge this adapter: {error}: use it with its base model") from error
    merged.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(target.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read


def changed_weights(adapter: dict[str, Any], settings: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """For each weight of the base model that an adapter changes: its name, and a function to the new one, in a dtype."""
    from peft.utils.other import get_pattern_key

    changes = {}
    for name, tensor in adapter.items():
        weight_name = name.removeprefix("base_model.model.")
        if name.endswith(".lora_A.weight"):
            module = weight_name.removesuffix(".lora_A.weight")
            alpha = settings.alpha_pattern.get(get_pattern_key(settings.alpha_pattern, module), settings.lora_alpha)
            rank = tensor.shape[0]
            scaling = alpha / (rank**0.5 if settings.use_rslora else rank)
            low_rank = {"a": tensor, "b": adapter[name.replace("lora_A", "lora_B")], "scaling": scaling}
            changes[f"{module}.weight"] = functools.partial(add_low_rank, **low_rank)
        elif not name.endswith(".lora_B.weight"):  # modules_to_save: trained as a whole
            changes[weight_name] = functools.partial(use_trained, tensor)
    return changes


def use_trained(trained: Any, weight: Any, dtype: Any) -> Any:
    return trained.to(dtype)


def add_low_rank(weight: Any, dtype: Any, a: Any, b: Any, scaling: float) -> Any:
    """weight + scaling * b @ a in `dtype`, computed in float32 for some rows at a time; a (rank, in), b (out, rank)."""
    merged = weight.new_empty(weight.shape, dtype=dtype)
    for start in range(0, len(merged), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        merged[part] = (weight[part].float() + scaling * (b[part].float() @ a.float())).to(dtype)
    return merged


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(*sys.argv[1:]))
