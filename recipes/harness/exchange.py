"""Values that the processes of a run tell each other, as JSON: `gather_object` and the like unpickle what comes over the network.

Tuples become lists. Both functions are collective.
"""

import json
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

T = TypeVar("T")


def gather_values(value: T) -> list[T]:
    """The values of all processes, by rank."""
    if not are_several():
        return [json.loads(json.dumps(value))]
    own = _as_tensor(value)
    sizes = [torch.zeros(1, dtype=torch.long, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device))
    padded = torch.nn.functional.pad(own, (0, int(max(sizes)) - len(own)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [_from_tensor(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def value_of_first(value: T) -> T:
    """The value of the process with rank 0, on all processes."""
    return gather_values(value)[0]


def are_several() -> bool:
    """Whether a run has several processes, which are connected."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(PartialState().device)


def _from_tensor(content: torch.Tensor) -> Any:
    return json.loads(bytes(content.cpu().numpy()))
