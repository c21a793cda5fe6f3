"""How a model is loaded: its attention, and how its loss is computed."""

import sys
from types import ModuleType, SimpleNamespace

from harness.launched import Launched
from harness.model import loading

import pytest
import torch
from conftest import ROOT
from packaging.requirements import Requirement
from transformers import BloomConfig, Qwen2Config, dependency_versions_table
from trl import ModelConfig, SFTConfig
from trl.kernels import chunked_logprob
from trl.trainer import utils

FLASH = "flash_attention_2"


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [((8, 6), True, FLASH), ((8, 6), False, ""), ((7, 5), True, ""), (None, True, "")],
)
def test_flash_attention_needs_gpu_and_kernel(monkeypatch, capability, installed, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda kernels_fallback_ok: installed)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    attention, no_triton = loading.find_gpu_features()
    assert attention == expected and bool(no_triton) == bool(capability)  # Triton cannot run on this machine


def test_requirements_allow_only_kernels_that_transformers_accepts():
    """With another version every GPU would be without FlashAttention, and without an error."""
    accepted = Requirement(dependency_versions_table.deps["kernels"]).specifier
    lowest = next(part.version for part in accepted if part.operator == ">=")
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    (ours,) = (Requirement(line.split("#")[0]) for line in lines if line.startswith("kernels"))
    assert ours.specifier.contains(lowest) and all(part.operator in ("<", ">=") for part in ours.specifier)
    assert not [v for v in ("0.19.0", "0.20.0", "1.0.0") if ours.specifier.contains(v) and not accepted.contains(v)]


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("qwen2", {}, FLASH),
        ("qwen2", {"bf16": False}, None),
        ("bloom", {}, None),
        ("unknown", {}, FLASH),
    ],
)
def test_flash_attention_needs_16_bits_and_a_model_that_supports_it(tmp_path, name, precision, expected):
    (tmp_path / "qwen2").mkdir()
    (tmp_path / "bloom").mkdir()
    Qwen2Config().save_pretrained(tmp_path / "qwen2")
    BloomConfig().save_pretrained(tmp_path / "bloom")
    training_args = SimpleNamespace(**{"bf16": True, "fp16": False} | precision)
    model_args = ModelConfig(model_name_or_path=str(tmp_path / name), dtype="float32")
    loading.set_loading_options(training_args, model_args, False, Launched(attention=FLASH))
    assert model_args.attn_implementation == expected


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda kernels_fallback_ok: False)
    _, no_triton = loading.find_gpu_features()
    assert word in no_triton and bool(word) == bool(no_triton)


def test_loss_without_triton(monkeypatch):
    """And FlashAttention for a run on GPUs, not for a rehearsal on CPU."""
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    on_gpu, on_cpu = ModelConfig("/nowhere"), ModelConfig()
    launched = Launched(no_triton="no compiler", attention=FLASH)
    loading.set_loading_options(SFTConfig(use_cpu=True, bf16=True), on_gpu, False, launched)
    assert not chunked_logprob._use_triton(torch.device("cuda")) and utils._CHUNKED_LOGPROB_CHUNK_SIZE == 4096
    assert on_gpu.attn_implementation == FLASH
    loading.set_loading_options(SFTConfig(use_cpu=True, bf16=False), on_cpu, False, Launched(on_cpu=True, attention=FLASH))
    assert on_cpu.attn_implementation is None


def test_cost_of_attention_is_printed(capsys, rehearse, workdir):
    rehearse("qwen2_fineweb_edu", "1x3090")  # makes the tiny model
    model_args = ModelConfig(str(next((workdir / "outputs/tiny/.made").glob("Qwen--Qwen2-0.5B-*"))))
    training_args = SFTConfig(use_cpu=True, bf16=False, packing=True, max_length=48, per_device_train_batch_size=2)
    loading.print_attention(training_args, model_args, Launched())
    printed = capsys.readouterr().out
    assert "all 96 of its row" in printed and "about 25% to the FLOP" in printed  # hidden size 64
    model_args.attn_implementation = FLASH
    loading.print_attention(training_args, model_args, Launched(no_triton="no compiler"))
    loss, attention = capsys.readouterr().out.splitlines()
    assert "PyTorch instead of Triton" in loss and loss.endswith("no compiler")
    assert attention == "Attention: flash_attention_2."
    loading.print_attention(training_args, model_args, Launched(no_triton="no compiler", on_cpu=True))
    assert not capsys.readouterr().out
