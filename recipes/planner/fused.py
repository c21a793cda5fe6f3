"""Fused layers in a simulation: which tensors a compiled layer or Liger's kernels read and write, without compiling anything."""

import sys
import types
from typing import Any

from harness.compat.guards import changes
from harness.compat.transformers import transformer_layers
from planner.ledger import Ledger, squeezed

import torch
from transformers import PreTrainedModel


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


@changes("transformers.trainer:apply_liger_kernel(model, kernel_config)")
def use_liger_kernels(ledger: Ledger) -> None:
    """Makes the Trainer count what Liger's kernels for RMSNorm, SwiGLU and rotary embeddings do, which need a GPU.

    Upstream: no issue: it is not a fault of transformers.
    Checked with: transformers 5.23.0, liger-kernel 0.8.5.
    Remove when: Liger's functions have fake implementations.
    """
    from transformers import trainer

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
            ledger.touched += 2 * x.nbytes
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight, _ = ctx.saved_tensors
            ledger.touched += x.nbytes + 2 * gradient.nbytes
            return gradient, torch.empty_like(weight)  # the first in place

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate, up)
            ledger.touched += 3 * gate.nbytes
            return torch.empty_like(gate)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            gate, up = ctx.saved_tensors
            ledger.touched += 5 * gradient.nbytes
            return gate, up  # in place

    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ledger.touched += 2 * (query.nbytes + key.nbytes)
            return query.view_as(query), key.view_as(key)  # in place

        @staticmethod
        def backward(ctx: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ledger.touched += 2 * (query.nbytes + key.nbytes)
            return query, key

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return Norm.apply(x, module.weight)

    def mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(Gate.apply(module.gate_proj(x), module.up_proj(x)))

    def rotate(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return Rotation.apply(query, key)

    def apply(model: PreTrainedModel, kernel_config: dict | None) -> None:
        """Replaces what Liger replaces. Models with other layers, such as GPT-2, stay as they are; a run refuses them."""
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(norm, module)
            elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
                module.forward = types.MethodType(mlp, module)
        for layer in transformer_layers(model).values():
            source = sys.modules[type(layer).__module__]
            if hasattr(source, "apply_rotary_pos_emb"):
                source.apply_rotary_pos_emb = rotate

    trainer.apply_liger_kernel = apply
