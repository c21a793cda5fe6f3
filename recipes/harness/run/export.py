"""The end of a run is a model: loads with plain `from_pretrained`, in the dtype its original came in."""

import itertools
import shutil
from pathlib import Path

from harness.commands.quantize import SOURCE
from harness.folder import RUN, read_json, sync
from harness.launched import say

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel


def save(trainer):
    """Writes model (or adapter) and tokenizer into the run's folder; collective, only the first rank writes.

    Files come from a draft folder, each moved into place whole.
    """
    folder, draft = Path(trainer.args.output_dir), Path(trainer.args.output_dir, ".model.draft")
    model = trainer.accelerator.unwrap_model(trainer.model)
    for unit in [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]:
        unit.reshard()  # after an evaluation some weights may still be gathered, rounded to the compute dtype
    state = _weights(model, trainer)
    if trainer.is_world_process_zero():
        shutil.rmtree(draft, ignore_errors=True)
        if not isinstance(model, PreTrainedModel):
            # An adapter belongs to the model that was quantized, not to the quantized copy on this machine.
            settings = model.peft_config["default"]
            source = read_json(Path(settings.base_model_name_or_path, SOURCE))
            settings.base_model_name_or_path = source.get("model", settings.base_model_name_or_path)
        model.save_pretrained(draft, state_dict=state)
        if isinstance(model, PreTrainedModel):
            # In memory the weights are float32 and the cache is off; neither is for those who use the model.
            original = _original(trainer)
            model.config.dtype, model.config.use_cache = original.dtype, getattr(original, "use_cache", True)
            model.config.save_pretrained(draft)
        trainer.processing_class.save_pretrained(draft)
        (draft / "README.md").write_text(_card(read_json(folder / RUN), isinstance(model, PreTrainedModel)), "utf-8")
        for file in draft.iterdir():
            shutil.copymode(folder / RUN, file)  # safetensors makes files that only their owner reads
            sync(file)
            file.replace(folder / file.name)
        draft.rmdir()
    trainer.accelerator.wait_for_everyone()


def _original(trainer):
    """The config of the model the run began with."""
    args = trainer.args
    kwargs = {"revision": (getattr(args, "model_init_kwargs", None) or {}).get("revision", "main")}
    name = trainer.accelerator.unwrap_model(trainer.model).config.name_or_path
    return AutoConfig.from_pretrained(name, trust_remote_code=getattr(args, "trust_remote_code", False), **kwargs)


def _weights(model, trainer) -> dict[str, torch.Tensor]:
    """All weights on the first rank, on CPU; of an adapter only what was trained, so that the base is never gathered."""
    if not isinstance(model, PreTrainedModel):
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        return {name: (w.full_tensor() if isinstance(w, DTensor) else w).detach().cpu() for name, w in trained.items()}
    dtype = _original(trainer).dtype or torch.float32
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in state.items() if name not in tied
    }


def _card(run: dict, is_whole: bool) -> str:
    """A model card with what the hub reads: base model, data, library."""
    kind = "A fine-tune" if is_whole else "An adapter"
    rehearsal = "\n\nThis is a rehearsal on tiny stand-ins: the model knows nothing." if run["tiny"] else ""
    known = {"base_model": run["model"], "datasets": run["dataset"]} if not run["tiny"] else {}
    base = "".join(f"{key}: [{name}]\n" for key, name in known.items() if not Path(name).exists())  # ids of the hub only
    return (
        f"---\n{base}library_name: {'transformers' if is_whole else 'peft'}\npipeline_tag: text-generation\n---\n\n"
        f"{kind} of {run['model']} on {run['dataset']} with the recipe `{run['recipe']}` "
        f"({run['config'] or 'no config'}). Numbers are in train_results.json.{rehearsal}\n"
    )


def sample(trainer, is_rehearsal: bool, prompts: int = 3):
    """Lets the model continue a few held-out texts (or answer held-out prompts), on the screen and in samples.txt.

    All at once: where weights are gathered for every token, each token costs the same for one text and for three.
    """
    rows = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
    rows = next(iter(rows.values())) if isinstance(rows, dict) else rows
    prompts = [_prompt(row) for row in itertools.islice(rows, prompts)]
    model, tokenizer, width = trainer.model, trainer.processing_class, max(map(len, prompts))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor, which reads pictures too
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=trainer.accelerator.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
    model.eval()
    torch.manual_seed(0)  # on every rank, so that sharded ranks write the same tokens
    with torch.no_grad(), trainer.autocast_smart_context_manager():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=24 if is_rehearsal else 48,
            do_sample=True,
            top_p=0.9,
            pad_token_id=pad,
            use_cache=True,
            synced_gpus=trainer.accelerator.num_processes > 1,  # a process that has met the end goes on for the others
        )
    answers = [_answer(answer.tolist(), model, tokenizer) for answer in out[:, width:]]
    shown = [f"> {tokenizer.decode(prompt)}\n{answer}\n" for prompt, answer in zip(prompts, answers, strict=True)]
    expectation = "; random weights make little sense" if is_rehearsal else ""
    say(f"\nWhat the model writes after a few held-out beginnings (samples.txt{expectation}):\n\n" + "\n".join(shown))
    if trainer.is_world_process_zero():
        Path(trainer.args.output_dir, "samples.txt").write_text("\n".join(shown), "utf-8")


def _answer(ids: list[int], model, tokenizer) -> str:
    """What the model wrote up to the token it ended with, or as far as it was let."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    return f"{tokenizer.decode(ids)} …" if end is None else tokenizer.decode(ids[: end + 1])


def _prompt(row: dict, tokens: int = 24) -> list[int]:
    """The part of a tokenized row that is not trained on; the first tokens where all is trained on."""
    ids = row["input_ids"][: row["seq_lengths"][0]] if "seq_lengths" in row else row["input_ids"]
    labels = list(row.get("labels", ids))[: len(ids)]
    masked = next((i for i, label in enumerate(labels) if label != -100), 0)
    return list(ids[: masked if masked > 1 else tokens])
