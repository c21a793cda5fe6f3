"""Trainers of TRL that train on answers which the model writes: GRPOTrainer and RLOOTrainer on rewards, DistillationTrainer."""

import math
from collections.abc import Iterator

from harness.compat.trl import logged_metrics
from harness.messages import UserError, print_once

from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import DistillationConfig
from trl.trainer.utils import RepeatSampler


def trains_on_rewards(trainer: Trainer) -> bool:
    return hasattr(trainer, "reward_funcs")


def writes_answers(trainer: Trainer) -> bool:
    """Whether a trainer trains on answers that its own model writes: those on rewards, and DistillationTrainer."""
    return trains_on_rewards(trainer) or isinstance(trainer.args, DistillationConfig)


def micro_batches_of_generation(args: TrainingArguments) -> int:
    """How many micro-batches share the answers of a `generate`, and with each of which the loader reads the rows of all."""
    if isinstance(args, DistillationConfig):
        return args.gradient_accumulation_steps
    return getattr(args, "steps_per_generation", None) or 1


def tokens_of_prompt(trainer: Trainer, prompt: str | list[dict]) -> list[int]:
    """The tokens that the answers to a prompt follow."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **trainer.args.chat_template_kwargs or {})[
        "input_ids"
    ]


def check_number_of_prompts(rows: float, answers: int, group: int) -> None:
    """Raises UserError for fewer prompts than `answers` at a time need, of which TRL makes no batch: minutes would pass."""
    if rows < answers // group:
        raise UserError(
            f"--global_batch_size: {answers:,} answers at a time are {group} to each of {answers // group:,} prompts, and there "
            f"are only {rows:,}: pass a smaller --global_batch_size"
        )


def check_prompts(trainer: Trainer) -> None:
    """Raises UserError for fewer prompts than a step needs, or if an evaluation would count some twice."""
    args = trainer.args
    answers = args.per_device_train_batch_size * args.world_size * micro_batches_of_generation(args)
    group = getattr(args, "num_generations", 1)
    check_number_of_prompts(len(trainer.train_dataset), answers, group)
    group = getattr(args, "num_generations_eval", 1) or group
    if group > 1 and args.world_size > 1 and trainer.eval_dataset is not None:
        raise UserError(
            f"--num_generations_eval {group}: on several processes, the prompts that complete the last batch would count twice: "
            "pass --num_generations_eval 1"
        )


class PromptsByEpoch(Sampler[int]):
    """TRL's order of the prompts and their groups, which depends on the epoch here.

    There it depends on how many epochs this process has begun, so a run that resumes in the second one would read the order of
    the first one.
    """

    def __init__(self, sampler: RepeatSampler) -> None:
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def order_by_epoch(loader: DataLoader) -> None:
    """Makes accelerate's loader of such a trainer read `PromptsByEpoch`."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)  # the former on several processes
    loader.set_sampler(PromptsByEpoch(batches.sampler))


class RewardsOfSteps(TrainerCallback):
    """Ends a run whose reward functions have rated no answer of its first step.

    A function returns None or NaN for an answer that it does not rate: another function can rate it. Warns once if all answers to
    each prompt got the same reward: the model learns nothing from such a step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.has_warned = False
        self.is_first = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.is_first = state.global_step == 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        metrics = logged_metrics(self.trainer)["train"]
        rewards = metrics.get("reward")  # means of those that are not NaN
        if self.is_first and rewards and math.isnan(rewards[-1]):
            raise UserError(
                f"{', '.join(self.trainer.reward_func_names)}: in step {state.global_step} no answer got a reward, all are None "
                "or NaN, so nothing can be learned: return a number for each answer, such as 0 for a wrong one"
            )
        self.is_first = False
        shares = metrics.get("frac_reward_zero_std")  # of prompts with equal rewards
        if shares and shares[-1] == 1 and not self.has_warned:
            self.has_warned = True
            print_once(
                f"warning: in step {state.global_step} all answers to each prompt got the same reward, so nothing was learned: "
                "if most steps are so (frac_reward_zero_std in trainer_state.json), the prompts are too hard or too easy"
            )
