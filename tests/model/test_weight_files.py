"""The files of a model have the weights that its config names; transformers would give those that they lack random values."""

import json

from harness.commands import saved
from harness.model.models import FILES_OF_MODEL, check_weights

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3MoeConfig

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
UNTIED = Qwen2Config(**SIZES, intermediate_size=32, tie_word_embeddings=False)
EXPERTS = {"intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
# Old files on the Hub have no prefix, masks as buffers, and experts one by one: all of that is complete.
COMPLETE = {
    "untied": UNTIED,
    "tied": Qwen2Config(**SIZES, intermediate_size=32, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
}


@pytest.fixture
def make(tmp_path, capsys):
    """Makes the folder of a model, with weights that `change` has changed, and values of config.json replaced."""

    def call(config, change=lambda weights: weights, **values):
        folder = tmp_path / "my-model"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
        settings = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(settings))
        capsys.readouterr()  # drops the progress bar
        return folder

    return call


def without(part):
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


def as_on_the_hub(weights):
    """Those of GPT-2 have no prefix, and a mask in every layer."""
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    return {name.removeprefix("transformer."): weight for name, weight in weights.items()} | masks


@pytest.mark.parametrize(("name", "change"), [*((name, dict) for name in COMPLETE), ("gpt2", as_on_the_hub)])
def test_complete_models(make, name, change, capsys):
    check_weights(str(make(COMPLETE[name], change)))
    assert not "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("config", "change", "values", "words"),
    [
        (UNTIED, without("lm_head"), {}, ["1 weight ", "lm_head.weight is missing"]),
        (COMPLETE["tied"], without("embed_tokens"), {}, ["model.embed_tokens.weight"]),
        (COMPLETE["experts"], without("experts.3."), {}, ["mlp.experts.down_proj is [3, 32, 32] instead of [4, 32, 32]"]),
        (UNTIED, dict, {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, ["12 weights ", "model.layers.2."]),
        (UNTIED, dict, {"vocab_size": 60}, ["lm_head.weight is [64, 32] instead of [60, 32]"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_files_without_what_the_config_requires(make, error_of, config, change, values, words):
    message = error_of(check_weights, str(make(config, change, **values)))
    assert all(word in message for word in words), message


def test_chat_with_a_model_or_an_adapter_that_lacks_weights(make, error_of, tmp_path):
    """--verify and --merge load models in the same way."""
    assert "12 weights " in error_of(saved.load_model, make(UNTIED, without(".layers.1.")))
    model = AutoModelForCausalLM.from_pretrained(make(UNTIED))
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "run")
    saved.load_model(tmp_path / "run")
    file = tmp_path / "run/adapter_model.safetensors"
    save_file(without("layers.1.self_attn.q_proj.lora_A")(load_file(file)), file, {"format": "pt"})
    message = error_of(saved.load_model, tmp_path / "run")
    assert "lacks 1 weight that its adapter_config.json requires" in message and "layers.1" in message


def test_which_files_of_a_model_are_downloaded():
    """Named chat templates have a folder; in other folders, and in other formats, are the weights a second time."""
    wanted = ["config.json", "model-00001-of-00002.safetensors", "additional_chat_templates/tool_use.jinja"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "awq/model.safetensors", "original/params.json"]
    assert list(filter_repo_objects(wanted + others, **FILES_OF_MODEL)) == wanted
