"""By what a step's loss is divided: the number of its tokens, or the number of its micro-batches."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

from harness.run.parameters import base_of

from transformers import Trainer

COUNT = "num_items_in_batch"


def set_loss_scale(trainer: Trainer) -> None:
    """Makes the loss of a step the mean of its micro-batches where whatever computes it ignores the number of tokens.

    transformers 5.23 passes `num_items_in_batch` to every model whose `forward` has **kwargs, and takes the result for a sum that
    was divided by it. Most classifiers, encoder-decoders and masked language models ignore it and return a mean: their loss and
    gradients were multiplied by the gradient accumulation steps and the number of processes. The same is true of a
    `compute_loss_func`, and of the accumulation with a `compute_loss` of the recipe's own.

    It passes no number to most classes that read images too, such as Qwen3.5's: the loss would be a mean of means, and a token
    of a short row would count more. Those that pass it on to their loss get it.
    """
    if trainer.loss_is_scaled_for_ga is not None:  # the recipe says it
        return
    compute_loss = trainer.compute_loss
    if getattr(compute_loss, "__func__", compute_loss) is not Trainer.compute_loss:
        if uses_count(compute_loss) is False:
            trainer.loss_is_scaled_for_ga = False
        if "super().compute_loss" not in _source_of(compute_loss):
            return
    if trainer.compute_loss_func is not None:
        if uses_count(trainer.compute_loss_func) is False:
            trainer.loss_is_scaled_for_ga = trainer.args.average_tokens_across_devices = False
        return
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    uses = uses_count(model.forward)
    if uses is not None:
        trainer.model_accepts_loss_kwargs = uses


def uses_count(function: Callable) -> bool | None:
    """Whether a function that computes a loss divides it by the number of tokens; None if its source does not show it.

    It does if it names the number, or passes its keyword arguments on to a loss. It does not if it computes a loss without.
    """
    try:
        body = ast.parse(_source_of(function)).body[0].body
    except (SyntaxError, IndexError, AttributeError):  # no source, or a lambda within a line
        return None
    nodes = [node for statement in body for node in ast.walk(statement)]
    if any(COUNT in (getattr(node, "id", ""), getattr(node, "arg", ""), getattr(node, "value", "")) for node in nodes):
        return True
    losses = [node for node in nodes if isinstance(node, ast.Call) and _is_loss(node)]
    if any(keyword.arg is None for call in losses for keyword in call.keywords):
        return True
    return False if losses else None


def _is_loss(call: ast.Call) -> bool:
    name = ast.unparse(call.func).lower()
    return "loss" in name or "cross_entropy" in name


def _source_of(function: Callable) -> str:
    function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
