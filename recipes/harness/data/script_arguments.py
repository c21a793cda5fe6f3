"""TRL's ScriptArguments with this project's own fields, and the arguments of every dataset of a mixture."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.data import reading
from harness.launched import UserError

import trl

# The arguments that every dataset of a mixture has its own of.
OF_ONE_DATASET = (
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "text_rows",
    "display_name",
    "label",
    "weight",
    "first_rows",
    "cuts_texts",
    "eval_rows_of_run",
)


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """TRL's ScriptArguments, budgets that do not depend on the number of GPUs, and several datasets."""

    dataset_name: list[str] | None = field(
        default=None,
        metadata={
            "help": "A Hub ID, a folder or a file. With --dataset_weights several datasets; without it, several files of one."
        },
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
    text_rows: str | None = field(
        default=None,
        metadata={
            "help": "What a row of text files is. Without the flag every line, and every document where there are several files.",
            "choices": ["line", "paragraph", "document"],
        },
    )
    split_conversations: bool = field(
        default=False,
        metadata={"help": "One row for every answer of a conversation, for templates that drop the reasoning of earlier ones."},
    )
    profile: bool = field(default=False, metadata={"help": "Profile some steps in the middle of the run."})
    forecast: bool = field(
        default=False,
        metadata={"help": "Also simulate a rehearsal on CPU, and compare the two. A run on GPUs is always compared."},
    )
    mirror: str | None = field(
        default=None,
        metadata={"help": "URL of a folder (s3://, gs://, file:// …) to which checkpoints and the model are uploaded."},
    )

    # Set by `parse`. Without an annotation they are no fields, so they are no flags.
    dataset_formats = ()  # the formats of rows that the recipe can train on (see formats.py), its first choice first
    display_name = ""  # the dataset's name in messages; dataset_name is another one in a rehearsal
    label, weight = "", 1.0  # of a dataset of a mixture: its name in metrics, its share of the rows
    mixture = ()  # for each of several datasets the values of OF_ONE_DATASET
    given = frozenset()  # names of all arguments that the user passed
    text_field, seed = "text", 0
    output_dir = ""  # where `load` writes DATA
    first_rows = 0  # load only so many rows of each split, for a preview, a rehearsal or a plan; 0: all
    cuts_texts = False  # in a rehearsal: texts are cut after they were read
    eval_rows_of_run = 0  # in a rehearsal of one's own data: the max_eval_samples of the run
    keeps_samples = False  # of a stream: its max_samples rows are read once, for all epochs

    def __post_init__(self) -> None:
        for name in ("dataset_name", "dataset_config"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) == 1:
                setattr(self, name, value[0])
        if isinstance(self.column_map, str):
            try:
                self.column_map = json.loads(self.column_map)
            except json.JSONDecodeError as error:
                example = '{"question": "prompt", "answer": "completion"}'
                raise UserError(f"--column_map: {self.column_map} is not JSON, expected for example '{example}'") from error


def set_datasets(script_args: ScriptArguments) -> None:
    """Sets `display_name`, and of several datasets `mixture`; `dataset_name` is one text afterwards.

    Raises UserError for names, configs and weights that do not belong together.
    """
    names, configs, weights = script_args.dataset_name, script_args.dataset_config, script_args.dataset_weights
    if isinstance(names, list) and not weights and all(map(reading.is_local, names)):
        names = script_args.dataset_name = ",".join(names)
    if not isinstance(names, list):
        if weights:
            raise UserError("--dataset_weights is for several datasets: pass a --dataset_name for each weight, or leave it out")
        if isinstance(configs, list):
            raise UserError(f"--dataset_config has {len(configs)} values, and --dataset_name names one dataset: pass one")
        script_args.display_name = names
        return
    if not weights:
        example = " ".join(["1"] * len(names))
        raise UserError(
            f"--dataset_name names {len(names)} datasets: pass the share that each has of the rows, for equal ones "
            f"--dataset_weights {example}"
        )
    if len(weights) != len(names):
        raise UserError(f"--dataset_weights has {len(weights)} values for {len(names)} datasets: pass one for each")
    if not all(isinstance(weight, int | float) and math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"--dataset_weights is {' '.join(map(str, weights))}, expected numbers above 0")
    if configs is not None and (not isinstance(configs, list) or len(configs) != len(names)):
        raise UserError(
            f"--dataset_config: pass one config for each of the {len(names)} datasets, and `default` for those without"
        )
    if len(set(zip(names, configs or names, strict=True))) < len(names):
        raise UserError("--dataset_name names a dataset twice: pass each once, with a larger weight")
    script_args.dataset_config = None
    shared = {name: getattr(script_args, name) for name in OF_ONE_DATASET}
    script_args.mixture = [
        shared | {"dataset_name": name, "display_name": name, "label": label, "weight": weight / sum(weights)}
        for name, label, weight in zip(names, labels_of(names), weights, strict=True)
    ]
    for values, config in zip(script_args.mixture, configs or [], strict=False):
        if config != "default":
            values["dataset_config"], values["display_name"] = config, f"{values['dataset_name']} {config}"
    if script_args.text_rows:  # for those that are text files
        for values in script_args.mixture:
            values["text_rows"] = script_args.text_rows if reading.is_text(values["dataset_name"]) else None
        if not any(values["text_rows"] for values in script_args.mixture):
            raise UserError("--text_rows is for text files on this machine, and no dataset is one: leave out the flag")
    parts = [f"{values['weight']:.3g} {values['display_name']}" for values in script_args.mixture]
    script_args.dataset_name = script_args.display_name = " + ".join(parts)


def labels_of(names: list[str]) -> list[str]:
    """Short names for metrics, all different: `code` for `data/code.jsonl` and `code/*.jsonl`, `b` for `hub/b`.

    None is `train`, as TRL calls the training rows, or `aux`, whose metric would be that of a mixture of experts.
    """
    labels, reserved = [], {"", "train", "aux"}
    for name in names:
        parts = [part.strip("/").split(".")[0] for part in reversed(Path(name).parts)]
        short = next((part for part in parts if part not in reserved and not set("*?[") & set(part)), "data")
        candidates = (short, *(f"{short}-{number}" for number in range(2, len(names) + 2)))
        labels.append(next(label for label in candidates if label not in labels))
    return labels


def each_dataset(script_args: ScriptArguments) -> list[ScriptArguments]:
    """The arguments of every dataset: these, or of a mixture one copy for each of its datasets."""
    if not script_args.mixture:
        return [script_args]
    copies = []
    for values in script_args.mixture:
        one = copy.copy(script_args)
        for name, value in (values | {"mixture": ()}).items():
            setattr(one, name, value)
        one.max_samples = script_args.max_samples and math.ceil(script_args.max_samples * one.weight)
        copies.append(one)
    return copies


def change_each(script_args: ScriptArguments, change: Callable[[ScriptArguments], None]) -> None:
    """Calls `change` with the arguments of every dataset, and keeps the values of OF_ONE_DATASET that it sets."""
    if not script_args.mixture:
        change(script_args)
        return
    copies = each_dataset(script_args)
    for one in copies:
        change(one)
    script_args.mixture = [{name: getattr(one, name) for name in OF_ONE_DATASET} for one in copies]
