"""How a model is loaded: its attention, and how its loss is computed."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

from harness.model import gpu_features, loading
from harness.runs import GpuFeatures, Run

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, BitsAndBytesConfig, MixtralConfig, Qwen2Config
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from trl import ModelConfig, SFTConfig, get_quantization_config
from trl.kernels import chunked_logprob
from trl.trainer import utils

FLASH = "flash_attention_2"


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [((8, 6), True, ["varlen", FLASH]), ((8, 6), False, ["varlen"]), ((7, 5), True, []), (None, True, [])],
)
def test_attention_depends_on_gpu_and_kernel(monkeypatch, capability, installed, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def is_available(kernels_fallback_ok: bool = False) -> bool:
        return installed and kernels_fallback_ok

    monkeypatch.setattr(gpu_features, "is_flash_attn_2_available", is_available)
    monkeypatch.setattr(gpu_features, "can_run_varlen", lambda: True)
    features = gpu_features.find_gpu_features()
    assert features.attention == expected and bool(features.no_triton) == bool(capability)  # Triton cannot run on this machine


@pytest.mark.parametrize(
    ("capability", "error", "word"), [((7, 5), None, "8.0"), ((8, 6), "no C compiler\n", "gcc"), ((8, 6), None, "")]
)
def test_reason_why_triton_cannot_be_used(monkeypatch, capability, error, word):
    def compile_launcher():
        if error:
            raise RuntimeError(error)

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=compile_launcher))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    no_triton = gpu_features.why_not_triton()
    assert word in no_triton and bool(word) == bool(no_triton)


def test_loss_without_triton(monkeypatch):
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    loading.set_loading_options(
        SFTConfig(use_cpu=True), ModelConfig("./none"), Run("a.py", on_cpu=True, gpu=GpuFeatures([], no_triton="gcc"))
    )
    assert not chunked_logprob._use_triton(torch.device("cuda")) and utils._CHUNKED_LOGPROB_CHUNK_SIZE == 4096


@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "4-bit"])
def test_model_of_one_gpu_is_not_split_onto_the_cpu(monkeypatch, quantized):
    """TRL would pass device_map="auto". Without a map, quantized weights are still loaded onto the GPU."""
    loaded, training_args = [], SFTConfig(use_cpu=True, bf16=False)
    model_args = ModelConfig("some/model", load_in_4bit=quantized)
    loading.set_loading_options(training_args, model_args, Run("a.py"))
    monkeypatch.setattr(utils, "PartialState", lambda: SimpleNamespace(device=torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    architecture = SimpleNamespace(from_pretrained=lambda name, **options: loaded.append(options))
    utils.create_model_from_path("some/model", architecture, **training_args.model_init_kwargs)
    assert loaded[0]["device_map"] is None
    if quantized:
        # The library's own class, even if an earlier test has changed the imported one.
        spec = importlib.util.find_spec(Bnb4BitHfQuantizer.__module__)
        spec.loader.exec_module(original := importlib.util.module_from_spec(spec))
        quantizer = original.Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True))
        assert quantizer.update_device_map(loaded[0]["device_map"]) == {"": 0}


@pytest.mark.parametrize(
    ("precision", "dtype", "given", "expected"),
    [
        ({"bf16": True}, "float32", [], torch.bfloat16),
        ({"bf16": False, "fp16": True}, "float32", [], torch.float16),
        ({"bf16": False}, "float32", [], torch.float32),
        ({"bf16": True}, "float32", ["dtype"], torch.float32),
        ({"bf16": True}, "auto", ["dtype"], torch.bfloat16),
        ({"bf16": False}, "bfloat16", [], torch.bfloat16),  # the recipe has set it
    ],
)
def test_4bit_model_on_one_gpu_is_loaded_in_the_dtype_of_its_arithmetic(precision, dtype, given, expected):
    """Also the products of its 4-bit layers."""
    training_args, model_args = SFTConfig(use_cpu=True, **precision), ModelConfig("./none", load_in_4bit=True, dtype=dtype)
    loading.set_loading_options(training_args, model_args, Run("a.py", on_cpu=True, given=frozenset(given)))
    assert getattr(torch, training_args.model_init_kwargs["dtype"]) == expected
    assert get_quantization_config(model_args).bnb_4bit_compute_dtype == expected


@pytest.fixture
def model_args(tmp_path):
    """The arguments for a model of this config with an adapter."""

    def call(config, **settings):
        config.save_pretrained(tmp_path)
        return ModelConfig(str(tmp_path), use_peft=True, **settings)

    return call


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules_to_save": ["nrm"]}, ["--lora_modules_to_save", "nrm", "input_layernorm", "lm_head"]),
        ({"lora_target_parameters": ["up.weight"]}, ["--lora_target_parameters", "up.weight", "up_proj.weight"]),
        ({"lora_target_modules": ["q_proj", "Wk"]}, ["--lora_target_modules", "Wk", "q_proj"]),
    ],
    ids=lambda value: str(next(iter(value.values()))) if isinstance(value, dict) else "",
)
def test_adapter_that_is_refused(model_args, error_of, settings, words):
    """PEFT ignores an unknown name next to a known one."""
    settings = {"lora_target_modules": ["q_proj", "v_proj"]} | settings
    args = model_args(Qwen2Config(hidden_size=64, num_hidden_layers=1), **settings)
    message = error_of(loading.build_adapter_on_meta, args, "my/model")
    assert all(word in message for word in words), message


def test_names_of_modules_that_peft_replaces(model_args):
    """The experts' modules w1, w2 and w3 of transformers 4 are two parameters today."""
    args = model_args(MixtralConfig(hidden_size=64, num_hidden_layers=1), lora_target_modules=["q_proj", "w1", "w2", "w3"])
    args.lora_dropout = 0.0
    modules = loading.build_adapter_on_meta(args, "my/model").named_modules()
    adapted = [getattr(part, "parameter_name", path.split(".")[-1]) for path, part in modules if isinstance(part, BaseTunerLayer)]
    assert sorted(adapted) == ["down_proj", "gate_up_proj", "q_proj"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (Qwen2Config(max_position_embeddings=128), 128),
        (Qwen2Config(max_position_embeddings=128, rope_parameters=YARN), 512),
        (Qwen2Config(max_position_embeddings=512, rope_parameters=YARN), 512),  # they are counted in it
        (
            Qwen2Config(max_position_embeddings=128, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            256,
        ),
        (AutoConfig.for_model("gemma3_text", max_position_embeddings=128), 128),  # a RoPE for each type of layer
        (AutoConfig.for_model("gpt2", n_positions=64), 64),
        (AutoConfig.for_model("bloom"), None),
    ],
    ids=lambda value: str(value) if not hasattr(value, "model_type") else value.model_type,
)
def test_positions_that_rope_scaling_adds(config, positions):
    assert loading.count_positions(config) == positions
