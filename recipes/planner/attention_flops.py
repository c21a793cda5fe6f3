"""FLOPs of FlashAttention over the documents of packed rows, and of linear attention, where torch's formulas are not enough."""

from typing import Any

from harness.compat.guards import expected_names

import torch

with expected_names():
    from torch.utils.flop_counter import _offsets_to_lengths


def flops_of_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    *options: Any,
    **out_val: torch.Tensor,
) -> int:
    """FLOPs of FlashAttention over documents: two products for every pair of a token and one that it attends to.

    torch's own formula counts all pairs of a document, also those that a causal mask leaves out.
    """
    # options: ends of the keys' documents, longest document of queries and of keys, is_causal, scale, window, …
    longest = options[1]
    window = options[5]
    return 4 * query.shape[1] * query.shape[2] * pairs_in_documents(ends, longest, window)


def flops_of_varlen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    ends: torch.Tensor,
    *options: Any,
    **out_val: torch.Tensor,
) -> int:
    """The scores once more, and two products for each of their two factors."""
    longest = options[1]
    window = options[-1]
    return 10 * query.shape[1] * query.shape[2] * pairs_in_documents(ends, longest, window)


def flops_of_solve(matrix: torch.Tensor, right: torch.Tensor, **options: Any) -> int:
    """FLOPs of triangular systems, which linear attention solves for every chunk of 64 tokens: half of those of a product."""
    return right.numel() * matrix.shape[-1]


def pairs_in_documents(ends: torch.Tensor, longest: int, window: list[int]) -> int:
    """How often a token attends to one of its document, with a window of so many tokens before and after it (-1: all).

    If the tensor is fake, all documents have the length of the longest, as in a simulated batch.
    """
    pairs = 0
    for tokens in _offsets_to_lengths(ends, longest):
        before, after = (tokens - 1 if limit < 0 else min(limit, tokens - 1) for limit in window)
        # The first tokens of a document have fewer before them, the last fewer after them.
        pairs += tokens * (1 + before + after) - (before * (before + 1) + after * (after + 1)) // 2
    return pairs
