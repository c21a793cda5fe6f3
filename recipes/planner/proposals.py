"""What makes a run need less memory, where it does not fit."""

from harness.configs import AccelerateConfig
from planner.cards import Card, find_card
from planner.simulation import Simulation

ADVICE = (
    "Less memory: --per_device_train_batch_size 1, --activation_checkpointing true, a config that shards over more GPUs or "
    "offloads, --use_peft true, --load_in_4bit true, a smaller --max_length"
)


def card_of_config(config: AccelerateConfig) -> Card:
    """The card that a config is for: a T4 for fp16, else one of 24 GB."""
    return find_card("T4" if config.mixed_precision == "fp16" else "3090")


def flags_for_less(simulation: Simulation) -> list[list[str]]:
    """The flags that cost time only, and with them those that change what is learnt."""
    slower = ["--activation_checkpointing", "true", "--per_device_train_batch_size", "1"]
    if not simulation.has_global_batch_flag:  # as many rows per step as before
        slower += ["--gradient_accumulation_steps", str(simulation.micro_batch * simulation.accumulation)]
    return [slower, [*slower, "--use_peft", "true", "--load_in_4bit", "true"]]
