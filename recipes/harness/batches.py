"""How many rows and tokens a step has, from the arguments of a trainer. Packed documents are one row, as in a micro-batch."""

from typing import Any

from harness.messages import plural

IGNORED = -100  # the label of a token that does not count in the loss
# Adam changes a weight by about the learning rate in a step: in ten steps of 2e-5 by 2e-4, 1 % of a usual weight.
FEW_STEPS = 10


def length_of_rows(training_args: Any) -> int | None:
    """The most tokens that a row has; None if the recipe has no max_length, or sets none: then rows keep their length."""
    return getattr(training_args, "max_length", None)


def is_packed(training_args: Any) -> bool:
    """Whether rows are packed, which only some trainers of TRL do."""
    return getattr(training_args, "packing", False)


def rows_of_step(training_args: Any, processes: int) -> int:
    """The rows of an optimizer step on all processes together."""
    return training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * processes


def too_few_steps(steps: int) -> str:
    """A sentence about a run that is too short to learn anything, "" for a longer one."""
    if steps >= FEW_STEPS:
        return ""
    return (
        f"{plural(steps, 'optimizer step')} {'is' if steps == 1 else 'are'} too few to learn anything: a larger "
        "--num_train_epochs, a smaller --global_batch_size or more rows give more"
    )
