"""The rewards of the dataset's own answers, and of wrong ones, from GRPOTrainer's or RLOOTrainer's functions: for --preview."""

import math
from pathlib import Path
from typing import Any

from harness.compat.trl import rewards_of
from harness.messages import UserError, print_once
from harness.run.failures import raise_if_of_reward

import torch

COLUMNS = ("answer", "solution")  # the first one that rows have is their own answer
ROWS = 4
SEARCHED = 400  # rows for an answer that differs


def score(trainer: Any, recipe: Path) -> dict[str, Any]:
    """Answers to the first prompts with their rewards.

    Returns the `rewards`, a dictionary for each answer, `rewards_not_compared`, why those of right and wrong answers are not
    compared, and `warnings` about single functions.

    Raises UserError if a reward function fails, or if the dataset's own answers get no higher rewards than wrong ones: the
    model would learn something else, without an error.
    """
    searched = list(trainer.train_dataset.take(SEARCHED))
    rows = searched[:ROWS]
    column = next((name for name in COLUMNS if name in rows[0]), "prompt")
    texts = [str(row[column]) for row in searched]
    if any(isinstance(function, torch.nn.Module) for function in trainer.reward_funcs):
        return {"rewards": [], "rewards_not_compared": "a preview loads no weights of the model that gives rewards"}
    not_compared = f"the first {len(texts)} rows have the same {column}" if len(set(texts)) == 1 else ""
    if column == "prompt":
        not_compared = f"the rows have no column {' or '.join(COLUMNS)}"
    others = []
    for place, text in enumerate(texts[:ROWS]):
        others.append(next((other for other in texts[place + 1 :] + texts[:place] if other != text), ""))
    answers = {f"its own {column}": texts[:ROWS], f"the {column} of another row": others, "an empty answer": [""] * len(rows)}
    scored = []
    means = {}
    for kind, chosen in answers.items():
        try:
            of_functions = rewards_of(trainer, rows, chosen)
        except Exception as error:
            raise_if_of_reward(error, trainer)
            raise
        rewards = (of_functions * trainer.reward_weights).nansum(1).tolist()
        means[kind] = sum(rewards) / len(rewards)
        for answer, reward, parts in zip(chosen, rewards, of_functions.tolist(), strict=True):
            each = {}
            for name, part in zip(trainer.reward_func_names, parts, strict=True):
                each[name] = None if math.isnan(part) else part
            scored.append({"kind": kind, "answer": answer, "reward": reward, "functions": each})
    of_own, *of_others = means.values()
    if not not_compared and of_own <= max(of_others):
        described = ", ".join(f"{kind} {mean:.4g}" for kind, mean in means.items())
        raise UserError(
            f"{recipe.name}: the rewards do not tell the answers of the dataset from wrong ones: on average {described}. If a "
            "right answer needs more than this text, such as tags, the preview cannot show it"
        )
    warnings = []
    for name in trainer.reward_func_names:
        values = {one["functions"][name] for one in scored}
        if len(values) == 1:
            warnings.append(f"the reward function {name} gives all these answers the same reward: {values.pop()}")
    return {"rewards": scored, "rewards_not_compared": not_compared, "warnings": warnings}


def print_rewards(scored: list[dict[str, Any]], why_not_compared: str) -> None:
    """Prints what `score` has found."""
    if why_not_compared:
        print_once(f"\nrewards      not compared: {why_not_compared}")
    for one in scored:
        each = one["functions"] if len(one["functions"]) > 1 else ""
        print_once(f"reward {one['reward']:6.4g}   {one['kind']:<26} {' '.join(one['answer'].split())[-60:]} {each}")
