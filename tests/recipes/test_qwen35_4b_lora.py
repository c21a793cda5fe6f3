"""qwen35_4b_lora, and Qwen3.5 in other recipes: the text part is trained, and saved with the part that reads images."""

import re

import pytest
import torch
from conftest import slow
from runs import merge, read
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

RECIPE, MODEL = "qwen35_4b_lora", "Qwen/Qwen3.5-4B"
AS_CHAT = ["--model_name_or_path", MODEL, "--packing", "false", "--split_conversations", "true"]  # flags for qwen2_chat


def adapted(trainer):
    names = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    return {match[1] for name in names if (match := re.match(r"base_model\.model\.(.+)\.lora_A\.", name))}


def test_adapter_is_on_both_kinds_of_attention(build_trainer):
    names = adapted(build_trainer(RECIPE))
    linear, full = "model.language_model.layers.0.linear_attn", "model.language_model.layers.1.self_attn"
    assert {f"{linear}.in_proj_qkv", f"{linear}.in_proj_z", f"{linear}.out_proj", f"{full}.q_proj", f"{full}.o_proj"} < names
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_all_linear_leaves_out_what_reads_images(build_trainer):
    names = adapted(build_trainer("qwen2_chat", *AS_CHAT, "--use_peft", "--lora_target_modules", "all-linear"))
    assert {name.split(".")[-1] for name in names} > {"in_proj_a", "in_proj_qkv", "q_proj", "down_proj"}
    assert all(name.startswith("model.language_model.layers.") for name in names)


@slow
def test_whole_model_is_saved_as_it_came(rehearse, workdir):
    """A full fine-tune: the images' part is neither trained nor changed, and the saved model is of the same class."""
    run = rehearse("qwen2_chat", "1x3090", *AS_CHAT, "--max_steps", "2", "--eval_strategy", "no")
    (base,) = (workdir / "outputs/tiny/.made").glob("Qwen--Qwen3.5-4B-*")
    before, after = load_file(base / "model.safetensors"), load_file(run / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("visual" in name for name in changed)
    results, visual = read(run), sum(weight.numel() for name, weight in before.items() if "visual" in name)
    assert results["model_params_b"] - results["trainable_params_b"] == pytest.approx(visual / 1e9, abs=2e-6)
    assert read(run, "config.json")["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    _, loading = AutoModelForImageTextToText.from_pretrained(run, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_merged_model_generates_in_a_batch(rehearse, tmp_path):
    """Merged with the rest of the model. Padding does not reach the state of linear attention."""
    run = rehearse(RECIPE, "1x3090")
    merge(run, tmp_path / "merged")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert any("visual" in name for name in model.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged", padding_side="left")
    texts = ["<|im_start|>user\nA long question about lists, and another one?<|im_end|>\n", "<|im_start|>user\nHi"]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1, "pad_token_id": tokenizer.pad_token_id}
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    together = model.generate(**batch, **options)[:, -8:]
    for text, tokens in zip(texts, together, strict=True):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **options)[0, -8:]
        assert torch.equal(alone, tokens), text
