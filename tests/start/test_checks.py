"""The hardware and the packages: what does not fit is said before anything is spawned."""

import functools
import os
import sys
from types import ModuleType, SimpleNamespace

import harness
from harness.launched import Launched
from harness.start import checks, launch, loading

import pytest
import torch
from conftest import ROOT
from packaging.requirements import Requirement
from transformers import BloomConfig, Qwen2Config, dependency_versions_table
from trl import ModelConfig, SFTConfig
from trl.kernels import chunked_logprob
from trl.trainer import utils

FLASH = "flash_attention_2"
CONFIG = {"num_processes": 2, "num_machines": 1, "mixed_precision": "bf16"}


@pytest.mark.parametrize(("gpus", "on_cpu"), [(8, False), (4, True), (0, True)])
def test_a_rehearsal_uses_the_gpus_only_when_they_are_enough(monkeypatch, gpus, on_cpu):
    """Two machines of four GPUs are eight processes on this one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    launched = Launched(config="hybrid.yaml", processes=8, tiny=True)
    launch._hardware({"mixed_precision": "bf16"}, launched)
    assert launched.on_cpu == on_cpu


@pytest.mark.parametrize(("config", "gpus"), [("1x3090_offload", "1 GPU"), ("4gpu_full_shard", "4 GPUs")])
def test_gpus_that_are_missing(monkeypatch, says, config, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    launched = Launched(recipe="recipes/qwen2_chat.py", config=f"accelerate_configs/{config}.yaml", processes=int(gpus[0]))
    message = says(launch._hardware, CONFIG, launched)
    assert f"needs {gpus}, and this machine has none" in message and f"./launch.sh --tiny qwen2_chat {config}" in message


def test_a_driver_too_old_for_pytorch(monkeypatch, says):
    """NVML counts the GPUs of such a machine; CUDA says no, and why when it is made to begin."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def begin():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11080).")

    monkeypatch.setattr(torch.cuda, "init", begin)
    message = says(checks.gpu_count)
    assert "2 GPUs and no CUDA for PyTorch" in message and "too old (found version 11080)" in message
    assert "Update the driver" in message and "PYTHON" in message


def test_a_rehearsal_on_the_cpu_does_not_see_the_gpus(monkeypatch, tmp_path):
    """FSDP asks PyTorch which accelerator there is; with one GPU for four processes the answer would be that one."""
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "0"})
    config = {"distributed_type": "FSDP"}
    launch._accelerate(Launched(config="c.yaml", processes=4, tiny=True, on_cpu=False), config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    launch._accelerate(Launched(config="c.yaml", processes=4, tiny=True, on_cpu=True), config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_bf16_needs_compute_capability_8(monkeypatch, says):
    capability = {0: (8, 6), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    assert "Tesla T4 has compute capability 7.5" in says(checks.bf16, CONFIG, "c.yaml", 2)
    checks.bf16(CONFIG | {"mixed_precision": "fp16"}, "c.yaml", 2)
    capability[1] = (8, 0)
    checks.bf16(CONFIG, "c.yaml", 2)


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [((8, 6), True, FLASH), ((8, 6), False, ""), ((7, 5), True, ""), (None, True, "")],
)
def test_flash_attention_where_it_can_be_had(monkeypatch, capability, installed, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda kernels_fallback_ok: installed)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    attention, torch_loss = loading.choose()
    assert attention == expected and bool(torch_loss) == bool(capability)  # no Triton here


def test_kernels_that_transformers_takes_may_be_installed():
    """A pin that transformers does not take would leave every GPU without FlashAttention, without a word."""
    wanted = Requirement(dependency_versions_table.deps["kernels"]).specifier
    least = next(word.version for word in wanted if word.operator == ">=")
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    (ours,) = (Requirement(line.split("#")[0]) for line in lines if line.startswith("kernels"))
    assert ours.specifier.contains(least) and all(word.operator in ("<", ">=") for word in ours.specifier)
    assert not [v for v in ("0.19.0", "0.20.0", "1.0.0") if ours.specifier.contains(v) and not wanted.contains(v)]


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("qwen2", {}, FLASH),
        ("qwen2", {"bf16": False}, None),
        ("bloom", {}, None),
        ("unknown", {}, FLASH),
    ],
)
def test_flash_attention_is_for_models_that_have_it(tmp_path, name, numbers, expected):
    (tmp_path / "qwen2").mkdir()
    (tmp_path / "bloom").mkdir()
    Qwen2Config().save_pretrained(tmp_path / "qwen2")
    BloomConfig().save_pretrained(tmp_path / "bloom")
    args = SimpleNamespace(**{"bf16": True, "fp16": False} | numbers)
    model = ModelConfig(model_name_or_path=str(tmp_path / name), dtype="float32")
    loading.complete(args, model, False, Launched(attention=FLASH))
    assert model.attn_implementation == expected


