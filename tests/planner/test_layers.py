"""A few layers that are simulated are extended to all, if the layers are alike."""

from planner import layers
from planner.ledger import Held

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 8
CHANGES = [
    lambda layers, config: layers[5].mlp.up_proj.weight.requires_grad_(False),
    lambda layers, config: setattr(layers[5].mlp, "up_proj", torch.nn.Linear(16, 33, bias=False, device="meta")),
    lambda layers, config: setattr(config, "layer_types", ["full_attention"] * 7 + ["sliding_attention"]),
    lambda layers, config: layers.pop(-1),  # it does not pay
]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_differ_are_all_simulated(change):
    with torch.device("meta"):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    assert layers.equal_layers(model) is model.model.layers
    change(model.model.layers, model.config)
    assert layers.equal_layers(model) is None


def test_memory_is_linear():
    kinds = [{("kind",): Held("forward", "gpu", {"weights": 10 * count, "rest": 3}), (count,): None} for count in (4, 5)]
    for runs, size in zip(kinds, (8, 4), strict=True):  # with five layers, another allocation is the largest
        runs["other",] = Held("backward", "gpu", {"gradients": size * 2**20})
    assert layers.extend(*kinds, 3) == {("kind",): Held("forward", "gpu", {"weights": 80, "rest": 3})}
