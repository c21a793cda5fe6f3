"""What happens around every recipe. A recipe uses three functions: `parse`, `load` and `train`.

Importing this package is cheap: torch and the other libraries are imported by the first call.
"""

import logging
from collections.abc import Callable
from typing import Any

from harness import launched
from harness.messages import UserError, exit_on_user_error

launched.begin()
# On a CPU with bf16 arithmetic, bitsandbytes logs in every process that it misses a package that training does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# Offline, `kernels` reports that it did not check the publisher of a kernel; it did when the kernel was downloaded.
logging.getLogger("kernels.hf_hub").addFilter(lambda record: "offline mode" not in record.getMessage())


def parse(config_class: type, dataset_formats: tuple[str, ...] | str = (), **defaults: Any) -> tuple[Any, Any, Any]:
    """Turns the values of a recipe and the command line into the three argument objects of TRL's scripts.

    docs/your-recipe.md has a complete recipe, and what all three functions expect.

    Args:
        config_class: the class of the trainer's arguments, such as `trl.SFTConfig`, `transformers.TrainingArguments`, or a
            dataclass that inherits from one. Its fields are flags.
        dataset_formats: the formats to which `load` converts rows, the first choice first: "text", "messages",
            "prompt_completion", "instruction", "preference". Empty: rows keep their columns.
        **defaults: the values of the recipe, by the names of the fields of `config_class`, `trl.ModelConfig` and
            `ScriptArguments`. Flags override them.

    Returns:
        `(script_args, training_args, model_args)`. In a rehearsal `model_args` names a tiny model, and `load` reads a tiny
        dataset.
    """
    with exit_on_user_error():
        from harness.start.parsing import parse

        return parse(config_class, dataset_formats, **defaults)


def load(script_args: Any, keep: Callable[[dict], bool] | None = None) -> tuple[Any, Any]:
    """Loads the rows that --dataset_name and the other flags choose, converted to a format of `parse`.

    Args:
        script_args: what `parse` has returned first.
        keep: whether a row is used, as the dataset has it, after --column_map; all are without it.

    Returns:
        `(train_dataset, eval_dataset)`. Without a test split, rows are held out of the training split.
    """
    with exit_on_user_error():
        from harness.data.loading import load

        return load(script_args, keep)


def train(trainer: Any) -> None:
    """Resumes or starts, trains, evaluates, saves the model and writes the results. A recipe calls it once, at its end.

    Args:
        trainer: a `transformers.Trainer` of any class, built with the `training_args` that `parse` has returned. What it has no
            use for, such as samples of a classifier, is left out.
    """
    with exit_on_user_error():
        from harness import runs

        started = runs.started()
        if started is None:
            raise UserError(
                "train() needs parse() before it: a recipe calls parse(), builds a trainer, and ends with train(trainer)"
            )
        from harness.start.checks import check_built_trainer

        started.trainer = trainer
        check_built_trainer(started)
        started.on_train(started)


__all__ = ["load", "parse", "train"]
