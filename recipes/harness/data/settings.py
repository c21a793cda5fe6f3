"""Which datasets and splits a run reads, and how; the rows and tokens of a step."""

from dataclasses import dataclass, replace
from typing import Any

from harness.messages import plural


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
