"""Changes to PyTorch, and private names of it."""

import datetime
import os
from typing import Any

from harness.compat.guards import changes, expected_names

import torch

with expected_names():
    from torch.utils._python_dispatch import TorchDispatchMode


@changes("torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__(self, func, types, args, kwargs)")
def multiply_fp16_in_float32() -> None:
    """From here on this process multiplies fp16 matrices in float32 and rounds the result, as a GPU does.

    A CPU without fp16 arithmetic needs 20 times as long for an fp16 product as for a float32 one, so a rehearsal of an fp16
    recipe would take minutes.
    Upstream: pytorch/pytorch#146508.
    Checked with: torch 2.13.0.
    Remove when: fp16 products on CPU are as fast as float32 ones.
    """
    Fp16ProductsInFloat32().__enter__()  # never left: it is for the rest of the process


class Fp16ProductsInFloat32(TorchDispatchMode):
    """See `multiply_fp16_in_float32`."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in self.PRODUCTS and args[-1].dtype == torch.float16:
            return func(*(factor.float() for factor in args), **(kwargs or {})).half()
        return func(*args, **(kwargs or {}))


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
