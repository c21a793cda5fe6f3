"""FLOPs and workspace of FlashAttention, and FLOPs of linear attention, where torch's formulas are not enough."""

from typing import Any

from harness.compat.guards import expected_names

from torch import Tensor

with expected_names():
    from torch.utils.flop_counter import _offsets_to_lengths


def flops_of_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    *options: Any,
    **out_val: Tensor,
) -> int:
    """FLOPs of FlashAttention over documents: two products for every pair of a token and one that it attends to.

    torch's own formula counts all pairs of a document, also those that a causal mask leaves out.
    """
    # options: ends of the keys' documents, longest document of queries and of keys, is_causal, scale, window, …
    longest = options[1]
    window = options[5]
    return 4 * query.shape[1] * query.shape[2] * pairs_in_documents(ends, longest, window)


def flops_of_varlen_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    *options: Any,
    **out_val: Tensor,
) -> int:
    """The scores once more, and two products for each of their two factors."""
    longest = options[1]
    window = options[-1]
    return 10 * query.shape[1] * query.shape[2] * pairs_in_documents(ends, longest, window)


def flops_of_solve(matrix: Tensor, right: Tensor, **options: Any) -> int:
    """FLOPs of triangular systems, which linear attention solves for every chunk of 64 tokens: half of those of a product."""
    return right.numel() * matrix.shape[-1]


def pairs_in_documents(ends: Tensor, longest: int, window: list[int]) -> int:
    """How often a token attends to one of its document, with a window of so many tokens before and after it (-1: all).

    If the tensor is fake, all documents have the length of the longest, as in a simulated batch.
    """
    pairs = 0
    for tokens in _offsets_to_lengths(ends, longest):
        before, after = (tokens - 1 if limit < 0 else min(limit, tokens - 1) for limit in window)
        # The first tokens of a document have fewer before them, the last fewer after them.
        pairs += tokens * (1 + before + after) - (before * (before + 1) + after * (after + 1)) // 2
    return pairs


def flash_workspace(query: Tensor, key: Tensor, documents: int) -> int:
    """Bytes that the backward pass of FlashAttention-2 allocates and releases (mha_varlen_bwd in torch's flash_api.cpp).

    The gradient of the queries and a sum for each row of scores in float32, with 128 rows more per document; and the gradients
    of keys and values for every query head, if heads share them.
    """
    heads = query.shape[1]
    size = query.shape[-1]
    multiple = 64
    if size <= 128:
        multiple = 32
    rows = query.numel() // heads // size + 128 * documents
    own = 4 * rows * heads * (-(-size // multiple) * multiple + 1)
    if key.shape[1] == heads:
        return own
    return own + 2 * query.nbytes
