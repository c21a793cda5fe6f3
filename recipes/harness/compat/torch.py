"""Changes to PyTorch, and private names of it."""

import functools
import pickle
import warnings
from collections.abc import Callable
from pickle import _Unpickler as PythonUnpickler
from typing import Any, ClassVar

from harness.compat.guards import changes

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


@changes("torch._C:_accelerator_setAllocatorSettings")
def set_allocator_settings(settings: str) -> None:
    """Sets how PyTorch allocates memory, as PYTORCH_ALLOC_CONF has it, which is only read before CUDA starts.

    Upstream: no issue: there is no public name.
    Checked with: torch 2.13.0.
    Remove when: there is one.
    """
    torch._C._accelerator_setAllocatorSettings(settings)


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


class Refused(Exception):
    """The name of what a file would call."""


class CheckedUnpickler(PythonUnpickler):
    """Unpickles what only uses allowed names, and runs no code.

    A pickle can also set attributes, such as the methods of an allowed class. Only the methods of Python's own unpickler can be
    overridden; the one in C does the same. Checked with: Python 3.11, 3.12 and 3.13.
    """

    dispatch: ClassVar = dict(PythonUnpickler.dispatch)

    def __init__(self, file: Any, is_allowed: Callable[[str, str], bool]) -> None:
        super().__init__(file)
        self.is_allowed = is_allowed  # (module, name) -> whether a pickle may use it

    def load_build(self) -> None:
        target = self.stack[-2]
        if not self.is_allowed(type(target).__module__, type(target).__name__):
            raise Refused(f"attributes of {target!r:.100}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if self.is_allowed(module, name):
            return super().find_class(module, name)
        raise Refused(f"{module}.{name}")
