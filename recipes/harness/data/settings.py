"""Which datasets and splits a run reads, and how: what `load` takes, and how it follows from the arguments."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.data.formats import DESCRIPTIONS
from harness.messages import UserError

if TYPE_CHECKING:  # they import torch
    from harness.data.script_arguments import ScriptArguments

    from transformers import TrainingArguments

EVALUATION_SPLITS = ("test", "validation", "valid", "dev", "val", "eval", "evaluation")  # in this order, without a flag


@dataclass(frozen=True)
class Source:
    """One dataset of a run."""

    name: str  # what is read: a Hub ID, a folder, a file or a glob
    config: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    text_rows: str | None = None  # see --text_rows
    display_name: str = ""  # in messages; a rehearsal reads another `name`
    weight: float = 1.0  # its share of the training rows
    # Of a preview, a rehearsal or a plan:
    first_rows: int = 0  # load only so many rows of each split; 0: all
    cuts_texts: bool = False  # texts are cut after they were read
    eval_rows_of_run: int = 0  # how many rows the run evaluates on, if this is more: as many are held out


@dataclass(frozen=True)
class DataSettings:
    """The datasets of a run, and what decides which of their rows it trains on and in which form."""

    sources: tuple[Source, ...]  # (): the recipe has rows of its own
    formats: tuple[str, ...] = ()  # of formats.py, that the recipe can train on, the best first; (): rows stay as they are
    streaming: bool = False
    max_samples: int | None = None
    max_eval_samples: int = 256
    column_map: dict[str, str] | None = None
    template_arguments: dict[str, Any] | None = None  # what the chat template gets besides the turns
    split_conversations: bool = False
    text_field: str = "text"
    seed: int = 0
    output_dir: str = ""  # where `load` writes data.json; "": nowhere
    keeps_samples: bool = False  # the max_samples rows of a stream are read once, for all epochs
    template_date: str = ""  # what a chat template that prints the date makes of a conversation today, "" of another template
    has_text_arguments: bool = False  # the chat template expects the arguments of tool calls as JSON
    drops_marks: str = ""  # why turns that are marked not to count in the loss would count, "" if they do not
    # Raises UserError if the chat template does not render some converted rows; None: they are no conversations.
    check_conversations: Callable[[list[tuple[str, dict]]], None] | None = None
    needs_test_split: bool = False  # --dataset_test_split was given, so it must exist
    is_read_in_order: bool = False  # the trainer's class does not shuffle, as KTO's: `load` shuffles the rows once

    @property
    def is_mixture(self) -> bool:
        return len(self.sources) > 1

    @property
    def display_name(self) -> str | None:
        """All datasets in words, such as "0.7 a + 0.3 b"; None without one."""
        if not self.is_mixture:
            if self.sources:
                return self.sources[0].display_name
            return None
        return " + ".join(f"{source.weight:.3g} {source.display_name}" for source in self.sources)

    def with_each(self, **changes: Any) -> "DataSettings":
        """The settings with changed values of every source."""
        return replace(self, sources=tuple(replace(source, **changes) for source in self.sources))


def settings_of_data(
    script_args: "ScriptArguments",
    training_args: "TrainingArguments",
    formats: tuple[str, ...] | str = (),
    given: frozenset[str] = frozenset(),
) -> DataSettings:
    """What the arguments of a run say about its data. Raises UserError for datasets that do not belong together.

    `formats`: see DataSettings. `given`: names of the arguments that the user passed.
    """
    formats = tuple(filter(None, [formats] if isinstance(formats, str) else formats))
    unknown = set(formats) - DESCRIPTIONS.keys()
    if unknown:
        raise UserError(f"dataset_formats: {min(unknown)!r} is no format: use one or several of {', '.join(DESCRIPTIONS)}")
    has_own = hasattr(training_args, "chat_template_kwargs")  # GRPOTrainer renders the prompts itself
    return DataSettings(
        sources=tuple(sources_of(script_args)),
        formats=formats,
        streaming=script_args.dataset_streaming,
        max_samples=script_args.max_samples,
        max_eval_samples=script_args.max_eval_samples,
        column_map=script_args.column_map,
        template_arguments=None if has_own else script_args.chat_template_kwargs,
        split_conversations=script_args.split_conversations,
        text_field=getattr(training_args, "dataset_text_field", "text"),
        seed=training_args.seed,
        output_dir=training_args.output_dir,
        keeps_samples=bool(script_args.max_samples) and training_args.max_steps <= 0,
        needs_test_split="dataset_test_split" in given,
        is_read_in_order=getattr(type(training_args), "train_sampling_strategy", "") == "sequential",
    )


def sources_of(script_args: "ScriptArguments") -> list[Source]:
    """The datasets that the arguments name. Raises UserError unless each of several has a weight, and if any a config."""
    if not script_args.dataset_name:
        return []
    names = script_args.dataset_name
    if isinstance(names, str):
        names = [names]
    configs = script_args.dataset_config or ["default"] * len(names)
    if isinstance(configs, str):
        configs = [configs]
    weights = script_args.dataset_weights or [1.0]
    if not len(names) == len(weights) == len(configs) or not all(0 < weight < math.inf for weight in weights):
        raise UserError(
            f"--dataset_name names {len(names)} datasets: pass a weight above 0 for each, for equal shares --dataset_weights "
            f"{' '.join(['1'] * len(names))}, and if one has a --dataset_config, one for each, `default` for those without. "
            "Files of one dataset are a folder, or a glob in quotes"
        )
    sources = []
    for name, config, weight in zip(names, configs, weights, strict=True):
        source = Source(
            name,
            None if config == "default" else config,
            train_split=script_args.dataset_train_split,
            test_split=script_args.dataset_test_split,
            text_rows=script_args.text_rows,
            display_name=name if config == "default" or len(names) == 1 else f"{name} {config}",
            weight=weight / sum(weights),
        )
        sources.append(source)
    return sources


def evaluation_split(source: Source, splits: Collection[str], is_given: bool) -> str:
    """The name of the split to evaluate on, which need not be there: of the flag or recipe, else one that is usually called so.

    `is_given`: by the flag. Raises UserError unless the splits of the flags exist and are two.
    """
    train = source.train_split
    test = source.test_split
    if test not in splits and not is_given:
        test = next((split for split in EVALUATION_SPLITS if split in splits and split != train), test)
    if train not in splits or test == train or (is_given and test not in splits):
        raise UserError(
            f"--dataset_train_split {train}, --dataset_test_split {test}: {source.display_name} has the splits "
            f"{', '.join(splits)}: pass two of them; without --dataset_test_split some rows are held out"
        )
    return test
