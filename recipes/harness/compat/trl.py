"""Changes to TRL."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from harness.compat.guards import changes


@changes(
    "trl.kernels.chunked_logprob:_TRITON_AVAILABLE",
    "trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE",
)
def compute_loss_without_triton() -> None:
    """Computes TRL's loss in PyTorch, in tiles of 4,096 words of the vocabulary.

    TRL takes its Triton kernel whenever Triton is installed. It fails where Triton cannot compile (no C compiler) and on GPUs
    it does not support (T4). Its PyTorch code has tiles of 32,768 words, of which float32 keeps seven at a time: 2 x 256
    tokens of GPT-2 XL would need 470 MB, smaller tiles need 59 MB.
    Upstream: triton-lang/triton#10918 for the T4; no issue found for an option in TRL.
    Checked with: trl 1.16.0.
    Remove when: TRL has an option for it.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    chunked_logprob._TRITON_AVAILABLE = False
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = 4096


@changes("trl.models.utils:disable_gradient_checkpointing(model, gradient_checkpointing_kwargs)")
def keep_activation_checkpointing() -> None:
    """Makes trainers leave activation checkpointing as it is while they compute without gradients, where it saves nothing anyway.

    DPOTrainer, and three others, turn it off for the reference model and on again, in every micro-batch. Each time the model
    gets one more hook on its embedding, of which none is removed, and `offload` and `every_n_layers` of
    --activation_checkpointing_kwargs are passed to torch's function, which does not know them.
    Upstream: no issue found.
    Checked with: trl 1.16.0.
    Remove when: `disable_gradient_checkpointing` restores what it found.
    """

    @contextlib.contextmanager
    def disable_gradient_checkpointing(model: Any, gradient_checkpointing_kwargs: dict | None = None) -> Iterator[None]:
        yield

    for module in [module for name, module in sys.modules.items() if name.startswith("trl.trainer.")]:
        if "disable_gradient_checkpointing" in vars(module):
            module.disable_gradient_checkpointing = disable_gradient_checkpointing


@changes("trl:SFTTrainer.log(self, logs, start_time)", "trl:DPOTrainer.log(self, logs, start_time)")
def logged_metrics(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """The metrics of a trainer of TRL since its last log, by "train" and "eval": a value for each batch. {} of other trainers.

    It logs the mean of these values, in which the tokens of a short batch count more.
    Upstream: no issue found for the metrics.
    Checked with: trl 1.16.0.
    Remove when: the trainers log means over tokens and pairs.
    """
    return getattr(trainer, "_metrics", {})
