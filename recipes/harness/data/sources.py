"""Which datasets a run reads, and how: what `load` and `check_dataset` take. `parsing.py` makes it of the arguments."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


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
            return self.sources[0].display_name if self.sources else None
        return " + ".join(f"{source.weight:.3g} {source.display_name}" for source in self.sources)

    def change_each(self, change: Callable[[Source], Source]) -> "DataSettings":
        """The settings with other sources."""
        return replace(self, sources=tuple(change(source) for source in self.sources))

    def take(self, rows: int) -> "DataSettings":
        """These settings, for the first rows of each split."""
        return self.change_each(lambda source: replace(source, first_rows=rows))

    def hold_out_at_least(self, eval_rows: int) -> "DataSettings":
        """The settings of a rehearsal or plan, which holds out as many rows as the run and evaluates on fewer."""
        return self.change_each(lambda source: replace(source, eval_rows_of_run=eval_rows))

    def most_eval_rows(self, source: Source) -> int:
        """How many rows of a dataset the run evaluates on at most; a rehearsal holds out as many, and evaluates on fewer."""
        return source.eval_rows_of_run or self.max_eval_samples
