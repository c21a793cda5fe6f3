"""Losses and metrics in the logs of a run. Imports no torch."""

import re

# What transformers, SFTTrainer and `Progress` log besides losses; of an evaluation with or without the label of a dataset.
KNOWN = re.compile(
    r"eval_(.+_)?(runtime|samples_per_second|steps_per_second|model_preparation_time|loss)"
    r"|(eval_)?(entropy|num_tokens|mean_token_accuracy|aux_loss)|train_\w+"
    r"|loss|grad_norm|learning_rate|epoch|step|total_flos|loss_scale|(tokens|rows)_per_second|num_input_tokens_seen"
)


def evaluation_losses(logs: dict) -> dict[str, float]:
    """The losses of evaluation datasets by label; "" for `eval_loss`. SFTTrainer's `eval_aux_loss` is that of a router."""
    found = {name: re.fullmatch(r"eval_(?:(.+)_)?loss", name) for name in logs if name != "eval_aux_loss"}
    return {match[1] or "": logs[name] for name, match in found.items() if match}


def own_metrics(logs: dict) -> dict[str, float]:
    """The numbers in logs that are neither a loss nor of transformers or SFTTrainer: those of `compute_metrics`, of TRL's other
    trainers, and what a recipe logs itself. Of an evaluation, their names begin with `eval_`.
    """
    is_evaluation = any(name.startswith("eval_") for name in logs)
    losses = {f"eval_{label}_loss" if label else "eval_loss" for label in evaluation_losses(logs)}
    return {
        name: value
        for name, value in logs.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name.startswith("eval_") == is_evaluation
        and name not in losses
        and not KNOWN.fullmatch(name)
    }


def metrics_of(results: dict) -> dict[str, float]:
    """The recipe's own metrics of the last evaluation, without those of DPO that say little alone."""
    of_evaluation = own_metrics({name: value for name, value in results.items() if name.startswith("eval_")})
    return {
        name: value for name, value in of_evaluation.items() if format_metrics({name: value}) and not name.endswith("_on_start")
    }


def format_metrics(metrics: dict[str, float]) -> str:
    """Metrics of a recipe's own, in words; without DPO's log-probabilities and logits, which say little alone."""
    shown = {name: value for name, value in metrics.items() if not name.removeprefix("eval_").startswith(("logps/", "logits/"))}
    return ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in shown.items())
