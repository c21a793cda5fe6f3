"""Changes to PyTorch, and private names of it."""

import ctypes
import datetime
import functools
import itertools
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from harness.compat.guards import changes
from harness.launched import UserError

import torch

# Kernels that replace PyTorch's as long as this object lives.
FLOAT32_PRODUCTS = torch.library.Library("aten", "IMPL")


@functools.cache  # once per process
@changes("torch.library:get_kernel(op, dispatch_key)")
def multiply_in_float32() -> None:
    """From here on this process multiplies bf16 and fp16 matrices on CPU in float32, and rounds the product once, as a GPU does.

    A CPU without arithmetic for these dtypes needs 10 to 20 times as long for such a product as for a float32 one, so most of the
    time of a rehearsal would go there.
    Upstream: pytorch/pytorch#146508.
    Checked with: torch 2.13.0.
    Remove when: such products are as fast as float32 ones on any CPU.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*overridden", category=UserWarning)
        for name in ("mm", "mm.out", "addmm", "bmm"):
            FLOAT32_PRODUCTS.impl(name, _product_in_float32(f"aten::{name}"), "CPU", with_keyset=True)


def _product_in_float32(name: str) -> Callable[..., torch.Tensor]:
    kernel = torch.library.get_kernel(name, "CPU")

    def multiply(keys: Any, *factors: torch.Tensor, **options: Any) -> torch.Tensor:
        dtype = factors[-1].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return kernel.call_boxed(keys, *factors, **options)
        factors = [factor.float() for factor in factors]
        if "out" in options:
            return options["out"].copy_(torch.mm(*factors))
        return kernel.call_boxed(keys, *factors, **options).to(dtype)

    return multiply


@changes("torch.distributed.fsdp:CPUOffloadPolicy.__init__(self, pin_memory)")
def offload_to_unpinned_memory() -> None:
    """Makes FSDP2's CPU offload use ordinary memory. For rehearsals on CPU.

    Pinned memory is memory that a GPU can reach. Without a GPU it cannot be allocated, and accelerate passes no value for
    `pin_memory`.
    Upstream: no issue found.
    Checked with: torch 2.13.0, accelerate 1.15.0.
    Remove when: accelerate has an option for it.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    CPUOffloadPolicy.__init__.__defaults__ = (False,)


@changes("torch.distributed.distributed_c10d:_set_pg_timeout(timeout, group)")
def set_gloo_timeout(seconds: float) -> None:
    """Sets the timeout of the default process group.

    transformers passes --ddp_timeout to the process group of NCCL only; a rehearsal on gloo would wait for 30 minutes
    whatever the flag says.
    Upstream: no issue found.
    Checked with: torch 2.13.0, transformers 5.23.0.
    Remove when: TrainingArguments passes ddp_timeout with use_cpu too.
    """
    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))


@changes("torch.utils.data._utils.signal_handling:_set_worker_signal_handlers")
def keep_data_workers_after_sigterm() -> None:
    """Makes the workers of a DataLoader ignore SIGTERM. They still exit with the process that started them.

    A worker exits when it gets SIGTERM, and then torch raises RuntimeError in the training process, at any line. So a SIGTERM to
    a whole process group would end a run before it can write its checkpoint.
    Upstream: no issue found.
    Checked with: torch 2.13.0.
    Remove when: Trainer accepts a `worker_init_fn`.
    """
    from torch.utils.data._utils import signal_handling

    set_handlers = signal_handling._set_worker_signal_handlers

    def set_handlers_and_ignore_sigterm() -> None:
        set_handlers()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    signal_handling._set_worker_signal_handlers = set_handlers_and_ignore_sigterm


