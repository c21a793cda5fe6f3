"""Trainers that generate, such as GRPO, RLOO and distillation: the texts that a GPU makes for a step, and their cache.

The model answers all prompts of a step at once: one forward pass over the prompts makes the cache of keys and values, and one
forward pass for each token adds to it.
"""

from typing import Any

from planner.ledger import Ledger

import torch
from transformers import Cache, Trainer, TrainingArguments
from trl import RLOOTrainer

PROMPT = 256  # tokens, where the rows of the dataset are not known


def generates(args: TrainingArguments) -> bool:
    return getattr(args, "max_completion_length", None) is not None


def count_scoring_passes(trainer: Trainer) -> int:
    """Forward passes that score generated texts before the training: of the reference model, and of the model itself in RLOO."""
    if not hasattr(trainer.args, "num_generations"):  # a teacher sees them during the training
        return 0
    return bool(trainer.args.beta) + isinstance(trainer, RLOOTrainer)


def batch_of_texts(args: TrainingArguments, rows: int, prompt: int) -> dict[str, torch.Tensor]:
    """A micro-batch as the trainers make it of generated texts, each of the maximum length after a prompt of so many tokens."""
    completion = args.max_completion_length
    prompts = torch.ones((rows, prompt), dtype=torch.long)
    completions = torch.ones((rows, completion), dtype=torch.long)
    return {
        "input_ids": torch.ones((rows, prompt + completion), dtype=torch.long),  # no trainer reads them
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": completions,
        "completion_mask": completions,
        "num_items_in_batch": torch.tensor(float(rows * completion)),
        "advantages": torch.ones(rows),
        "old_logps": torch.ones(rows),
        "ref_per_token_logps": torch.ones((rows, completion)),
    }


def extend_cache(cache: Cache, tokens: int, ledger: Ledger) -> None:
    """Adds so many tokens to a cache of keys and values, as generating them would."""
    for index, layer in enumerate(cache.layers):
        if is_growing(layer):
            cache.update(new_tokens(layer.keys, tokens), new_tokens(layer.values, tokens), index)
    mark_cache(cache, ledger)


def mark_cache(cache: Cache, ledger: Ledger) -> None:
    for layer in cache.layers:
        if is_growing(layer):
            ledger.mark(layer.keys, "cache")
            ledger.mark(layer.values, "cache")


def is_growing(layer: Any) -> bool:
    """Whether a layer of a cache has keys and values: linear attention keeps no more for more tokens."""
    return isinstance(getattr(layer, "keys", None), torch.Tensor)


def new_tokens(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    rows, heads, _, size = tensor.shape
    return tensor.new_empty((rows, heads, tokens, size))
