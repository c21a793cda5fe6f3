"""Lets accelerate shard on CPU, over gloo, so that a rehearsal shards for real on a machine without GPUs.

accelerate 1.15 knows FSDP on accelerators only: on CPU the same YAML gives plain data parallelism, or nothing, without
an error. FSDP2 itself runs on CPU. So accelerate is told that it has GPUs, and that their device is the CPU.
"""

import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def enable():
    """To be called before the first `PartialState` is made. Training arguments then need `use_cpu=True`."""
    from accelerate.state import DistributedType, PartialState
    from torch.distributed.fsdp import CPUOffloadPolicy

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    initialize = PartialState.__init__

    # transformers asks for `cpu=True` and a backend of its own, which would both lead to plain data parallelism.
    def without_cpu_branch(self, cpu=False, backend=None, **kwargs):
        initialize(self, **kwargs)

    PartialState.__init__ = without_cpu_branch
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    CPUOffloadPolicy.__init__.__defaults__ = (False,)  # pinned memory is memory a GPU can reach; there is none


def keep_4bit_layout():
    """To be called before 4-bit layers are made.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks the weights in the first evaluation, into a layout that training
    and FSDP then misread: the loss jumps.
    """
    from bitsandbytes.nn import modules

    modules.has_avx512bf16 = lambda: False


class Fp16InFloat32(TorchDispatchMode):
    """Multiplies fp16 matrices in float32 and rounds the result, as a GPU does; a CPU without fp16 takes 20 times as long."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.PRODUCTS and args[-1].dtype == torch.float16:
            return function(*(factor.float() for factor in args), **(kwargs or {})).half()
        return function(*args, **(kwargs or {}))
