"""The rewards of the dataset's own answers, and of wrong ones, from GRPOTrainer's or RLOOTrainer's functions: for --preview."""

import traceback
from pathlib import Path
from typing import Any

from harness.compat.trl import rewards_of
from harness.messages import UserError, last_line, print_once

import torch

COLUMNS = ("answer", "solution")  # the first one that rows have is their own answer
ROWS = 4
SEARCHED = 400  # rows for an answer that differs
OWN, OTHER, EMPTY = "its own answer", "the answer of another row", "an empty answer"


def score(trainer: Any, recipe: Path) -> tuple[list[dict[str, Any]], str]:
    """Answers to the first prompts with their rewards, and why these say nothing about the functions, "" if they do.

    Raises UserError if a reward function fails, or rewards wrong answers as much as the dataset's own.
    """
    searched = list(trainer.train_dataset.take(SEARCHED))
    rows = searched[:ROWS]
    column = next((name for name in COLUMNS if name in rows[0]), None)
    answers = [str(row.get(column)) for row in searched]
    own = answers[:ROWS]
    others = []
    for place, answer in enumerate(own):
        later_ones_first = answers[place + 1 :] + answers[:place]
        others.append(next((other for other in later_ones_first if other != answer), answer))
    scored = []
    means = {}
    for kind, chosen in ((OWN, own), (OTHER, others), (EMPTY, [""] * len(own))):
        try:
            rewards = rewards_of(trainer, rows, chosen)
        except Exception as error:  # a reward function is code of the recipe: it can fail in any way
            places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(recipe)]
            where = f"{recipe.name}, line {places[-1]}" if places else recipe.name
            raise UserError(
                f"{where}: a reward function fails with {kind}: {type(error).__name__}: {last_line(error)} (--debug shows the "
                "traceback). A reward function returns a list with one number for each completion"
            ) from error
        means[kind] = sum(rewards) / len(rewards)
        for answer, reward in zip(chosen, rewards, strict=True):
            scored.append({"kind": kind, "answer": answer, "reward": reward})
    if not column:
        return [], f"the rows have no column {' or '.join(COLUMNS)}"
    if own == others:
        return [], f"the first {len(answers)} rows have the same {column}"
    if any(isinstance(function, torch.nn.Module) for function in trainer.reward_funcs):
        return [], "a preview loads no weights of the model that gives rewards"
    if means[OWN] <= max(means[OTHER], means[EMPTY]):
        described = ", ".join(f"{kind} {mean:.4g}" for kind, mean in means.items())
        raise UserError(
            f"{recipe.name}: the rewards do not tell the answers of the column {column} from wrong ones: on average "
            f"{described}. If a right answer needs more than this text, such as tags, the preview cannot show it"
        )
    return scored, ""


def print_rewards(scored: list[dict[str, Any]], why_not_compared: str) -> None:
    """Prints what `score` has found."""
    if why_not_compared:
        print_once(f"\nrewards      not compared: {why_not_compared}")
    for one in scored:
        print_once(f"reward {one['reward']:6.4g}   {one['kind']:<26} {' '.join(one['answer'].split())[-60:]}")
