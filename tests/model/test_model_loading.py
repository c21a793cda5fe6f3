"""How a model is loaded: its attention, and how its loss is computed."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

from harness import configs
from harness.configs import AccelerateConfig
from harness.contexts import Context
from harness.model import gpu_features, loading
from harness.run import parameters
from harness.start import machine

import psutil
import pytest
import torch
from conftest import ROOT
from packaging.requirements import Requirement
from transformers import AutoConfig, BitsAndBytesConfig, MixtralConfig, Qwen2Config, dependency_versions_table
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
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "Tesla T4")
    monkeypatch.setattr(gpu_features, "problem_of_varlen", lambda: "")
    usable, no_flash, no_triton, _ = gpu_features.find_gpu_features()
    assert usable == expected and not no_flash and bool(no_triton) == bool(capability)  # Triton cannot run on this machine


def test_requirements_allow_only_kernels_that_transformers_accepts():
    """With another version every GPU would be without FlashAttention, and without an error."""
    accepted = Requirement(dependency_versions_table.deps["kernels"]).specifier
    lowest = next(part.version for part in accepted if part.operator == ">=")
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    (ours,) = (Requirement(line.split("#")[0]) for line in lines if line.startswith("kernels"))
    assert ours.specifier.contains(lowest) and all(part.operator in ("<", ">=") for part in ours.specifier)
    assert not [v for v in ("0.19.0", "0.20.0", "1.0.0") if ours.specifier.contains(v) and not accepted.contains(v)]


@pytest.mark.parametrize(
    ("capability", "error", "word"), [((7, 5), None, "Tesla T4"), ((8, 6), "no C compiler\n", "gcc"), ((8, 6), None, "")]
)
def test_reason_why_triton_cannot_be_used(monkeypatch, capability, error, word):
    def compile_launcher():
        if error:
            raise RuntimeError(error)

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=compile_launcher))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "Tesla T4")
    monkeypatch.setattr(gpu_features, "is_flash_attn_2_available", lambda kernels_fallback_ok=False: False)
    *_, no_triton, _ = gpu_features.find_gpu_features()
    assert word in no_triton and bool(word) == bool(no_triton)


BUSY = torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be …")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 23.68 GiB …")
OLD = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("error", "problem", "no_flash"),
    [(BUSY, "busy or unavailable (`nvidia-smi`", ""), (FULL, "CUDA out of memory", ""), (OLD, "", "no kernel image")],
)
def test_gpu_that_is_full_or_busy_is_an_error(monkeypatch, error_of, error, problem, no_flash):
    """It says nothing about FlashAttention. A rehearsal on CPU does not need the GPU."""

    def attend(*args, **options):
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (8, 6))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", attend)  # the first that `problem_of_varlen` asks of the GPU
    usable, found_no_flash, _, found = gpu_features.find_gpu_features()
    assert not usable and problem in found and bool(found) == bool(problem)
    assert no_flash in found_no_flash and bool(found_no_flash) == bool(no_flash)
    if not problem:
        return
    config = configs.read(str(ROOT / "accelerate_configs/1x3090.yaml"))
    context = Context("a.py", config, processes=1, tiny=True, gpu_problem=found)
    assert problem in error_of(machine.must_use_cpu, context, SimpleNamespace(use_cpu=False))
    assert machine.must_use_cpu(context, SimpleNamespace(use_cpu=True))


def test_loss_without_triton(monkeypatch):
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    loading.set_loading_options(
        SFTConfig(use_cpu=True), ModelConfig("./none"), False, Context("a.py", on_cpu=True, no_triton="gcc")
    )
    assert not chunked_logprob._use_triton(torch.device("cuda")) and utils._CHUNKED_LOGPROB_CHUNK_SIZE == 4096


@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "4-bit"])
def test_model_of_one_gpu_is_not_split_onto_the_cpu(monkeypatch, quantized):
    """TRL would pass device_map="auto". Without a map, quantized weights are still loaded onto the GPU."""
    loaded, training_args = [], SFTConfig(use_cpu=True, bf16=False)
    model_args = ModelConfig("some/model", load_in_4bit=quantized)
    loading.set_loading_options(training_args, model_args, is_sharded=False, context=Context("a.py"))
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
    loading.set_loading_options(training_args, model_args, False, Context("a.py", on_cpu=True), given)
    assert getattr(torch, training_args.model_init_kwargs["dtype"]) == expected
    assert get_quantization_config(model_args).bnb_4bit_compute_dtype == expected


QLORA = {"load_in_4bit": True, "use_peft": True, "dtype": "bfloat16", "lora_target_modules": ["all-linear"]}


@pytest.mark.parametrize(
    ("model", "config", "processes", "flags", "needed"),
    [
        ("Qwen/Qwen2-0.5B", "1x3090_offload", 1, {}, 10),  # as `--plan` simulates it
        ("meta-llama/Llama-3.1-70B", "2x3090_qlora", 2, QLORA, 47),  # with the adapter and its states
        ("meta-llama/Llama-3.1-70B", "1x3090_qlora", 1, QLORA, 44),
        ("Qwen/Qwen2-0.5B", "1x3090", 1, {}, None),
    ],
)
def test_host_memory_is_checked(monkeypatch, capsys, error_of, model, config, processes, flags, needed):
    """An error if memory and swap are too little, a warning if swap is needed."""
    memory = SimpleNamespace(available=1e12, free=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: memory)
    settings = configs.read(str(ROOT / f"accelerate_configs/{config}.yaml"))
    run = (
        ModelConfig(str(ROOT / f"tests/published/models/{model}"), **flags),
        settings,
        Context("a.py", processes=processes, nodes=1),
    )
    loading.check_host_memory(*run)
    assert capsys.readouterr().out.strip() == (
        f"This run needs about {needed} GB of host memory, 1000 GB are free." if needed else ""
    )
    memory.available = 2e9
    if not needed:
        loading.check_host_memory(*run)
        return
    assert f"{config}: this run needs about {needed} GB of host memory, 2 GB are free, and 0 GB of swap: stop" in error_of(
        loading.check_host_memory, *run
    )
    memory.free = 200e9
    loading.check_host_memory(*run)
    assert "2 GB are free. The rest is swap: slow." in capsys.readouterr().out
    memory.available, memory.free = 1e12, 0
    monkeypatch.setattr(loading, "memory_limit", lambda: 3e9)  # of a container or a SLURM job
    assert "3 GB are free, and 0 GB of swap" in error_of(loading.check_host_memory, *run)


@pytest.fixture
def mixture(tmp_path):
    """Makes the folder of a mixture-of-experts model with 4 fused experts in each of 2 layers; it has no weights."""

    def make(model_type, experts):
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        sizes |= {"vocab_size": 256, "intermediate_size": 32, "moe_intermediate_size": 32, experts: 4, "num_experts_per_tok": 2}
        AutoConfig.for_model(model_type, **sizes, dtype="bfloat16").save_pretrained(tmp_path / model_type)
        return str(tmp_path / model_type)

    return make


IN_4BIT, ALL = {"load_in_4bit": True, "dtype": "bfloat16"}, "all-linear"
STAY = "--load_in_4bit does not quantize fused experts: 49,152 of "
SKIPPED = "skips the fused experts: --lora_target_parameters down_proj gate_up_proj --lora_dropout 0"


@pytest.mark.parametrize(
    ("model_type", "experts", "options", "expected"),
    [
        ("gpt_oss", "num_local_experts", {**IN_4BIT, "lora_target_modules": ALL}, [STAY, "stay in bfloat16 (0.0 GB)", SKIPPED]),
        ("gpt_oss", "num_local_experts", {"lora_target_modules": ALL}, [SKIPPED]),
        ("gpt_oss", "num_local_experts", {"lora_target_modules": ["q_proj", "v_proj"]}, []),
        ("qwen3_moe", "num_experts", {**IN_4BIT, "lora_target_modules": ALL, "lora_dropout": 0.0}, [STAY]),  # PEFT adds them
    ],
)
def test_experts_that_are_not_quantized_or_trained_are_named(mixture, capsys, model_type, experts, options, expected):
    """4 experts of 3 x 64 x 32 weights in each of 2 layers."""
    loading.check_experts(ModelConfig(mixture(model_type, experts), use_peft=True, **options))
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(expected) and all(words in printed for words in expected)
    assert (SKIPPED in printed) == (SKIPPED in expected)


def test_adapter_that_peft_refuses_is_an_error(mixture, error_of):
    """Experts have no dropout; 0.05 is TRL's default."""
    model_args = ModelConfig(mixture("qwen3_moe", "num_experts"), use_peft=True, lora_target_modules=ALL)
    message = error_of(loading.check_experts, model_args)
    assert message.startswith("--use_peft: PEFT refuses the adapter") and message.endswith("--lora_dropout 0)")


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
        ({"lora_modules_to_save": ["nrm"]}, ["--lora_modules_to_save: my/model has no nrm", "input_layernorm", "lm_head"]),
        ({"lora_target_parameters": ["up.weight"]}, ["--lora_target_parameters: my/model has no up.weight", "up_proj.weight"]),
        ({"lora_target_modules": ["q_proj", "mlp"]}, ["has no mlp: pass some of q_proj, k_proj", "all-linear"]),
        (
            {"lora_target_modules": [".*Wq"]},
            ["--use_peft: Target modules .*Wq not found", "the linear modules of my/model are q_proj"],
        ),
        ({"lora_target_modules": ["q_proj", "norm"]}, ["--use_peft: Target module Qwen2RMSNorm", "is not supported"]),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, ["the output head cannot have an adapter", "down_proj"]),
    ],
    ids=lambda value: str(next(iter(value.values()))) if isinstance(value, dict) else "",
)
def test_adapter_that_is_refused(model_args, error_of, settings, words):
    """PEFT ignores an unknown name next to a known one, and TRL refuses the head after the weights were loaded."""
    settings = {"lora_target_modules": ["q_proj", "v_proj"]} | settings
    args = model_args(Qwen2Config(hidden_size=64, num_hidden_layers=1), **settings)

    def check():
        loading.check_module_names(args, AccelerateConfig(), "my/model")
        loading.build_adapter_on_meta(args, "my/model")

    message = error_of(check)
    assert all(word in message for word in words), message


