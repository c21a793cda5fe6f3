"""Which settings may differ between two starts of a run.

run.json names every argument whose value is not the default of transformers or TRL, wherever the value came from.
"""

from typing import Any

# The arguments that decide which rows a run trains on, and which it evaluates on.
CHOICE_OF_ROWS = (
    "max_samples",
    "max_eval_samples",
    "dataset_streaming",
    "column_map",
    "chat_template_kwargs",
    "split_conversations",
    "text_rows",
    "dataset_config",
    "dataset_train_split",
)
# Another value would give what the run has learned another meaning, or another loss, or could not be loaded.
MUST_BE_EQUAL = (
    "recipe",
    "tiny",
    "sharded",
    "model",
    "datasets",
    "dataset_weights",
    *CHOICE_OF_ROWS,
    # the model and the adapter
    "use_peft",
    "model_revision",
    "dtype",
    "load_in_4bit",
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
    "teacher_model_name_or_path",
    "teacher_model_revision",
    # how many prompts a step has, and how many tokens an image
    "num_generations",
    "max_pixels",
)
# These schedulers save another state than all others, which compute the learning rate from the step alone.
SCHEDULERS_WITH_STATE = {"reduce_lr_on_plateau", "greedy"}
# A checkpoint of the optimizer has them, and they are loaded with it.
KEPT = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# They change the losses from here on.
OF_LOSS = (
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "max_grad_norm",
    "bf16",
    "beta",
    "lora_dropout",
    "neftune_noise_alpha",
    "router_aux_loss_coef",
    "temperature",
    "max_completion_length",
    "reward_weights",
    "scale_rewards",
    "teacher_model_init_kwargs",
)
# `run/checkpoints.py` prints what they change about the rows.
OF_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "max_length", "packing", "seed")
ALL_SETTINGS = (*MUST_BE_EQUAL, *KEPT, *OF_LOSS, *OF_ROWS)

Changes = dict[str, tuple[Any, Any]]  # the values before and now, by the names of the settings; None: the default


def changed_settings(before: dict, now: dict, names: tuple[str, ...]) -> Changes:
    """Which of these settings differ between two run.json."""
    changes = {}
    for name in names:
        old, new = (run.get(name, run["settings"].get(name)) for run in (before, now))
        if old != new:
            changes[name] = (old, new)
    return changes


def must_be_equal(before: dict, now: dict) -> Changes:
    """The changed settings with which a run cannot continue."""
    changes = changed_settings(before, now, MUST_BE_EQUAL)
    scheduler = changed_settings(before, now, ("lr_scheduler_type",))
    if SCHEDULERS_WITH_STATE.intersection(scheduler.get("lr_scheduler_type", ())):
        return changes | scheduler
    return changes


def keep_settings(before: dict, identity: dict) -> list[str]:
    """Makes `identity` say what a run that continues from a checkpoint will use; returns messages about other settings."""
    messages = []
    if kept := changed_settings(before, identity, KEPT):
        old, new = before_and_now(kept)
        messages.append(
            f"warning: the run began with {old} and continues with it: {new} has no effect; pass another --output_dir to "
            "train with it from the start"
        )
        settings = identity["settings"] | {name: value for name, (value, _) in kept.items()}
        identity["settings"] = {name: value for name, value in settings.items() if value is not None}
    if changes := changed_settings(before, identity, OF_LOSS):
        old, new = before_and_now(changes)
        messages.append(f"{old} until now, {new} from here on.")
    return messages


def before_and_now(changes: Changes) -> tuple[str, str]:
    """Names and values for a message."""
    return tuple(", ".join(f"{name} {setting_in_words(pair[n])}" for name, pair in changes.items()) for n in (0, 1))


def setting_in_words(value: Any) -> str:
    """A setting as a flag has it."""
    if value is None:
        return "not set"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