@changes("torch.cuda:_is_in_bad_fork")
def can_use_gpu_after_fork() -> bool:
    """Whether a fork of this process could use a GPU.

    CUDA does not survive a fork once it was initialized, and counting GPUs can be enough. Only a forked process knows.
    Upstream: documented in PyTorch's notes on multiprocessing; there is no public way to ask.
    Checked with: torch 2.13.0.
    Remove when: torch.cuda has a public function for it.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] == 0


@changes("torch.distributed.rendezvous:_torchelastic_use_agent_store()")
def use_store_of_launcher() -> dict[str, str]:
    """Environment variables that make the processes connect to the store of their launcher at MASTER_ADDR:MASTER_PORT.

    Without them the process with rank 0 opens the store and closes it when it exits, while the others may still use it:
    they print tracebacks after a run that ended well.
    Upstream: no issue found; pytorch/pytorch#128096 describes the cause.
    Checked with: torch 2.13.0.
    Remove when: `init_process_group("env://")` has a documented way to join an existing store.
    """
    return {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@changes("torch:_C")
def hide_store_warnings() -> None:
    """Hides the C++ log of this process up to errors, unless TORCH_CPP_LOG_LEVEL is set.

    A TCPStore that gets a wrong answer or loses its connection prints a warning with 20 C++ stack frames, for each attempt.
    torch reads TORCH_CPP_LOG_LEVEL when it is imported, so that processes forked later would have no log either.
    Upstream: no issue found.
    Checked with: torch 2.13.0.
    Remove when: torch has a function that sets the level of this log, or TCPStore leaves it to its exceptions.
    """
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    except ValueError as error:
        raise UserError(
            f"torch {torch.__version__} has no FLAGS_caffe2_log_level, which hide_store_warnings in harness/compat/torch.py "
            "needs: install the versions of requirements.txt"
        ) from error
    level.value = 3  # FATAL


@changes(
    "torch.nn.attention.varlen:_varlen_attn_fake(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, "
    "window_size, enable_gqa, seqused_k, block_table, num_splits)",
    "torch.nn.attention.varlen:_varlen_attn_backward_fake(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, "
    "max_k, is_causal, rng_state, scale, window_size)",
    "torch.nn.attention.varlen:_varlen_attn.register_kernel",
    "torch.nn.attention.varlen:_varlen_attn_backward.register_kernel",
)
def compute_varlen_attention_on_cpu() -> None:
    """Gives `torch.nn.attention.varlen.varlen_attn` a CPU kernel, with one SDPA per document. For rehearsals.

    It refuses what the CUDA kernel refuses, except float32, so that a rehearsal fails where a GPU would.
    Upstream: no issue found; the function is documented for CUDA only.
    Checked with: torch 2.13.0.
    Remove when: it has a CPU kernel.
    """
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu", _attend_on_cpu)
    varlen._varlen_attn_backward.register_kernel("cpu", _attend_backward_on_cpu)


def _documents(ends: torch.Tensor, window: list[int], *tensors: torch.Tensor) -> Iterator[tuple]:
    """For each document its mask (None if every token attends to all) and its part of each tensor, with the heads first."""
    left, right = window
    for start, end in itertools.pairwise(ends.tolist()):
        length = end - start
        mask = None if left < 0 and right < 0 else torch.ones(length, length, dtype=torch.bool)
        if right >= 0:
            mask.tril_(right)
        if left >= 0:
            mask.triu_(-left)
        yield mask, *(tensor[start:end].transpose(0, 1) for tensor in tensors)


def _check_as_on_cuda(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, max_q: int) -> None:
    """Raises ValueError for what CUDA's kernel refuses."""
    head_dim, ends = query.shape[-1], cu_seq_q.tolist()
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    requirements = {
        "query, key and value have one dtype": query.dtype == key.dtype == value.dtype,
        "query, key and value have one head size": key.shape[-1] == value.shape[-1] == head_dim,
        "the head size is a multiple of 8, at most 256": head_dim % 8 == 0 and head_dim <= 256,
        "heads are contiguous": query.stride(-1) == key.stride(-1) == value.stride(-1) == 1,
        "the ends of documents are int32": cu_seq_q.dtype == torch.int32,
        "the documents are all tokens": ends[0] == 0 and ends[-1] == len(query) == len(key) and max(lengths) <= max_q,
    }
    for requirement, is_met in requirements.items():
        if not is_met:
            raise ValueError(f"varlen_attn on CUDA needs that {requirement}")


def _attend_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass of varlen attention: SDPA for one document after the other. Query: (tokens, heads, head size)."""
    _check_as_on_cuda(query, key, value, cu_seq_q, max_q)
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = []
    for mask, *document in _documents(cu_seq_q, window_size or [-1, -1], query, key, value):
        q, k, v = (part[None] for part in document)
        if is_causal:
            part = attend(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            part = attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    logsumexp = query.new_full((query.shape[1], len(query)), math.nan, dtype=torch.float32)  # the backward pass does without
    return torch.cat(parts), logsumexp, torch.zeros(2, dtype=torch.uint64)


def _attend_backward_on_cpu(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value: the softmax is computed again, one document after the other."""
    scale = scale or 1 / math.sqrt(query.shape[-1])
    gradients: tuple[list, list, list] = ([], [], [])
    for mask, *document in _documents(cu_seq_q, window_size or [-1, -1], grad_out, out, query, key, value):
        # A key head serves a group of query heads: (key heads, group or 1, tokens, head size).
        grad, output, q, k, v = (part.float().unflatten(0, (key.shape[1], -1)) for part in document)
        scores = scale * q @ k.mT
        weights = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)
        grad_scores = scale * weights * (grad @ v.mT - (grad * output).sum(-1, keepdim=True))
        parts = grad_scores @ k, (grad_scores.mT @ q).sum(1, keepdim=True), (weights.mT @ grad).sum(1, keepdim=True)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.append(part.flatten(0, 1).transpose(0, 1))
    return tuple(torch.cat(parts).to(query.dtype) for parts in gradients)
