"""Changes to TRL."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from harness.compat.guards import changes
from harness.compat.peft import merge_for_generation
from harness.compat.transformers import convert_masks_once

import torch
from torch.distributed.fsdp import register_fsdp_forward_method


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

    _replace_in_trainers(disable_gradient_checkpointing)


@changes("trl.models.utils:unwrap_model_for_generation")
def generate_in_evaluation_mode() -> None:
    """Makes trainers generate in evaluation mode, with a merged adapter, and under FSDP until the last process is done.

    They turn activation checkpointing off, because the cache of keys and values is not compatible with it, and on again, which
    adds hooks that are never removed: see `keep_activation_checkpointing`. In evaluation mode layers do not use it. FSDP2
    gathers the weights of the outermost module for its `forward` only, which `generate` of an adapter does not call. A process
    whose answers end first must go on, because the others all-gather weights from it; transformers knows that of FSDP1 only.
    Upstream: no issue found.
    Checked with: trl 1.16.0, transformers 5.23.0.
    Remove when: `unwrap_model_for_generation` restores what it found, and `generate` sets `synced_gpus` for FSDP2.
    """

    @contextlib.contextmanager
    def unwrap_model_for_generation(model: Any, accelerator: Any, **options: Any) -> Iterator[Any]:
        unwrapped = accelerator.unwrap_model(model)
        is_training = unwrapped.training
        unwrapped.eval()
        generate = unwrapped.generate
        if accelerator.is_fsdp2:
            if "generate" not in vars(unwrapped):  # `Trainer.train` registers it, `Trainer.evaluate` does not
                register_fsdp_forward_method(unwrapped, "generate")
                generate = unwrapped.generate
            unwrapped.generate = functools.partial(generate, synced_gpus=accelerator.num_processes > 1)
        try:
            with merge_for_generation(unwrapped, accelerator), convert_masks_once():
                yield unwrapped
        finally:
            if accelerator.is_fsdp2:
                unwrapped.generate = generate
            unwrapped.train(is_training)

    _replace_in_trainers(unwrap_model_for_generation)


@changes(
    "trl:GRPOTrainer._calculate_rewards(self, inputs, prompts, completions, completion_ids_list)",
    "trl:RLOOTrainer._calculate_rewards(self, inputs, prompts, completions, completion_ids_list)",
)
def rewards_of(trainer: Any, rows: list[dict], answers: list[str]) -> torch.Tensor:
    """The rewards of an answer to the prompt of each row, a column for each function; NaN: it does not rate the answer.

    Upstream: no issue: there is no public name.
    Checked with: trl 1.16.0.
    Remove when: there is one.
    """
    prompts = [row["prompt"] for row in rows]
    completions: list[Any] = answers
    if isinstance(prompts[0], list):
        completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    ids = [trainer.processing_class(answer)["input_ids"] for answer in answers]
    return trainer._calculate_rewards(rows, prompts, completions, ids).cpu()


def _replace_in_trainers(function: Callable) -> None:
    """Replaces the function of this name in the modules of TRL's trainers that have been imported."""
    for module in [module for name, module in sys.modules.items() if name.startswith("trl.trainer.")]:
        if function.__name__ in vars(module):
            setattr(module, function.__name__, function)


@changes("trl:SFTTrainer.log(self, logs, start_time)", "trl:DPOTrainer.log(self, logs, start_time)")
def logged_metrics(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """The metrics of a trainer of TRL since its last log, by "train" and "eval": a value for each batch. {} of other trainers.

    It logs the mean of these values, in which the tokens of a short batch count more.
    Upstream: no issue found for the metrics.
    Checked with: trl 1.16.0.
    Remove when: the trainers log means over tokens and pairs.
    """
    return getattr(trainer, "_metrics", {})
