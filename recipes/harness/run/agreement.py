"""What all processes of a run agree on, in a gloo group of their own: without waiting for a GPU."""

import datetime

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed import ProcessGroup


def make_cpu_group(timeout: float) -> ProcessGroup | None:
    """A gloo group of all processes, in which they agree without waiting for a GPU; None for one process.

    `timeout` is the seconds that a process waits for the others. If the default group is a gloo group, it gets this timeout too:
    transformers passes `ddp_timeout` to NCCL only.
    """
    if PartialState().num_processes == 1:
        return None
    limit = datetime.timedelta(seconds=timeout)
    if dist.get_backend() == "gloo":
        dist.group.WORLD.set_timeout(limit)
    return dist.new_group(backend="gloo", timeout=limit)


def maximum(number: int, group: ProcessGroup | None) -> int:
    """The maximum of all processes' numbers. Collective."""
    if group is None:
        return number
    tensor = torch.tensor([number])
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor)


def make_group_for_failures() -> ProcessGroup | None:
    """A group for `all_failed`, in which a process waits 30 seconds for the others; None for one process."""
    if PartialState().num_processes == 1:
        return None
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=30))


def all_failed(group: ProcessGroup | None) -> bool:
    """Whether all processes have failed. Only those call this that have; False if the others do not in time."""
    try:
        maximum(1, group)
        return True
    except RuntimeError:
        return False