@pytest.mark.parametrize(
    ("capability", "error", "word"), [((7, 5), None, "Tesla T4"), ((8, 6), "no C compiler\n", "gcc"), ((8, 6), None, "")]
)
def test_the_loss_is_computed_in_torch_where_triton_cannot(monkeypatch, capability, error, word):
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
    _, reason = loading.choose()
    assert word in reason and bool(word) == bool(reason)


def test_trl_takes_the_torch_path_where_it_is_told_to(monkeypatch, build_trainer):
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    model = ModelConfig("/nowhere")
    loading.complete(SFTConfig(use_cpu=True, bf16=True), model, False, Launched(torch_loss="no compiler", attention=FLASH))
    assert not chunked_logprob._use_triton(torch.device("cuda")) and utils._CHUNKED_LOGPROB_CHUNK_SIZE == 4096
    assert model.attn_implementation == FLASH
    loading.complete(
        SFTConfig(use_cpu=True, bf16=False),
        rehearsed := ModelConfig(),
        False,
        Launched(on_cpu=True, attention=FLASH),
    )
    assert rehearsed.attn_implementation is None


def test_what_attention_costs_is_said(monkeypatch, capsys, rehearse, workplace):
    rehearse("qwen2_fineweb_edu", "1x3090")
    model = ModelConfig(str(next((workplace / "outputs/tiny/.stand-ins").glob("Qwen--Qwen2-0.5B-*"))))
    args = SFTConfig(use_cpu=True, bf16=False, packing=True, max_length=48, per_device_train_batch_size=2)
    loading.announce(args, model, Launched())
    assert "meets all 96 of its row, about 25% of" in capsys.readouterr().out  # hidden size 64
    model.attn_implementation = FLASH
    loading.announce(args, model, Launched(torch_loss="no compiler"))
    assert capsys.readouterr().out.splitlines() == [
        "TRL's loss runs in torch, a little slower, not in Triton: no compiler",
        "Attention: flash_attention_2.",
    ]


def test_versions_are_a_warning(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(checks, "REQUIREMENTS", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").write_text("torch==0.1\n# comment\nnot-installed==1\n")
    monkeypatch.setattr(checks, "TESTED_PYTHON", (2, 7))
    checks.versions()
    warning = capsys.readouterr().out
    assert warning.startswith("warning: not tested with Python 3.") and "(tested: 0.1)" in warning
    assert "not-installed" not in warning


def test_a_tracker_that_is_missing(says):
    assert "-m pip install comet-ml\n" in says(checks.trackers, ["comet_ml"])
    assert "tensorboard, trackio, wandb" in says(checks.trackers, ["trakio"])


def test_a_rehearsal_is_for_a_tracker_only_when_it_is_asked_for(build_trainer, monkeypatch, says):
    """Whatever the recipe says; and what is asked for must be installed."""
    monkeypatch.setattr("harness.parse", functools.partial(harness.parse, report_to="comet_ml"))
    assert build_trainer("qwen2_fineweb_edu").args.report_to == []
    assert "pip install clearml" in says(build_trainer, "qwen2_fineweb_edu", "--report_to", "clearml")
