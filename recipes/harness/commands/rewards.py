"""The rewards of the dataset's own answers, and of wrong ones, from GRPOTrainer's or RLOOTrainer's functions: for --preview."""

from pathlib import Path
from typing import Any

from harness.compat.trl import rewards_of
from harness.messages import UserError, print_once
from harness.run.failures import raise_if_of_reward

import torch

COLUMNS = ("answer", "solution")  # the first one that rows have is their own answer
ROWS = 4
SEARCHED = 400  # rows for an answer that differs
OWN, OTHER, EMPTY = "its own answer", "the answer of another row", "an empty answer"
PROMPT = "the last words of the prompt"  # of rows without an answer


def score(trainer: Any, recipe: Path) -> dict[str, Any]:
    """Answers to the first prompts with their rewards.

    Returns the `rewards`, a dictionary for each answer, `rewards_not_compared`, why those of right and wrong answers are not
    compared, and `warnings` about single functions.

    Raises UserError if a reward function fails, or if the dataset's own answers get no higher rewards than wrong ones: the
    model would learn something else, without an error.
    """
    searched = list(trainer.train_dataset.take(SEARCHED))
    rows = searched[:ROWS]
    answers, not_compared = choose_answers(searched)
    if any(isinstance(function, torch.nn.Module) for function in trainer.reward_funcs):
        not_compared = "a preview loads no weights of the model that gives rewards"
        answers = {}
    scored = []
    means = {}
    for kind, texts in answers.items():
        try:
            of_functions = rewards_of(trainer, rows, texts)
        except Exception as error:
            raise_if_of_reward(error, trainer)
            raise
        sums = (of_functions * trainer.reward_weights).nansum(1).tolist()
        means[kind] = sum(sums) / len(sums)
        for text, reward, parts in zip(texts, sums, of_functions.tolist(), strict=True):
            each = dict(zip(trainer.reward_func_names, parts, strict=True))
            scored.append({"kind": kind, "answer": text, "reward": reward, "functions": each})
    if not not_compared and means[OWN] <= max(means[OTHER], means[EMPTY]):
        described = ", ".join(f"{kind} {mean:.4g}" for kind, mean in means.items())
        raise UserError(
            f"{recipe.name}: the rewards do not tell the answers of the dataset from wrong ones: on average {described}. If a "
            "right answer needs more than this text, such as tags, the preview cannot show it"
        )
    warnings = find_useless(scored)
    for one in scored:
        for name, reward in one["functions"].items():
            if reward != reward:  # JSON has no NaN
                one["functions"][name] = None
    return {"rewards": scored, "rewards_not_compared": not_compared, "warnings": warnings}


def choose_answers(rows: list[dict]) -> tuple[dict[str, list[str]], str]:
    """Answers of each kind to the first prompts, and why right and wrong ones cannot be compared, "" if they can."""
    empty = [""] * len(rows[:ROWS])
    column = next((name for name in COLUMNS if name in rows[0]), None)
    if column is None:
        prompts = [row["prompt"] if isinstance(row["prompt"], str) else str(row["prompt"][-1]["content"]) for row in rows[:ROWS]]
        return {PROMPT: prompts, EMPTY: empty}, f"the rows have no column {' or '.join(COLUMNS)}"
    answers = [str(row[column]) for row in rows]
    own = answers[:ROWS]
    others = []
    for place, answer in enumerate(own):
        later_ones_first = answers[place + 1 :] + answers[:place]
        others.append(next((other for other in later_ones_first if other != answer), answer))
    if own == others:
        return {OWN: own, EMPTY: empty}, f"the first {len(answers)} rows have the same {column}"
    return {OWN: own, OTHER: others, EMPTY: empty}, ""


def find_useless(scored: list[dict[str, Any]]) -> list[str]:
    """Messages about functions of which nothing can be learned if they rate other answers in the same way."""
    found = []
    for name in scored[0]["functions"] if scored else ():
        rewards = {one["functions"][name] for one in scored}
        if all(reward != reward for reward in rewards):
            found.append(f"the reward function {name} rates none of these answers: it returns None or NaN for each")
        elif len(rewards) == 1:
            found.append(f"the reward function {name} gives all these answers the same reward, {rewards.pop():.4g}")
    return found


def print_rewards(scored: list[dict[str, Any]], why_not_compared: str) -> None:
    """Prints what `score` has found."""
    if why_not_compared:
        print_once(f"\nrewards      not compared: {why_not_compared}")
    for one in scored:
        parts = ""
        if len(one["functions"]) > 1:
            parts = ", ".join(f"{name} {reward}" for name, reward in one["functions"].items())
        print_once(f"reward {one['reward']:6.4g}   {one['kind']:<26} {' '.join(one['answer'].split())[-60:]}   {parts}")
