"""The rewards of the dataset's own answers, and of wrong ones, from GRPOTrainer's or RLOOTrainer's functions: for --preview."""

from pathlib import Path
from typing import Any

from harness.compat.trl import rewards_of
from harness.messages import UserError, last_line, print_once

COLUMNS = ("answer", "solution")  # the first one that rows have is their own answer
ROWS = 4
OWN, OTHER, EMPTY = "its own answer", "the answer of another row", "an empty answer"


def score(trainer: Any, recipe: Path) -> list[dict[str, Any]]:
    """Answers to the first prompts with their rewards.

    Raises UserError if a reward function fails, or rewards wrong answers as much as the dataset's own.
    """
    rows = list(trainer.train_dataset.take(ROWS))
    column = next((name for name in COLUMNS if name in rows[0]), None)
    own = [str(row.get(column)) for row in rows]
    scored = []
    means = {}
    for kind, answers in ((OWN, own), (OTHER, own[1:] + own[:1]), (EMPTY, [""] * len(own))):
        try:
            rewards = rewards_of(trainer, rows, answers)
        except Exception as error:  # a reward function is code of the recipe: it can fail in any way
            reason = f"{type(error).__name__}: {last_line(error)} (--debug shows the traceback)"
            raise UserError(f"{recipe.name}: a reward function fails with {kind}: {reason}") from error
        means[kind] = sum(rewards) / len(rewards)
        for answer, reward in zip(answers, rewards, strict=True):
            scored.append({"kind": kind, "answer": answer, "reward": reward})
    if column and means[OWN] <= max(means[OTHER], means[EMPTY]):
        described = ", ".join(f"{kind} {mean:.4g}" for kind, mean in means.items())
        raise UserError(
            f"{recipe.name}: the rewards do not tell right answers, those of the column {column}, from wrong ones: on average "
            f"{described}"
        )
    return scored if column else []


def print_rewards(scored: list[dict[str, Any]]) -> None:
    """Prints what `score` has found."""
    if not scored:
        print_once(f"\nrewards      not compared: the rows have no column {' or '.join(COLUMNS)}")
    for one in scored:
        print_once(f"reward {one['reward']:6.4g}   {one['kind']:<26} {' '.join(one['answer'].split())[-60:]}")
