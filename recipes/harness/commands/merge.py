"""From a run to a plain model. launch.sh calls it:

`python -m harness.commands.merge RUN [OUT]`.

A LoRA adapter is added to the model it was trained on, with one file of it in memory at a time if possible; a sharded checkpoint
of an unfinished run is put together.
"""

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from harness.commands import parsers
from harness.commands.saved import read_adapter_settings, read_prompt
from harness.folder import (
    COMPLETION_MARKER,
    PROMPT,
    RESULTS,
    SHARDED,
    checkpoints,
    read_json,
    write_json,
)
from harness.hub import hub_errors
from harness.launched import set_signal_handler
from harness.messages import UserError, exit_on_user_error, one_message, print_once

EMBEDDINGS = {"embed_tokens", "wte", "embed_in", "lm_head", "embed_out"}  # names of the first and the last layer
ADAPTER = "adapter_model.safetensors"
WRAPPER = "model."  # accelerate saves the weights of a sharded model below this name
# The settings of a `LoraConfig` with which the merged model computes what the adapter does. All others must have their defaults.
MERGED = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("eva_config", "megatron_core", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
}
# And values of others: the other `init_lora_weights` change the weights of the base model, whose config.json names the model of
# these tasks.
VALUES = {
    "init_lora_weights": (False, "gaussian", "orthogonal", "eva"),
    "task_type": ("CAUSAL_LM", "SEQ_2_SEQ_LM"),
}


@one_message()
def main(*words: str) -> None:
    """Merges the adapter, or the sharded checkpoint, in RUN into OUT, by default RUN/merged."""
    parsed = parsers.merge().read(words)
    source = find_source(parsed.run)
    target = Path(os.path.normpath(parsed.out)) if parsed.out else parsed.run / "merged"
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already: move it away, or name another folder: ./launch.sh --merge RUN OUT")
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    set_signal_handler(lambda number, frame: sys.exit(128 + number))  # so that the draft is deleted
    warnings.filterwarnings("ignore")  # torch's that no other process takes part, and PEFT's
    try:
        merge(source, draft, parsed.original_weights)
        if prompt := read_prompt(source):
            write_json(draft / PROMPT, prompt)
        for file in draft.rglob("*"):
            if file.is_file():
                file.chmod(draft.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    print_once(f"{source} is merged into {target}.")


def find_source(run: Path) -> Path:
    """The folder itself if it has an adapter or a sharded model, else its newest complete checkpoint."""
    from harness.model.models import weight_files
    from harness.run.marker import find_damage

    if (run / ADAPTER).is_file():
        return run
    for path in (run, *checkpoints(run)):
        is_complete = (path / COMPLETION_MARKER).is_file() and ((path / SHARDED).is_dir() or (path / ADAPTER).is_file())
        if is_complete and not weight_files(run):  # a checkpoint can be older than the model in the folder
            if damage := find_damage(path):
                raise UserError(f"{path} is damaged: {damage}: pass another checkpoint")
            return path
    raise UserError(f"{run}: nothing to merge: it has no adapter and no sharded checkpoint, or a complete model")


def merge(source: Path, target: Path, uses_original: bool) -> None:
    """Writes the model of an adapter or of a sharded checkpoint into `target`. `uses_original`: see --original_weights."""
    from harness.run.sharded_files import check_sharded_files

    from safetensors.torch import load_file

    if (source / ADAPTER).is_file():
        with hub_errors("adapter", str(source)):
            add_adapter(source, load_file(source / ADAPTER), target, uses_original)
        return
    check_sharded_files(source)
    if not (source / "adapter_config.json").is_file():
        put_together(source, target)
        return
    weights = read_sharded(source)
    adapter = {name.removeprefix(WRAPPER).replace(".default.", "."): weight for name, weight in weights.items()}
    add_adapter(source, adapter, target, uses_original)


def read_sharded(checkpoint: Path, dtype: Any = None) -> dict[str, Any]:
    """The unsharded tensors of a sharded checkpoint by name, in `dtype`, by default as they are."""
    from harness.rounding import round_to

    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from tqdm import tqdm

    reader = FileSystemReader(checkpoint / SHARDED)
    weights = {}
    for name, entry in tqdm(reader.read_metadata().state_dict_metadata.items(), desc="Reading", unit="weight"):
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        load(state, storage_reader=reader, no_dist=True)
        weights[name] = round_to(dtype or state[name].dtype, state[name])
    return weights


def put_together(checkpoint: Path, target: Path) -> None:
    """Writes a plain model from a sharded checkpoint, in the dtype of the model that the run started from."""
    from harness.model.attention import class_of_model

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint)
    weights = {
        name.removeprefix(WRAPPER): weight
        for name, weight in read_sharded(checkpoint, config.dtype).items()
        if not (config.tie_word_embeddings and name.endswith("lm_head.weight"))
    }
    model_class = class_of_model(config)
    with torch.device("meta"):
        model = model_class.from_config(config) if model_class is AutoModelForCausalLM else model_class(config)
    model.save_pretrained(target, state_dict=weights)
    AutoConfig.from_pretrained(checkpoint).save_pretrained(target)  # a model without a dtype has changed its own
    if list(checkpoint.glob("tokenizer*")):  # a trainer can have none
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(target)


