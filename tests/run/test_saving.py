"""The model that a run saves: the trained weights, in the dtype of the original, and an adapter as it was trained."""

from pathlib import Path

from harness.run.saving import load_original_config, save_model

import pytest
import torch
from conftest import read
from safetensors.torch import load_file
from transformers import AutoTokenizer


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


def test_tokenizer_with_several_templates(build_trainer, tmp_path):
    """They are files in a folder, which others can read, and which a second start writes again. A link there is replaced."""
    trainer = build_trainer("qwen2_chat")
    run, templates = Path(trainer.args.output_dir), {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    trainer.processing_class.chat_template = templates
    for _ in range(2):
        save_model(trainer, load_original_config(trainer))
    assert AutoTokenizer.from_pretrained(run).chat_template == templates and not (run / ".model.draft").exists()
    folder = run / "additional_chat_templates"
    assert folder.stat().st_mode & 0o111 and (run / "model.safetensors").stat().st_mode == (run / "run.json").stat().st_mode
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/tool_use.jinja").write_text("mine")
    save_model(trainer, load_original_config(trainer))
    assert not folder.is_symlink() and (tmp_path / "elsewhere/tool_use.jinja").read_text() == "mine"
