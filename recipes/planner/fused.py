"""Fused layers in a simulation: which tensors a compiled layer reads and writes, without compiling anything."""

from typing import Any

from harness.compat.transformers import transformer_layers
from planner.ledger import Ledger, squeezed

import torch


def compile_layers(model: torch.nn.Module, ledger: Ledger) -> None:
    """Counts the transformer layers as compiled ones, with their backward pass. A text that a run generates is not compiled.

    Between two matrix products everything is one kernel. Each tensor is read once by it, and is written only for a product, for
    the next layer, or as a gradient. What is not written takes no memory: a backward pass computes it again.
    """
    layers = transformer_layers(model)

    def begin(layer: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        ledger.is_fused = ledger.moment != "sample"
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(ledger.write)

    def end(layer: torch.nn.Module, args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        ledger.write(hidden)
        ledger.is_fused = False
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(begin_backward)

    def begin_backward(gradient: torch.Tensor) -> None:
        ledger.is_fused = True  # until the end of the backward pass, see `Ledger.within`

    for layer in layers.values():
        layer.register_forward_pre_hook(begin, with_kwargs=True)
        layer.register_forward_hook(end)
        ledger.weight_shapes |= {squeezed(weight) for weight in layer.parameters()}
