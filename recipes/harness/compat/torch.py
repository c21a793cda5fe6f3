"""Changes to PyTorch, and private names of it."""

import ctypes
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

from harness.compat.guards import changes
from harness.messages import UserError

import torch


@functools.cache  # once per process; the cache keeps the library, whose end would be that of the kernels
@changes("torch.library:get_kernel(op, dispatch_key)")
def multiply_in_float32() -> torch.library.Library:
    """From here on this process multiplies bf16 and fp16 matrices on CPU in float32, and rounds the product once, as a GPU does.

    A CPU without arithmetic for these dtypes needs 10 to 20 times as long for such a product as for a float32 one, so most of the
    time of a rehearsal would go there.
    Upstream: pytorch/pytorch#146508.
    Checked with: torch 2.13.0.
    Remove when: such products are as fast as float32 ones on any CPU.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*overridden", category=UserWarning)
        for name in ("mm", "mm.out", "addmm", "bmm"):
            library.impl(name, _product_in_float32(f"aten::{name}"), "CPU", with_keyset=True)
    return library


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


@changes(
    "torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync(self, requires_gradient_sync, recurse)",
    "torch.distributed.fsdp:FSDPModule.set_reshard_after_backward(self, reshard_after_backward, recurse)",
)
def gather_once_per_step(model: Any) -> None:
    """All-gathers the weights of a sharded model once per optimizer step: they stay unsharded to its last micro-batch.

    accelerate already delays the reduction of gradients until the last micro-batch; resharding now follows the same switch.
    Cost: the whole model in the compute dtype on every GPU.
    Upstream: no issue found; accelerate's `no_sync` calls the method that is replaced.
    Checked with: torch 2.13.0, accelerate 1.15.0.
    Remove when: accelerate has an option for it.
    """
    set_gradient_sync = model.set_requires_gradient_sync

    def set_sync_and_resharding(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        set_gradient_sync(requires_gradient_sync, recurse=recurse)
        model.set_reshard_after_backward(requires_gradient_sync, recurse=recurse)

    model.set_requires_gradient_sync = set_sync_and_resharding


@changes(
    "torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync(self, requires_gradient_sync, recurse)",
    "torch.distributed.fsdp:FSDPModule.set_requires_all_reduce(self, requires_all_reduce, recurse)",
)
def reduce_each_batch(model: Any) -> None:
    """Keeps accumulated gradients sharded: every micro-batch reduce-scatters its own, the last one all-reduces across replicas.

    Cost: a reduce-scatter per micro-batch. Otherwise FSDP keeps unsharded float32 gradients on every GPU until the step.
    Upstream: no issue found; accelerate's `no_sync` calls the method that is replaced.
    Checked with: torch 2.13.0, accelerate 1.15.0.
    Remove when: accelerate has an option for it.
    """
    model.set_requires_gradient_sync = model.set_requires_all_reduce


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
