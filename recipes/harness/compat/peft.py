"""Changes to PEFT."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

from harness.compat.guards import changes
from harness.rounding import round_to

import torch


@changes("peft.tuners.lora:Linear.merge(self, safe_merge, adapter_names)", "peft.tuners.lora:Linear.merged_adapters")
@contextlib.contextmanager
def merge_for_generation(model: torch.nn.Module, accelerator: Any) -> Iterator[None]:
    """In this context LoRA layers compute with merged weights: a token needs 40 % fewer kernels, and to start them takes long.

    The weights are kept in host memory, and copied back: `unmerge` subtracts, after which 5.6 % of bf16 weights were others.
    Layers stay as they are under FSDP, which shards weights, in 4 or 8 bits, with DoRA, and where an embedding shares a weight.
    Upstream: no issue found.
    Checked with: peft 0.21.2.
    Remove when: `unmerge` restores weights bit for bit.
    """
    from peft.tuners import lora

    uses = collections.Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    kept = []
    try:
        for layer in model.modules():
            if accelerator.is_fsdp2 or type(layer) is not lora.Linear or layer.lora_variant or layer.merged:
                continue
            weight = layer.get_base_layer().weight
            if uses[weight] == 1 and weight.itemsize > 1 and not any(layer.lora_bias.values()):
                original = weight.data
                on_host = torch.empty_like(original, device="cpu", pin_memory=weight.is_cuda)
                kept.append((layer, weight, original, on_host.copy_(original)))
                weight.data = original.float()
                layer.merge()
                weight.data = original.copy_(round_to(original.dtype, weight.data))
        yield
    finally:
        for layer, weight, original, on_host in kept:
            weight.data = original.copy_(on_host)
            layer.merged_adapters.clear()
