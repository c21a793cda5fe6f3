"""The rewards of the dataset's own answers, and of wrong ones, from GRPOTrainer's or RLOOTrainer's functions: for --preview."""

from pathlib import Path
from typing import Any

from harness.compat.trl import rewards_of
from harness.messages import UserError, last_line, print_once

COLUMNS = ("answer", "solution", "completion")  # the first one that rows have is their own answer
ROWS = 4
OWN, OTHER, EMPTY = "its own answer", "the answer of another row", "an empty answer"


def score(trainer: Any, recipe: Path) -> list[dict[str, Any]]:
    """Answers to the first prompts with their rewards, [] if the rows have no answers.

    Raises UserError if a reward function fails, or rewards wrong answers as much as the dataset's own.
    """
    rows = list(trainer.train_dataset.take(ROWS))
    column = next((name for name in COLUMNS if name in rows[0]), None)
    texts = [text_of(row[column]) if column else "An answer." for row in rows]
    scored = []
    asked = []
    for row, text in zip(rows, texts, strict=True):
        other = next((other for other in texts if other != text), None)
        for kind, answer in ((OWN, text), (OTHER, other), (EMPTY, "")):
            if answer is not None:
                asked.append(row)
                scored.append({"kind": kind, "answer": answer})
    try:
        rewards = rewards_of(trainer, asked, [one["answer"] for one in scored])
    except Exception as error:  # a reward function is code of the recipe: it can fail in any way
        raise UserError(
            f"{recipe.name}: a reward function fails with the answers of the dataset itself, or an empty one: "
            f"{type(error).__name__}: {last_line(error)} (--debug shows the traceback)"
        ) from error
    for one, reward in zip(scored, rewards, strict=True):
        one["reward"] = reward
    if not column:
        return []
    means = {}
    for kind in (OWN, OTHER, EMPTY):
        of_kind = [one["reward"] for one in scored if one["kind"] == kind]
        means[kind] = sum(of_kind) / max(1, len(of_kind))
    if not means[OWN] > max(means[OTHER], means[EMPTY]):  # also for NaN
        described = ", ".join(f"{kind} {mean:.4g}" for kind, mean in means.items())
        raise UserError(
            f"{recipe.name}: the rewards do not tell right answers from wrong ones: on average {described}. Right ones are those "
            f"in the column {column}"
        )
    return scored


def text_of(answer: Any) -> str:
    """An answer of a dataset: a text, or messages."""
    return answer[-1]["content"] if isinstance(answer, list) else str(answer)


def print_rewards(scored: list[dict[str, Any]]) -> None:
    """Prints what `score` has found."""
    if not scored:
        print_once(f"\nrewards      not shown: the rows have no column {', '.join(COLUMNS)}")
        return
    print_once("\nThe rewards of answers to the first prompts:\n")
    for one in scored:
        end = " ".join(one["answer"].split())[-60:]
        print_once(f"{one['reward']:8.4g}  {one['kind']:<26} {end}")
