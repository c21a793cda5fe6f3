"""Losses and metrics in the logs of a run. Imports no torch."""

import re

# What transformers, SFTTrainer and `Progress` log besides losses; of an evaluation with or without the label of a dataset.
KNOWN = re.compile(
    r"eval_(.+_)?(runtime|samples_per_second|steps_per_second|model_preparation_time|loss)"
    r"|(eval_)?(entropy|num_tokens|mean_token_accuracy|aux_loss)|train_\w+"
    r"|loss|grad_norm|learning_rate|epoch|step|total_flos|loss_scale|(tokens|rows)_per_second|num_input_tokens_seen"
)
# Metrics that say little alone, and are in the logs only: DPO's log-probabilities and logits, and most of GRPO's. Of these the
# reward, its spread, the mean length of answers, the share that is cut off, and the distance from the first model (kl) are shown.
LITTLE_ALONE = re.compile(
    r"(eval_)?(logps/.*|logits/.*|rewards/.*/(mean|std)|frac_reward_zero_std|step_time|policy_loss|entropy_coef|clip_ratio/.*"
    r"|cispo_clip_ratio|vespo/.*|sampling/.*|tools/.*|completions/(min_|max_|mean_terminated_).*)"
)


def evaluation_losses(logs: dict) -> dict[str, float]:
    """The losses of evaluations by name: `eval_loss`, or `eval_LABEL_loss` of each dataset. `eval_aux_loss` is a router's."""
    return {name: logs[name] for name in logs if re.fullmatch("eval_(.+_)?loss", name) and name != "eval_aux_loss"}


def logged_by_evaluations(log_history: list[dict], step: int) -> dict[str, float]:
    """What the evaluations after a step have logged."""
    logged = {}
    for entry in log_history:
        if entry["step"] == step:
            logged |= {name: value for name, value in entry.items() if name.startswith("eval_")}
    return logged


def own_metrics(logs: dict) -> dict[str, float]:
    """The numbers in logs that are neither a loss nor of transformers or SFTTrainer: those of `compute_metrics`, of TRL's other
    trainers, and what a recipe logs itself. Of an evaluation, their names begin with `eval_`.
    """
    is_evaluation = any(name.startswith("eval_") for name in logs)
    numbers = {name: value for name, value in logs.items() if type(value) in (int, float) and not KNOWN.fullmatch(name)}
    return {name: value for name, value in numbers.items() if name.startswith("eval_") == is_evaluation}


def metrics_of(results: dict) -> dict[str, float]:
    """The recipe's own metrics of the last evaluation, without those that say little alone."""
    names = [name for name in own_metrics(results) if name.startswith("eval_") and not name.endswith("_on_start")]
    return {name: results[name] for name in names if not LITTLE_ALONE.fullmatch(name)}


def format_metrics(metrics: dict[str, float]) -> str:
    """Metrics in words, without those that say little alone."""
    return ", ".join(f"{name} {value:.5g}" for name, value in metrics.items() if not LITTLE_ALONE.fullmatch(name))
