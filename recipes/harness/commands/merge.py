"""From a run to a deployable model, one shard in memory at a time. Called by `launch.sh --merge RUN [OUT]`.

An adapter is added to the model it was trained on; a sharded checkpoint of an unfinished run is put together.
"""

import shutil
import sys
import warnings
from pathlib import Path

from harness import marks
from harness.commands.quantize import SOURCE
from harness.commands.shards import Shards, save
from harness.folder import MARK, checkpoints, read_json
from harness.launched import fail, say


def main(run: str, out: str = ""):
    source = Path(run)
    if not source.is_dir():
        fail(f"{run} is not a folder: give the folder of a run or of a checkpoint")
    target = Path(out) if out else source / "merged"
    if target.exists():
        fail(f"{target} exists already: move it away, or name another folder: ./launch.sh --merge RUN OUT")
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        fail(f"{target} cannot be written ({error.strerror})")
    try:
        _merge(source, draft)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    say(f"{target} is a plain model: AutoModelForCausalLM.from_pretrained({str(target)!r})")


def _merge(source: Path, draft: Path):
    if (source / "adapter_model.safetensors").is_file():
        from safetensors.torch import load_file

        return _add_adapter(source, load_file(source / "adapter_model.safetensors"), draft)
    if (source / "config.json").is_file():
        fail(f"{source} is a plain model already")
    checkpoint = _checkpoint(source)
    if (checkpoint / "adapter_config.json").is_file():
        prefix = "model.base_model.model."
        weights = {name.removeprefix("model."): tensor for name, tensor in _read(checkpoint, None).items()}
        assert all(f"model.{name}".startswith(prefix) for name in weights)
        return _add_adapter(checkpoint, {name.replace(".default.", "."): w for name, w in weights.items()}, draft)
    return _put_together(checkpoint, draft)


def _checkpoint(source: Path) -> Path:
    """The folder itself when it is a sharded checkpoint, else its newest whole one."""
    for path in (path for path in (source, *checkpoints(source)) if (path / MARK).is_file()):
        if not (fault := marks.fault(path)):
            break
        say(f"{path} is damaged: {fault}.")
    else:
        fail(f"{source} holds neither an adapter nor a whole checkpoint")
    if not (path / "pytorch_model_fsdp_0").is_dir():
        fail(f"{path} is not sharded: it holds the model in model.safetensors already")
    return path


def _read(checkpoint: Path, names: list[str] | None) -> dict:
    """Tensors of a sharded checkpoint by name, whole; all of them for None."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(checkpoint / "pytorch_model_fsdp_0")
    metadata = reader.read_metadata().state_dict_metadata
    wanted = {name: metadata[name] for name in names or metadata}
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that no other process takes part
        load(state, storage_reader=reader, no_dist=True)
    return state


def _put_together(checkpoint: Path, draft: Path):
    """A plain model from a sharded checkpoint, in the dtype of the model the run began with."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from tqdm import tqdm
    from transformers import AutoConfig, AutoTokenizer

    base = read_json(checkpoint / MARK)["model"]
    config = AutoConfig.from_pretrained(base)
    names = FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    files = Shards(draft, size=4_000_000_000)
    for name in tqdm(names, desc="Merging", unit="weight"):
        if not (config.tie_word_embeddings and name.endswith("lm_head.weight")):
            (tensor,) = _read(checkpoint, [name]).values()
            files.add({name.removeprefix("model."): tensor.to(config.dtype or torch.float32)})
    files.close()
    config.save_pretrained(draft)
    AutoTokenizer.from_pretrained(base).save_pretrained(draft)


def _add_adapter(folder: Path, adapter: dict, draft: Path):
    """The model an adapter belongs to, with the adapter added to its weights."""
    from huggingface_hub import snapshot_download
    from peft import PeftConfig
    from safetensors import safe_open
    from tqdm import tqdm

    settings = PeftConfig.from_pretrained(folder)
    base = Path(settings.base_model_name_or_path)
    base = Path(read_json(base / SOURCE).get("model", base))  # not the quantized copy it was trained on
    if not base.is_dir():
        files = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
        base = Path(snapshot_download(str(base), revision=settings.revision, allow_patterns=files))
    changes = _changes(adapter, settings)
    shards = sorted(base.glob("*.safetensors"))
    if not shards:
        fail(f"{base} holds no safetensors")
    for shard in tqdm(shards, desc="Merging", unit="file"):
        merged = {}
        with safe_open(shard, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open is no dict)
                merged[name] = changes.pop(name, lambda weight: weight)(weights.get_tensor(name))
            save(merged, draft / shard.name)
    if changes:
        fail(f"{base} has no weight {next(iter(changes))}: is it the model this adapter was trained on?")
    for file in base.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt"):
            shutil.copyfile(file, draft / file.name)
    for file in folder.glob("*token*"):  # the run's own tokenizer and template win
        shutil.copyfile(file, draft / file.name)
    if (folder / "chat_template.jinja").is_file():
        shutil.copyfile(folder / "chat_template.jinja", draft / "chat_template.jinja")


def _changes(adapter: dict, settings) -> dict:
    """What happens to each changed weight of the base model: its name to a function of the weight."""
    from peft.utils.other import get_pattern_key

    if settings.use_dora or any("lora_magnitude" in name for name in adapter):
        fail("a DoRA adapter cannot be merged shard by shard: load it with PEFT and call merge_and_unload()")
    changes = {}
    for name, tensor in adapter.items():
        module = name.removeprefix("base_model.model.")
        if name.endswith(".lora_A.weight"):
            module = module.removesuffix(".lora_A.weight")
            alpha = settings.alpha_pattern.get(get_pattern_key(settings.alpha_pattern, module), settings.lora_alpha)
            rank = tensor.shape[0]
            scaling = alpha / (rank**0.5 if settings.use_rslora else rank)
            second = adapter[name.replace("lora_A", "lora_B")]
            changes[f"{module}.weight"] = lambda weight, a=tensor, b=second, scaling=scaling: _added(weight, a, b, scaling)
        elif ".lora_B." not in name:  # trained whole: modules_to_save
            changes[module] = lambda weight, whole=tensor: whole.to(weight.dtype)
    return changes


def _added(weight, a, b, scaling: float, rows: int = 1024):
    """weight + scaling * b @ a, computed in float32 a few rows at a time; weight (out, in), a (rank, in), b (out, rank).

    GPT-2 keeps its weights the other way round, (in, out).
    """
    turned = tuple(weight.shape) != (b.shape[0], a.shape[1])
    merged = weight.T.clone() if turned else weight.clone()
    for start in range(0, len(merged), rows):
        part = slice(start, start + rows)
        merged[part] = (merged[part].float() + scaling * (b[part].float() @ a.float())).to(weight.dtype)
    return merged.T.contiguous() if turned else merged


if __name__ == "__main__":
    main(*sys.argv[1:])