def add_adapter(folder: Path, adapter: dict[str, Any], target: Path, uses_original: bool) -> None:
    """Writes the model an adapter belongs to, with the adapter added to the weights that it was trained on."""
    from harness.compat.transformers import names_in_model
    from harness.model.models import FILES_OF_MODEL, INDEX, check_weights, weight_files
    from harness.model.quantized import read_quantization, read_source
    from harness.rounding import round_to

    from huggingface_hub import snapshot_download
    from safetensors import safe_open
    from safetensors.torch import save_file
    from tqdm import tqdm

    settings = read_adapter_settings(folder)
    check_can_be_merged(settings, folder)
    base = Path(settings.base_model_name_or_path)
    base = Path(read_source(base).get("model", base))  # not the quantized copy that it was trained on
    if not base.is_dir():
        with hub_errors("model", str(base)):
            base = Path(snapshot_download(str(base), revision=settings.revision, **FILES_OF_MODEL))
    model = check_weights(str(base))
    if model is None:
        raise UserError(f"the files of {base} are quantized, so an adapter cannot be added to them: use it with its base model")
    is_tied = model.config.tie_word_embeddings
    name_in_model = names_in_model(model)
    how = read_quantization(read_json(folder / RESULTS) or read_json(folder / COMPLETION_MARKER))
    quantized = how.weights_in(model) if how else {}  # it changes the model, which is not used afterwards
    parts = {part for name in adapter for part in name.split(".")}
    unties = is_tied and bool(EMBEDDINGS & parts)
    # What changes more than the weights of linear layers by a product: DoRA, embeddings, fused experts. Also GPT-2, whose weights
    # are transposed and have other names on the Hub.
    is_other = any(part.startswith("lora_") for part in parts - {"lora_A", "lora_B"}) or any(quantized.values())
    quantized = {} if uses_original else quantized
    if unties or is_other or settings.target_parameters or settings.fan_in_fan_out or settings.alpha_pattern:
        merge_in_memory(base, settings, adapter, unties, how, quantized).save_pretrained(target)
    else:
        changes = changed_weights(adapter, settings)
        files = weight_files(base)
        for file in tqdm(files, desc="Merging", unit="file"):
            merged = {}
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (safe_open is not a dict)
                    weight = weights.get_tensor(name)
                    known = name_in_model(name)
                    trained = how.as_trained(weight) if known in quantized else weight
                    changed = changes.pop(known, trained)
                    if isinstance(changed, tuple):
                        b, a, scaling = changed
                        changed = trained.float() + scaling * (b.float() @ a.float())
                    merged[name] = round_to(weight.dtype, changed).contiguous()
            save_file(merged, target / file.name, {"format": "pt"})
        if changes:
            raise UserError(f"{base} has no weight {next(iter(changes))}: is it the model that this adapter was trained on?")
        if len(files) > 1:
            shutil.copyfile(base / INDEX, target / INDEX)
    copy_other_files(base, folder, target)