def test_names_of_modules_that_peft_replaces(model_args):
    """The experts' modules w1, w2 and w3 of transformers 4 are two parameters today."""
    args = model_args(MixtralConfig(hidden_size=64, num_hidden_layers=1), lora_target_modules=["q_proj", "w1", "w2", "w3"])
    args.lora_dropout = 0.0
    loading.check_module_names(args, AccelerateConfig(), "my/model")
    adapted = parameters.modules_with_adapter(loading.build_adapter_on_meta(args, "my/model"))
    assert adapted == {"q_proj": 1, "gate_up_proj": 1, "down_proj": 1}


@pytest.mark.parametrize(
    ("classes", "is_right"),
    [("Qwen2DecoderLayer", True), ("Qwen2DecoderLayer,Qwen2MLP", True), ("GPT2Block", False), ("Qwen2MLP", False)],
)
def test_layer_classes_of_the_config(model_args, error_of, classes, is_right):
    """Each transformer layer must be an FSDP unit; accelerate and FSDP find out after the weights were loaded."""
    args = model_args(Qwen2Config(hidden_size=64, num_hidden_layers=1), lora_target_modules=["q_proj"])
    config = AccelerateConfig("folder/2gpu.yaml", layer_classes=tuple(classes.split(",")))
    if is_right:
        loading.check_module_names(args, config, "my/model")
        return
    message = error_of(loading.check_module_names, args, config, "my/model")
    assert message.startswith("2gpu.yaml: fsdp_transformer_layer_cls_to_wrap is ")
    assert f"is {classes}, but the layers of my/model are Qwen2DecoderLayer" in message


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
