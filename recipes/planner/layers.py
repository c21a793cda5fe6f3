"""Extends the memory of a model with few layers to that of all: each layer more adds as much as the one before it.

A run with n layers and one with n + 1 have the same kinds of allocations. What is held after the largest one of each kind is a
straight line in the number of layers.
"""

from planner.ledger import Held

import torch

FEW = (4, 5)  # layers that are simulated
FEWEST = 8  # layers of a model for which this pays
SMALL = 2**20  # bytes


def equal_layers(model: torch.nn.Module) -> torch.nn.ModuleList | None:
    """The list of a model's layers, None unless it is the only long one and all of its layers are alike."""
    lists = []
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) >= FEWEST:
            lists.append(module)
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if len(lists) != 1 or len(set(kinds or [])) > 1:
        return None
    (layers,) = lists
    first = weights_of(layers[0])
    for layer in layers:
        if weights_of(layer) != first:
            return None
    return layers


def weights_of(layer: torch.nn.Module) -> list[tuple]:
    """What is compared of two layers."""
    weights = layer.named_parameters()
    return [(name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in weights]


def extend(few: dict[tuple, Held], more: dict[tuple, Held], added: int) -> dict[tuple, Held]:
    """What `Ledger.highest` would find with so many layers on top of those of `more`.

    Without the kinds whose largest allocation is another one with `few` layers: then a layer more would need less of something.
    """
    extended = {}
    for kind in few.keys() & more.keys():
        held = more[kind]
        sizes = few[kind].by_holder
        larger = {}
        needs_less = False
        for name, size in held.by_holder.items():
            fewer = sizes.get(name, 0)
            larger[name] = linear(fewer, size, added)
            needs_less |= fewer - size >= SMALL
        if not needs_less:
            extended[kind] = held._replace(by_holder=larger)
    return extended


def linear(few: float, more: float, added: int) -> float:
    """What is `few` with n layers and `more` with n + 1, for so many layers on top of these."""
    return more + added * (more - few)