def check_can_be_merged(settings: Any, folder: Path) -> None:
    """Raises UserError for an adapter that is more than a product that is added to the weights of its base model.

    The merged model would compute something else, without an error.
    """
    from peft import LoraConfig

    problems = []
    for name, default in vars(LoraConfig()).items():
        value = getattr(settings, name, None)
        if name not in MERGED and value != default and value not in VALUES.get(name, ()):
            problems.append(f"{name} {value}")
    if problems:
        raise UserError(
            f"{folder} has an adapter with {', '.join(problems)}, and --merge is for LoRA, rsLoRA and DoRA: merge it in the "
            "recipe, after train(trainer): trainer.model.merge_and_unload().save_pretrained(OUT)"
        )


def copy_other_files(base: Path, run: Path, target: Path) -> None:
    """Copies what else a model needs: the run's tokenizer and processor, the base model's other files that `target` lacks."""
    from transformers.utils import CHAT_TEMPLATE_DIR  # has the named templates other than the default

    processor = run / "processor_config.json"
    for file in base.iterdir():
        is_wanted = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json")
        # The run's processor_config.json also has what older versions saved in preprocessor_config.json.
        is_replaced = processor.is_file() and file.name.endswith("processor_config.json")
        if is_wanted and not is_replaced and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
    for pattern in ("*token*", "chat_template.jinja", processor.name):
        for file in run.glob(pattern):
            shutil.copyfile(file, target / file.name)
    templates = (run if (run / "tokenizer_config.json").is_file() else base) / CHAT_TEMPLATE_DIR
    if templates.is_dir():
        shutil.copytree(templates, target / CHAT_TEMPLATE_DIR)


def merge_in_memory(
    base: Path, settings: Any, adapter: dict[str, Any], unties: bool, how: Any, quantized: dict[str, bool]
) -> Any:
    """The model that PEFT has merged, layer by layer in float32; all of it is in memory.

    `unties`: the adapter trained the embeddings or the output layer of a model in which both have the same weights, so that
    they are different weights now. `how`, `quantized`: the `TrainedQuantization`, and the weights that it quantized.
    """
    from harness.model.attention import class_of_model
    from harness.rounding import round_to

    import torch
    from peft import PeftModel, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import AutoConfig

    model = class_of_model(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype="auto")
    for name, is_transposed in quantized.items():
        weight = model.get_parameter(name)
        weight.data = how.as_trained(weight.data, is_transposed).to(weight.dtype).contiguous()
    if unties:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
    model = PeftModel(model, settings)
    if unknown := set_peft_model_state_dict(model, adapter).unexpected_keys:
        raise UserError(f"{base} has no place for {unknown[0]}: is it the model that this adapter was trained on?")
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            dtypes = {weight: weight.dtype for weight in layer.get_base_layer().parameters()}
            for weight in dtypes:
                weight.data = weight.data.float()
            layer.merge()
            for weight, dtype in dtypes.items():
                weight.data = round_to(dtype, weight.data)
    return model.merge_and_unload()


def changed_weights(adapter: dict[str, Any], settings: Any) -> dict[str, Any]:
    """For each weight of the base model that an adapter changes: (B, A, scaling), or the weight that was trained instead."""
    changes = {}
    for name, tensor in adapter.items():
        weight_name = name.removeprefix("base_model.model.")
        if name.endswith(".lora_A.weight"):
            rank = tensor.shape[0]
            scaling = settings.lora_alpha / (rank**0.5 if settings.use_rslora else rank)
            changes[weight_name.replace(".lora_A.", ".")] = (adapter[name.replace(".lora_A.", ".lora_B.")], tensor, scaling)
        elif not name.endswith(".lora_B.weight"):  # modules_to_save: trained as a whole
            changes[weight_name] = tensor
    return changes


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
