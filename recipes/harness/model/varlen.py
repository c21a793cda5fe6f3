"""`varlen`, an attention of transformers in which tokens attend to their own document only: PyTorch's FlashAttention-2."""

import itertools
from typing import Any

from harness.messages import UserError
from harness.model.gpu_features import VARLEN

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

MAX_HEAD_SIZE = 256  # of FlashAttention-2, also of the one in PyTorch (Dao-AILab/flash-attention#2427)
REFUSED = ("dropout", "softcap", "s_aux", "position_bias")  # arguments of attention functions that `varlen_attn` does not have


def register_varlen() -> None:
    """Makes `varlen` an attention implementation of transformers, in this process."""
    AttentionInterface.register(VARLEN, attend_within_documents)
    AttentionMaskInterface.register(VARLEN, mask_between_documents)


def attend_within_documents(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `varlen`.

    Tensors are (1, heads, tokens, head size). `cu_seq_lens_q` has the ends of the documents; TRL's collator makes it, for
    training and for evaluation. Without it, as in `generate`, this is SDPA.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is None or query.shape[2] != key.shape[2]:
        if module.training:
            raise UserError(
                f"--attn_implementation {VARLEN}: {type(module).__name__} got no lengths of documents, so they would attend to "
                "each other: pass --attn_implementation sdpa"
            )
        if attention_mask is None and sliding_window and query.shape[2] > sliding_window:
            attention_mask = mask_of_window(query.shape[2], sliding_window - 1, 0, query.device)
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **options)
    given = options | {"dropout": dropout or None}
    for name in REFUSED:
        if given.get(name) is not None:
            raise UserError(f"--attn_implementation {VARLEN} has no {name}, which this model needs: pass another one")
    device = query.device.type
    size = value.shape[-1]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))  # of latent attention, value heads are smaller
    tokens = [tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    # A token and the `sliding_window - 1` before it.
    window = (sliding_window - 1 if sliding_window else -1, 0 if is_causal else -1)
    if device == "cpu" and type(query) is torch.Tensor:  # not a fake tensor of --plan
        output = attend_on_cpu(*tokens, cu_seq_lens_q, scaling, window)
    else:
        output = varlen_attn(
            *tokens, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=window, enable_gqa=True
        )
    return output[None, ..., :size], None


def mask_between_documents(
    attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **options: Any
) -> torch.Tensor | None:
    """The mask for `attend_within_documents`: none for documents without padding, otherwise that of SDPA."""
    if attention_mask is None and options["q_length"] == options["kv_length"] and not use_vmap:
        return None
    return AttentionMaskInterface()["sdpa"](attention_mask=attention_mask, use_vmap=use_vmap, **options)


def attend_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """What `varlen_attn` computes, for rehearsals: it has no CPU kernel. Tensors are (tokens, heads, head size)."""
    outputs = []
    options = {"is_causal": window == (-1, 0), "scale": scale, "enable_gqa": True}
    for start, end in itertools.pairwise(ends.tolist()):
        document = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        mask = mask_of_window(end - start, *window) if window[0] >= 0 else None
        output = torch.nn.functional.scaled_dot_product_attention(*document, mask, **options)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def mask_of_window(length: int, before: int, after: int, device: torch.device | None = None) -> torch.Tensor:
    """Which tokens of a document attend to which: to so many before and after them, -1 for all."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    mask = mask.triu(-before) if before >= 0 else mask
    if after >= 0:
        return mask.tril(after)
    return mask
