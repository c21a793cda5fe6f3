"""What may differ between two starts of a run: its settings, as run.json has them.

run.json names every argument whose value is not the default of transformers or TRL, wherever the value came from, and what these
defaults are.
"""

from dataclasses import dataclass
from typing import Any

# Another value would give what the run has learned another meaning, or another loss, or could not be loaded.
MUST_BE_EQUAL = (
    # the model and the adapter
    "model_revision",
    "dtype",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "use_bnb_nested_quant",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
    "chat_template_path",
    "eos_token",
    # the states of the optimizer and of the gradient scaler
    "optim",
    "optim_args",
    "optim_target_modules",
    "fp16",
    # which tokens count in the loss, and how
    "assistant_only_loss",
    "completion_only_loss",
    "loss_type",
    "label_smoothing_factor",
)
# These schedulers save another state than all others, which compute the learning rate from the step alone.
SCHEDULERS_WITH_STATE = ("reduce_lr_on_plateau", "greedy")
# A checkpoint of the optimizer has them, and they are loaded with it.
KEPT = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# `run/checkpoints.py` prints what they change about the rows.
ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "max_length", "packing", "seed")
# How far to train: a finished run is continued with more.
LENGTHS = ("max_steps", "max_tokens", "num_train_epochs")
DOES_NOT_MATTER = (
    # other keys of run.json say what they choose
    "model_name_or_path",
    "use_peft",
    "load_in_4bit",
    "dataset_name",
    "dataset_config",
    "dataset_weights",
    "dataset_train_split",
    "dataset_streaming",
    "max_samples",
    "max_eval_samples",
    "column_map",
    "chat_template_kwargs",
    "text_rows",
    "split_conversations",
    # when and where to log, evaluate and save
    "output_dir",
    "run_name",
    "project",
    "report_to",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
    "profile",
    "disable_tqdm",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "logging_first_step",
    "logging_nan_inf_filter",
    "logging_steps",
    "logging_strategy",
    "eval_accumulation_steps",
    "eval_delay",
    "eval_on_start",
    "eval_steps",
    "eval_strategy",
    "per_device_eval_batch_size",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "include_num_input_tokens_seen",
    # how to compute the same
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "activation_offloading",
    "attn_implementation",
    "bnb_4bit_quant_storage",
    "dataloader_num_workers",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataset_num_proc",
    "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters",
    "ddp_timeout",
    "debug",
    "skip_memory_metrics",
    "tf32",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "torch_empty_cache_steps",
    "use_cpu",
    "use_liger_kernel",
)

Changes = dict[str, tuple[Any, Any]]  # the values before and now, by the names of the settings


@dataclass(frozen=True)
class Default:
    """The value of a setting that is not in run.json. `words`: what that is; "" in the run.json of an earlier version."""

    words: str


def changed_settings(existing: dict, identity: dict) -> Changes:
    """Which settings that matter differ between two run.json; {} if one is of an earlier version, which has no settings."""
    before, now = existing.get("settings"), identity.get("settings")
    if not isinstance(before, dict) or not isinstance(now, dict):
        return {}
    names = [name for name in {**before, **now} if name not in DOES_NOT_MATTER]
    changed = [name for name in names if _sorted(before.get(name)) != _sorted(now.get(name))]
    recorded = [run.get("defaults") for run in (existing, identity)]
    values = {name: value for defaults in recorded if isinstance(defaults, dict) for name, value in defaults.items()}
    defaults = {name: Default(in_words(values[name]) if name in values else "") for name in changed}
    return {name: (before.get(name, defaults[name]), now.get(name, defaults[name])) for name in changed}


def must_be_equal(changes: Changes) -> Changes:
    """Those with which a run cannot continue."""
    found = {name: values for name, values in changes.items() if name in MUST_BE_EQUAL}
    if set(SCHEDULERS_WITH_STATE) & set(changes.get("lr_scheduler_type", ())):
        found["lr_scheduler_type"] = changes["lr_scheduler_type"]
    return found


def keep_settings(existing: dict, identity: dict) -> list[str]:
    """Makes `identity` say what a run that continues from a checkpoint will use; returns a message for each other setting."""
    messages = []
    for name, (before, now) in changed_settings(existing, identity).items():
        if name in ROWS:
            continue
        if name not in KEPT:
            messages.append(f"--{name}: {in_words(before)} until now, {in_words(now)} from here on.")
            continue
        messages.append(
            f"warning: the run began with --{name} {in_words(before)} and continues with it: {in_words(now)} has no effect; pass "
            "another --output_dir to train with it from the start"
        )
        identity["settings"].pop(name, None)
        if not isinstance(before, Default):
            identity["settings"][name] = before
            if name in existing.get("defaults", {}):
                identity["defaults"][name] = existing["defaults"][name]
    return messages


def before_and_now(changes: Changes) -> tuple[str, str]:
    """Names and values for a message."""
    return tuple(", ".join(f"{name} {in_words(values[n])}" for name, values in changes.items()) for n in (0, 1))


def in_words(value: Any) -> str:
    """A setting as a flag has it."""
    if isinstance(value, Default):
        return f"the default ({value.words})" if value.words else "the default"
    if value is None:
        return "not set"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _sorted(value: Any) -> Any:
    """The order of names, such as those of modules, does not matter."""
    return sorted(value, key=str) if isinstance(value, list) else value
