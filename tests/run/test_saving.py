"""The model that a run saves: the trained weights, in the dtype of the original, and an adapter as it was trained."""

import pytest
import torch
from conftest import read
from safetensors.torch import load_file


@pytest.mark.parametrize(
    ("recipe", "config", "dtype"),
    [("qwen2_fineweb_edu", "4gpu_full_shard", torch.bfloat16), ("gpt2_xl_wikitext", "3xt4_shard_grad_op", torch.float32)],
)
def test_weights_have_the_dtype_of_the_original(rehearse, recipe, config, dtype):
    """In training they are float32."""
    weights = load_file(rehearse(recipe, config) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}


def test_adapter_is_not_rounded(rehearse):
    """After the evaluation of the last step FSDP still holds the weights unsharded, in the dtype of the arithmetic."""
    flags = ["--use_peft", "--max_steps", "2", "--eval_steps", "2", "--save_strategy", "no"]
    run = rehearse("qwen2_chat", "4gpu_shard_grad_op", *flags)
    state = read(run, "trainer_state.json")
    assert any("eval_loss" in entry for entry in state["log_history"] if entry["step"] == 2)
    weights = load_file(run / "adapter_model.safetensors")
    assert not [name for name, weight in weights.items() if torch.equal(weight, weight.bfloat16().float())]
