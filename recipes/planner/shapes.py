"""What the shapes of a model say about memory: arithmetic that a simulation is checked with."""

import math
from collections.abc import Iterable

from harness.compat.guards import changes

import torch

Shapes = dict[str, tuple[tuple[int, ...], int, bool]]  # name: shape, bytes per element, trained or not


def shapes_of(model: torch.nn.Module) -> Shapes:
    """The shapes of all parameters, before sharding."""
    return {name: (tuple(w.shape), w.element_size(), w.requires_grad) for name, w in model.named_parameters()}


def expected_bytes(shapes: Shapes, shards: int, upcast: bool) -> dict[str, int]:
    """Bytes on one process. FSDP2 cuts the first dimension, rounded up; with `upcast` trained weights are float32."""
    weights = trained = 0
    for shape, element_size, is_trained in shapes.values():
        elements = math.ceil(shape[0] / shards) * math.prod(shape[1:]) if shape else 1
        size = elements * (4 if upcast and is_trained else element_size)
        weights += size
        trained += size if is_trained else 0
    return {"weights": weights, "gradients": trained, "optimizer": 2 * trained}


@changes("torch:UntypedStorage._cdata")
def check_bytes(what: str, tensors: Iterable[torch.Tensor], expected: int) -> None:
    """Raises RuntimeError unless `tensors` hold `expected` bytes; tensors at the same place count once.

    The address of a storage is private, and a fake storage has no `data_ptr`.
    Upstream: no issue: there is no public name.
    Checked with: torch 2.13.0.
    Remove when: there is one.
    """
    held = sum({(t.untyped_storage()._cdata, t.storage_offset()): t.nbytes for t in tensors if t.numel()}.values())
    if held != expected:
        raise RuntimeError(
            f"the simulation holds {held:,} bytes of {what}, but the shapes give {expected:,}: something was not simulated as it "
            "runs, so there is no plan"
        )
