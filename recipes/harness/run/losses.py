"""What the loss of a trainer is a mean of, and how micro-batches add up to the loss of a step."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.messages import UserError, print_once
from harness.run.generation import trains_on_rewards
from harness.run.parameters import base_of

import torch
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import DPOConfig, KTOConfig, SFTTrainer


@dataclass
class Loss:
    """What the loss of a trainer is a mean of.

    TRL's trainers make the loss of a step such a mean themselves (`is_right`). Any other loss of a micro-batch is a mean over its
    tokens or rows: `share_of_step` weighs it, with any accumulation and number of processes.
    """

    own: str | None = None  # what computes it of the model's outputs; None: the model itself, or SFTTrainer without them
    unit: str = "row"  # or "token" (that has a label)
    is_right: bool = True
    shifts_labels: bool = False  # a token predicts the next one: the first label of a row is not in the loss
    is_cross_entropy: bool = False  # the mean negative log-likelihood of tokens, and nothing else
    is_of_library: bool = False  # transformers or TRL computes it, no code of the recipe

    def labels(self, batch: Any) -> torch.Tensor | None:
        """The labels in the loss, as transformers counts them; None for a batch without a tensor of labels."""
        labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            return None
        is_shifted = self.shifts_labels and "shift_labels" not in batch
        if is_shifted:
            return labels[..., 1:]
        return labels

    def tokens(self, batch: Any) -> torch.Tensor | None:
        """How many tokens of a batch have a label; None if no token has one, but each row, or none."""
        labels = self.labels(batch)
        if labels is None or labels.dim() < 2:
            return None
        return labels.ne(-100).sum()

    def share_of_step(self, trainer: Trainer, loss: torch.Tensor, tokens: torch.Tensor | None, of_step: Any) -> torch.Tensor:
        """What a micro-batch adds to the loss of its step. Of processes, the gradients are averaged, and losses in logs.

        `tokens` and `of_step`: those in the loss of the micro-batch, and of the step on all processes.
        """
        if self.unit == "row" or tokens is None or of_step is None:
            return loss / trainer.current_gradient_accumulation_steps
        return loss * (tokens * trainer.args.world_size / of_step)


def prepare_loss(trainer: Trainer) -> Loss:
    """Finds out what the loss of a trainer is a mean of, and keeps transformers from scaling it where `share_of_step` does.

    transformers 5.23 takes the loss of every model whose `forward` has **kwargs, of a `compute_loss_func` and of a
    `compute_loss` of the recipe's own for a sum that was divided by the tokens of the step. Most classifiers, encoder-decoders
    and masked language models return a mean instead, and so do many losses of recipes: their loss and gradients would be
    multiplied by the accumulation steps. A trainer whose class sets `loss_is_scaled_for_ga` scales its loss itself.
    Raises UserError for a loss whose steps would depend on the micro-batch.
    """
    check_loss_of_pairs(trainer)
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    loss = Loss(own_loss(trainer), is_cross_entropy=is_cross_entropy(trainer))
    is_of_sft = loss.own is None and isinstance(trainer, SFTTrainer)
    loss.is_of_library = is_of_sft or (loss.own is None and is_of_transformers(model))
    is_causal = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    loss.shifts_labels = is_of_sft or (is_causal and not is_encoder_decoder)
    is_over_rows = trainer.loss_is_scaled_for_ga is False or getattr(trainer, "loss_is_mean_over", None) == "rows"
    loss.unit = "row" if is_over_rows or trains_on_rewards(trainer) else "token"
    loss.is_right = is_of_sft or trainer.loss_is_scaled_for_ga is not None
    if is_of_sft or not loss.is_right:
        trainer.model_accepts_loss_kwargs = True  # so that transformers counts the tokens of a step
    if not loss.is_right:
        trainer.loss_is_scaled_for_ga = True
    return loss


def check_loss_of_pairs(trainer: Trainer) -> None:
    """Raises UserError for a loss of pairs of which a part is a mean over tokens: a step would depend on the micro-batch.

    Prints a warning for a loss that compares the rows of a micro-batch with each other, as KTO does.
    """
    args = trainer.args
    sizes = (args.per_device_train_batch_size, args.per_device_eval_batch_size)
    if isinstance(args, DPOConfig) and "sft" in args.loss_type and sizes != (1, 1):
        raise UserError(
            "--loss_type sft is a mean over the tokens of a micro-batch, the others are means over its pairs, so a step would "
            "depend on the micro-batch: pass --per_device_train_batch_size 1 --per_device_eval_batch_size 1"
        )
    kinds = args.loss_type if isinstance(args, DPOConfig | KTOConfig) else []
    if "kto" in kinds or "aot" in kinds or "aot_unpaired" in kinds:
        print_once(
            "warning: --loss_type: this loss compares the rows of a micro-batch with each other. It depends on "
            "--per_device_train_batch_size, and that of an evaluation on --per_device_eval_batch_size and the number of processes"
        )


def check_unit(trainer: Trainer, loss: Loss, tokens: torch.Tensor | None) -> None:
    """Raises UserError for a loss of tokens that may be a mean over them or over rows: steps could be weighed wrongly."""
    if tokens is None:
        loss.unit = "row"
    elif not loss.is_of_library and getattr(trainer, "loss_is_mean_over", None) not in ("tokens", "rows"):
        raise UserError(
            f"{loss.own or type(trainer.model).__name__}: is the loss of a micro-batch the mean over its tokens or its rows? Set "
            'loss_is_mean_over = "tokens" or "rows" in the class of the trainer, or on the trainer before train(). A sum that is '
            "divided by num_items_in_batch is a mean over tokens"
        )


def own_loss(trainer: Trainer) -> str | None:
    """What computes the loss of the model's outputs; None if the model itself does, or SFTTrainer, which needs no outputs."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    compute_loss = getattr(trainer.compute_loss, "__func__", trainer.compute_loss)
    if compute_loss in (Trainer.compute_loss, SFTTrainer.compute_loss):
        return None
    return "compute_loss"


def is_cross_entropy(trainer: Trainer) -> bool:
    """Whether the loss is certainly the mean negative log-likelihood of tokens.

    It is not with DPO, classifiers, DFT, label smoothing and a loss of the recipe's own, which could add anything to it.
    """
    args = trainer.args
    model = base_of(trainer.accelerator.unwrap_model(trainer.model))
    if own_loss(trainer) or args.label_smoothing_factor or "nll" not in getattr(args, "loss_type", "nll"):
        return False
    if isinstance(trainer, SFTTrainer):
        return True
    adds_router_loss = getattr(getattr(model, "config", None), "output_router_logits", False)
    is_causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return is_of_transformers(model) and is_causal and not adds_router_loss


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether the loss that a model returns is computed by transformers' own code."""
    return type(model).forward.__module__.startswith("transformers.")


@contextlib.contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    """In this context, `value` is the attribute `name` of `holder`."""
    before = getattr(holder, name, None)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
