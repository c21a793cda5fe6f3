"""The model that a run saves: in the dtype and with the settings of the original, with a tokenizer; and its model card."""

import contextlib
import copy
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.folder import RUN, remove_link, sync
from harness.messages import last_line, print_once
from harness.model.models import dtype_of_files
from harness.model.quantized import read_source
from harness.rehearsal.tiny import has_vision_part
from harness.rounding import round_to
from harness.run.checkpoints import is_of_another_library
from harness.run.sharding import adapters_of, config_of

import torch
from huggingface_hub import HfApi, save_torch_state_dict
from huggingface_hub.utils import httpx
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedConfig, Trainer, TrainingArguments
from transformers.utils import cached_file

PROCESSOR = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
# Of the output directory: no checkpoints, and nothing of the rows (held_out.parquet, samples.txt, their system message in
# prompt.json).
FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json", "README.md", "train_results.json", "loss.png"),
)


def set_base_revision(trainer: Trainer) -> None:
    """Records, in the settings of an adapter, the revision of the model that it was trained on. PEFT does not know it."""
    for settings in adapters_of(trainer.model):
        if not settings.base_model_name_or_path:  # the recipe has made the model itself
            continue
        source = read_source(settings.base_model_name_or_path)
        settings.revision = source.get("revision") or revision_of(trainer.args) or settings.revision


def revision_of(args: TrainingArguments) -> str | None:
    """The revision of the model that the trainer has loaded by its name."""
    return (getattr(args, "model_init_kwargs", None) or {}).get("revision")


def load_original_config(trainer: Trainer) -> PreTrainedConfig | None:
    """The config of the model that the run starts from.

    A recipe can make a model itself: its config is that of the model, None for a module that is none of transformers.
    """
    config = config_of(trainer.accelerator.unwrap_model(trainer.model))
    revision = revision_of(trainer.args) or "main"
    if config is not None and config.name_or_path:
        with contextlib.suppress(OSError, httpx.HTTPError):
            original = AutoConfig.from_pretrained(config.name_or_path, revision=revision)
            original.dtype = original.dtype or dtype_of_files(config.name_or_path, revision)
            return original
    return copy.deepcopy(config)


def restore_config(model: torch.nn.Module, original: PreTrainedConfig) -> None:
    """Gives a trained model the settings of the original that were changed for the training.

    The cache was off. SFTTrainer makes the routers of a mixture of experts return their logits, with which transformers 5.23
    fails to generate from a padded batch.
    """
    model.config.use_cache = getattr(original, "use_cache", True)
    for name in original.sub_configs:  # of a model that reads images too
        part = getattr(model.config, name, None)
        part_before = getattr(original, name, None)
        if part is not None and part_before is not None:
            part.dtype = part_before.dtype or original.dtype
    before = original.get_text_config()
    if hasattr(before, "output_router_logits"):
        model.config.get_text_config().output_router_logits = before.output_router_logits


def save_model(trainer: Trainer, original: PreTrainedConfig | None) -> None:
    """Writes the model (or adapter) and the tokenizer, in the dtype of the original. Collective; the first process writes.

    `original`: None for a module that is none of transformers; its weights are written as they are.

    The files are written into a draft folder and moved from there, so that each is complete or missing.
    """
    output_dir = Path(trainer.args.output_dir)
    draft = Path(trainer.args.output_dir, ".model.draft")
    model = trainer.accelerator.unwrap_model(trainer.model)
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation, weights can still be unsharded and rounded to the compute dtype
    state = full_state_dict(model, None if original is None else original.dtype or torch.float32)
    if original is not None:
        restore_config(model, original)
    if trainer.is_world_process_zero():
        remove_link(draft)
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(model, PeftModel):
            # The adapter belongs to the model that was quantized, not to the quantized copy on this machine.
            settings = model.peft_config[model.active_adapters[0]]
            source = read_source(settings.base_model_name_or_path)
            settings.base_model_name_or_path = source.get("model", settings.base_model_name_or_path)
            model.save_pretrained(draft, state_dict=state)
        elif original is not None:
            model.save_pretrained(draft, state_dict=state)
            model.config.dtype = original.dtype  # in training the weights are float32
            model.config.save_pretrained(draft)
            # A trainer on texts has loaded only the tokenizer. Files that are missing, or cannot be downloaded now, are left out.
            for file in PROCESSOR if has_vision_part(original) else ():
                with contextlib.suppress(OSError, httpx.HTTPError):
                    shutil.copyfile(cached_file(original.name_or_path, file, revision=revision_of(trainer.args)), draft / file)
        elif is_of_another_library(model):
            model.save_pretrained(str(draft))
        else:
            draft.mkdir()
            save_torch_state_dict(state, draft)
        if trainer.processing_class:
            trainer.processing_class.save_pretrained(draft)
        if problem := trainer.parts.checkpoints.weights.problem(draft):
            raise RuntimeError(f"the saved model does not have the weights that were trained: {problem}")
        move_files(draft, output_dir)
    trainer.accelerator.wait_for_everyone()


def move_files(draft: Path, output_dir: Path) -> None:
    """Moves the files below `draft` to the same places below `output_dir`, and removes `draft`."""
    for path in sorted(draft.rglob("*")):  # a folder comes before its files
        target = output_dir / path.relative_to(draft)
        if path.is_dir():  # of a tokenizer with several chat templates
            remove_link(target)
            target.mkdir(exist_ok=True)
            continue
        shutil.copymode(output_dir / RUN, path)  # safetensors makes files that only their owner can read
        sync(path)
        path.replace(target)
    shutil.rmtree(draft)


def full_state_dict(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """All weights in `dtype` on the CPU of the first process; of an adapter only the trained ones: the base is not gathered.

    `dtype`: None for the dtypes that the weights have.
    """
    weights = {}
    if isinstance(model, PeftModel):
        for name, weight in model.named_parameters():
            if weight.requires_grad or model.active_adapters[0] in name.split("."):  # also what a recipe has frozen of it
                unsharded = weight.full_tensor() if isinstance(weight, DTensor) else weight
                weights[name] = unsharded.detach().cpu()
        return weights
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, weight in state.items():
        if name not in tied:
            weights[name] = round_to(dtype, weight) if dtype else weight
    return weights


def write_model_card(trainer: Trainer) -> None:
    """Writes the model card of TRL or transformers. The first process writes."""
    if trainer.is_world_process_zero() and config_of(trainer.accelerator.unwrap_model(trainer.model)) is not None:
        output_dir = Path(trainer.args.output_dir)
        remove_link(output_dir / "README.md")
        trainer.hub_model_id = trainer.args.hub_model_id or output_dir.name
        trainer.create_model_card(model_name=output_dir.name)


@dataclass(frozen=True)
class Repository:
    """A model repository of the Hub."""

    name: str  # OWNER/NAME, or NAME of the user whose token is used
    is_private: bool


def publish(folder: Path, repository: Repository) -> None:
    """Uploads the model in `folder`. If that fails, prints why and how to repeat it."""
    api = HfApi()
    try:
        name = api.create_repo(repository.name, private=repository.is_private, exist_ok=True).repo_id
        commit = api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=list(FILES), ignore_patterns="*/*")
        print_once(f"Uploaded to {commit.repo_url.url}")
    except Exception as error:  # the run is finished, whatever happens here
        print_once(
            f"warning: the upload to {repository.name} failed: {last_line(error)}\nTo repeat it: .venv/bin/hf upload "
            f"{repository.name} {shlex.quote(str(folder))} --exclude 'checkpoint-*' --exclude '*.parquet' --exclude samples.txt "
            "--exclude prompt.json"
        )
