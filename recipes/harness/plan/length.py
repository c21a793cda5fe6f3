"""How long a run is whose length follows from its data: the recipe's own lines make rows of the first of them."""

import contextlib
import io
import math
import os
import warnings

from harness.commands import first_rows
from harness.launched import Checked, Launched
from harness.run import session
from harness.start import worker


def with_steps(found: dict, rows) -> dict:
    """`found`, with the steps of its epochs where no flag and no recipe says how many; as it is where nobody knows.

    `rows()` answers as `rows_of_an_epoch` does, and is asked only then.
    """
    if found["max_steps"] > 0 or not rows():
        return found
    a_step = found["micro_batch"] * found["accumulation"] * found["processes"]
    return found | {"max_steps": math.ceil(found["epochs"] * rows() / a_step), "estimated": True}


def rows_of_an_epoch(recipe: str, flags: list[str]) -> float | None:
    """Of a recipe with these flags; None when the tokenizer, the data or their number cannot be had."""
    answers = []

    def train(trainer):
        answers.append(first_rows.rows_of_an_epoch(trainer))
        raise Checked

    session.train = train
    warnings.filterwarnings("ignore")
    os.environ.update(Launched(recipe=recipe, command="preview", on_cpu=True, checking=True).to_environment())
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), contextlib.suppress(Checked, SystemExit):
        worker.recipe(recipe, [*flags, "--disable_tqdm", "true"])
    return answers[0] if answers else None
