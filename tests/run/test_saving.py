"""The model that a run saves: the trained weights, in the dtype of the original."""

import pytest
import torch
from conftest import read
from safetensors.torch import load_file

# Recipe, config, dtype of the original, and of the arithmetic of the run, whose weights are float32.
RUNS = [
    ("qwen2_fineweb_edu", "4gpu_full_shard", torch.bfloat16, torch.bfloat16),
    ("gpt2_xl_wikitext", "3xt4_shard_grad_op", torch.float32, torch.float16),
]


@pytest.mark.parametrize(("recipe", "config", "dtype", "compute_dtype"), RUNS, ids=["bf16 original", "float32 original"])
def test_weights_are_saved_in_the_dtype_of_the_original(rehearse, recipe, config, dtype, compute_dtype):
    """Not in that of the arithmetic: after the evaluation of the last step FSDP still holds some weights in it."""
    run = rehearse(recipe, config)
    state = read(run, "trainer_state.json")
    assert any("eval_loss" in entry for entry in state["log_history"] if entry["step"] == state["global_step"])
    weights = load_file(run / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    if compute_dtype != dtype:
        assert not [name for name, weight in weights.items() if torch.equal(weight, weight.to(compute_dtype).to(dtype))]
