"""What happens around every recipe. A recipe uses three functions: `parse`, `load` and `train`.

Importing this package is cheap: torch and the other libraries are imported by the first call.
"""

import logging
from collections.abc import Callable
from typing import Any

from harness.messages import UserError, exit_on_user_error

# On a CPU with bf16 arithmetic, bitsandbytes logs in every process that it misses a package that training does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def parse(config_class: type, dataset_formats: tuple[str, ...] | str = (), **defaults: Any) -> tuple[Any, Any, Any]:
    """Returns `(script_args, training_args, model_args)`. See `harness.start.parsing.parse`."""
    with exit_on_user_error():
        from harness.start.parsing import parse

        return parse(config_class, dataset_formats, **defaults)


def load(script_args: Any, keep: Callable[[dict], bool] | None = None) -> tuple[Any, Any]:
    """Returns `(train_dataset, eval_dataset)`. See `harness.data.loading.load`."""
    with exit_on_user_error():
        from harness.data.loading import load

        return load(script_args, keep)


def train(trainer: Any) -> None:
    """Trains and saves the model. See `harness.run.session.train`."""
    with exit_on_user_error():
        from harness import contexts

        context = contexts.current()
        if context is None:
            raise UserError(
                "train() needs parse() before it: a recipe calls parse(), builds a trainer, and ends with train(trainer)"
            )
        context.built(trainer)


__all__ = ["load", "parse", "train"]
