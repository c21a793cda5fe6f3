"""How a model is loaded: its attention, and how its loss is computed."""

import sys
from types import ModuleType, SimpleNamespace

from harness.data.reading import DataSettings
from harness.model import gpu_features, models
from harness.runs import Run

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, MixtralConfig, Qwen2Config
from trl import ModelConfig, SFTConfig, get_quantization_config
from trl.trainer import utils

FLASH = "flash_attention_2"


@pytest.mark.parametrize(
    ("capability", "has_flash", "error", "attention", "word"),
    [
        ((8, 6), True, "", ["varlen", FLASH], ""),
        ((8, 6), False, "no C compiler\n", ["varlen"], "gcc"),
        ((7, 5), True, "", [], "8.0"),
        (None, True, "", [], ""),
    ],
)
def test_what_a_gpu_supports(monkeypatch, capability, has_flash, error, attention, word):
    def compile_launcher():
        if error:
            raise RuntimeError(error)

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=compile_launcher))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_features, "is_flash_attn_2_available", lambda kernels_fallback_ok: has_flash)
    monkeypatch.setattr(gpu_features, "can_run_varlen", lambda: True)
    features = gpu_features.find_gpu_features()
    assert features.attention == attention
    assert word in features.no_triton and bool(word) == bool(features.no_triton)


def test_model_of_one_gpu_is_not_split_onto_the_cpu(monkeypatch):
    """TRL would pass device_map="auto"."""
    loaded, training_args = [], SFTConfig(use_cpu=True, bf16=False)
    models.set_loading_options(training_args, ModelConfig(), Run("a.py", data=DataSettings(())))
    monkeypatch.setattr(utils, "PartialState", lambda: SimpleNamespace(device=torch.device("cuda", 0)))
    architecture = SimpleNamespace(from_pretrained=lambda name, **options: loaded.append(options))
    utils.create_model_from_path("some/model", architecture, **training_args.model_init_kwargs)
    assert loaded[0]["device_map"] is None


@pytest.mark.parametrize(
    ("precision", "dtype", "given", "expected"),
    [
        ({"bf16": True}, "float32", [], torch.bfloat16),
        ({"bf16": True}, "float32", ["dtype"], torch.float32),
        ({"bf16": False}, "float32", [], torch.float32),
        ({"bf16": True}, "auto", ["dtype"], torch.bfloat16),
        ({"bf16": False}, "bfloat16", [], torch.bfloat16),  # the recipe has set it
    ],
)
def test_4bit_model_on_one_gpu_is_loaded_in_the_dtype_of_its_arithmetic(precision, dtype, given, expected):
    """Also the products of its 4-bit layers."""
    training_args, model_args = SFTConfig(use_cpu=True, **precision), ModelConfig(load_in_4bit=True, dtype=dtype)
    run = Run("a.py", on_cpu=True, given=frozenset(given), data=DataSettings(()))
    models.set_loading_options(training_args, model_args, run)
    assert getattr(torch, training_args.model_init_kwargs["dtype"]) == expected
    assert get_quantization_config(model_args).bnb_4bit_compute_dtype == expected


@pytest.fixture
def build_adapter(tmp_path):
    """Builds a model of this config with an adapter."""

    def call(config, **settings):
        config.save_pretrained(tmp_path)
        return models.build_adapter_on_meta(ModelConfig(str(tmp_path), use_peft=True, lora_dropout=0.0, **settings), "my/model")

    return call


@pytest.mark.parametrize(
    ("option", "name"),
    [("modules_to_save", "nrm"), ("target_parameters", "up.weight"), ("target_modules", "Wk")],
)
def test_adapter_that_is_refused(build_adapter, error_of, option, name):
    """PEFT ignores an unknown name next to a known one."""
    settings = {"lora_target_modules": ["q_proj", "v_proj"]}
    settings[f"lora_{option}"] = [*settings.get(f"lora_{option}", []), name]
    message = error_of(build_adapter, Qwen2Config(hidden_size=64, num_hidden_layers=1), **settings)
    assert message.startswith(f"--lora_{option}: ") and name in message


def test_names_of_modules_that_peft_replaces(build_adapter):
    """The experts' modules w1, w2 and w3 of transformers 4 are two parameters today."""
    names = ["q_proj", "w1", "w2", "w3"]
    modules = build_adapter(MixtralConfig(hidden_size=64, num_hidden_layers=1), lora_target_modules=names).named_modules()
    adapted = [getattr(part, "parameter_name", path.split(".")[-1]) for path, part in modules if isinstance(part, BaseTunerLayer)]
    assert sorted(adapted) == ["down_proj", "gate_up_proj", "q_proj"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("kind", "sizes", "positions"),
    [
        ("qwen2", {"max_position_embeddings": 128}, 128),
        ("qwen2", {"max_position_embeddings": 128, "rope_parameters": YARN}, 512),
        ("qwen2", {"max_position_embeddings": 512, "rope_parameters": YARN}, 512),  # they are counted in it
        ("gemma3_text", {"max_position_embeddings": 128}, 128),  # a RoPE for each type of layer
        ("gpt2", {"n_positions": 64}, 64),
        ("bloom", {}, None),
    ],
)
def test_positions_that_rope_scaling_adds(kind, sizes, positions):
    assert models.count_positions(AutoConfig.for_model(kind, **sizes)) == positions
