"""The arguments that choose datasets, splits and rows, and the budgets of a run."""

import json
from dataclasses import dataclass, field
from typing import Any

import trl


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """TRL's ScriptArguments, budgets that do not depend on the number of GPUs, and several datasets."""

    dataset_name: list[str] | None = field(
        default=None,
        metadata={"help": "A Hub ID, a folder, a file or a glob; with --dataset_weights several datasets."},
    )
    dataset_config: list[str] | None = field(
        default=None, metadata={"help": "Config of the dataset; of several datasets one for each, `default` for those without."}
    )
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={"help": "For several datasets: the share that each has of the rows, as 0.6 0.3 0.1 or 6 3 1."},
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows per optimizer step on all processes together; sets gradient_accumulation_steps."},
    )
    max_tokens: int | None = field(default=None, metadata={"help": "Train on this many tokens; sets max_steps."})
    max_samples: int | None = field(
        default=None,
        metadata={
            "help": "Train on at most this many documents. A stream with num_train_epochs keeps them in memory. Of several "
            "datasets exactly so many: small ones are repeated."
        },
    )
    max_eval_samples: int = field(
        default=256, metadata={"help": "Documents held out for evaluation and never trained on, at most; of each dataset."}
    )
    column_map: dict[str, str] | str | None = field(
        default=None, metadata={"help": 'New names of columns, as JSON: \'{"question": "prompt", "answer": "completion"}\'.'}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What the chat template gets besides the messages, as JSON: '{\"enable_thinking\": false}'. The column "
            "chat_template_kwargs of a row has precedence. Without effect on rows that are no conversations."
        },
    )
    max_pixels: int = field(
        default=1_000_000,
        metadata={"help": "Of recipes for images: larger ones are shrunk to so many pixels, also by the saved processor."},
    )
    text_rows: str | None = field(
        default=None,
        metadata={
            "help": "What a row of text files is. Without the flag a line; with several files, or Markdown, a document.",
            "choices": ["line", "document"],
        },
    )
    split_conversations: bool = field(
        default=False,
        metadata={
            "help": "One row for every answer of a conversation, for templates that drop the reasoning of earlier ones. Without "
            "effect on other rows."
        },
    )
    profile: bool = field(default=False, metadata={"help": "Profile one step in the middle of the run."})

    def __post_init__(self) -> None:
        """A list of one dataset becomes the dataset, and the JSON of a flag a dict."""
        for name in ("dataset_name", "dataset_config"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) == 1:
                setattr(self, name, value[0])
        for name in ("column_map", "chat_template_kwargs"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, dict(json.loads(value)))
