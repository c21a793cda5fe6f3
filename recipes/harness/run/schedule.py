"""The schedule of the learning rate in a run whose number of steps is known."""

from harness.data.settings import too_few_steps
from harness.messages import print_once

from transformers import SchedulerType, TrainingArguments


def fit_schedule(args: TrainingArguments, steps: int) -> None:
    """Prints what is wrong with so many optimizer steps, and shortens the warmup of a short run.

    The only step is none of it, and a share does not take half of the steps: transformers rounds it up, and the first learning
    rate of a warmup is 0.
    """
    if steps == 1:
        args.warmup_steps = 0
    elif args.warmup_steps < 1 and 2 * args.get_warmup_steps(steps) >= steps:
        args.warmup_steps = int(args.warmup_steps * steps)
    few = too_few_steps(steps)
    if few and args.max_steps <= 0:  # they follow from the rows
        print_once(f"warning: {few}")
    if args.lr_scheduler_type == SchedulerType.WARMUP_STABLE_DECAY:
        phases = {"num_stable_steps": 0, "num_decay_steps": 0} | (args.lr_scheduler_kwargs or {})
        end = args.get_warmup_steps(steps) + phases["num_stable_steps"] + phases["num_decay_steps"]
        if end > steps or (phases["num_stable_steps"] and end < steps):
            print_once(f"warning: --lr_scheduler_kwargs: the phases of the schedule have {end} steps, the run has {steps}")
