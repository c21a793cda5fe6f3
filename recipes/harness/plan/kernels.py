"""CUDA's choice of kernels, on the CPU: what they keep for backward decides over memory. See `fakes`."""

import functools
import importlib
import types

import torch

# What CUDA's autocast computes in float32 and the CPU's does not (PyTorch's page on torch.amp lists both).
IN_FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "pow.Tensor_Scalar", "rsqrt", "exp", "log", "cumsum")


def as_on_cuda() -> torch.library.Library:
    """What CUDA would run where the CPU keeps more or less for backward."""
    functional, aten = torch.nn.functional, torch.ops.aten
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(module)._get_foreach_kernels_supported_devices = lambda: ["cpu", "cuda"]

    def dropout(input, p=0.5, training=True, inplace=False):
        return torch.native_dropout(input, p, True)[0] if training and p else input

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
        if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
            if attn_mask.shape[-1] % 8:
                attn_mask = functional.pad(attn_mask, (0, 8 - attn_mask.shape[-1] % 8))[..., : attn_mask.shape[-1]]
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        keep = torch.is_grad_enabled() and query.requires_grad
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, keep, dropout_p, is_causal, scale=scale)[0]

    functional.dropout, functional.scaled_dot_product_attention = dropout, attention

    library = torch.library.Library("aten", "IMPL")
    for name in IN_FLOAT32:
        operator = functools.reduce(getattr, name.split("."), aten)
        operator = operator.default if isinstance(operator, torch._ops.OpOverloadPacket) else operator
        library.impl(name, functools.partial(_in_float32, operator), "AutocastCPU")
    return library


def loss(ledger):
    """TRL's Triton kernels write into what they are given and keep nothing."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    def add_product(total, a, b):
        ledger.flops[str(a.dtype)] += 2 * a.shape[0] * a.shape[1] * b.shape[1]

    function = chunked_logprob.ChunkedLogProbFunction
    chunked_logprob._use_triton = utils._use_triton = lambda device: True
    chunked_logprob._forward_kernel = chunked_logprob._backward_kernel = Kernel()
    chunked_logprob._addmm_fp32 = add_product
    chunked_logprob.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    for name in ("forward", "backward"):
        setattr(function, name, staticmethod(_of_loss(ledger, getattr(function, name))))


def _of_loss(ledger, function):
    def within(*arguments, **options):
        with ledger.within(holder="loss"):
            return function(*arguments, **options)

    return within


def _in_float32(operator, *arguments, **options):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        low = (torch.bfloat16, torch.float16)
        arguments = [a.float() if isinstance(a, torch.Tensor) and a.dtype in low else a for a in arguments]
        return operator(*arguments, **options)
