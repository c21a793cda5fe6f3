"""What only PyTorch's CUDA build has: binaries for the GPUs, operators, messages, and a CUDA that does not survive a fork."""

import argparse
import ctypes
import os

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("needs PyTorch's CUDA build: ./launch.sh --test --cuda_build", allow_module_level=True)

from harness import configs
from harness.launched import GROWING
from harness.model.gpu_features import can_run_varlen, find_gpu_features, why_not_triton
from harness.start import machine

from bitsandbytes.cextension import get_cuda_bnb_library_path
from bitsandbytes.cuda_specs import CUDASpecs
from conftest import ROOT

CAPABILITIES = [75, 80, 86, 89, 90, 120]  # T4, A100, RTX 3090, RTX 4090, H100, RTX 5090

# Operators of which the plan says that CUDA runs them, and those of recipes.
OPERATORS = [
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "native_dropout",
    "_fused_adamw_",
    "_foreach_norm.Scalar",
]
RECIPE = """
import runpy
import torch

print("forked too late:", torch.cuda._is_in_bad_fork())
runpy.run_path({path!r}, run_name="__main__")
"""


def test_binaries_for_the_gpus():
    compiled = [int(name.removeprefix("sm_")) for name in torch._C._cuda_getArchFlags().split() if name.startswith("sm_")]
    for capability in CAPABILITIES:  # a binary runs on GPUs of the same major version, from its minor version on
        assert any(found // 10 == capability // 10 and found <= capability for found in compiled), (capability, compiled)
    major, minor = torch.version.cuda.split(".")
    path = get_cuda_bnb_library_path(CUDASpecs((8, 6), f"{major}{minor}", (int(major), int(minor))))
    library = ctypes.CDLL(str(path))
    assert all(getattr(library, name) for name in ("cquantize_blockwise_bf16_nf4", "cdequantize_blockwise_bf16_nf4"))


def test_operators():
    for name in OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"), name


def test_reasons_without_a_driver():
    assert "driver" in why_not_triton() and not can_run_varlen()
    assert find_gpu_features() == ([], "", "")


def test_processes_can_use_cuda_after_the_fork(launch, tmp_path):
    """The launcher has not asked CUDA for anything, not even whether there is a GPU: CUDA does not survive a fork."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(path=str(ROOT / "recipes/qwen2_chat.py")))
    flags = ["--max_steps", "1", "--save_strategy", "no", "--eval_strategy", "no", "--eval_on_start", "false"]
    process = launch("--tiny", recipe, "4gpu_ddp", "--output_dir", tmp_path / "run", *flags, NPROC_PER_NODE="2")
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("forked too late: False") == 3, process.stdout  # the check, and two that train


def test_choice_simulates_in_forked_processes(launch, small_model, tmp_path):
    """What simulates is forked from a process that has imported bitsandbytes, which asks CUDA for the GPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "NVIDIA GeForce RTX 3090, 24576, 8.6, 0"\n')
    smi.chmod(0o755)
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(tmp_path / "cache")}
    variables["CUDA_VISIBLE_DEVICES"] = "0"
    process = launch("qwen2_fineweb_edu", *small_model, "--activation_checkpointing", "false", cwd=tmp_path, **variables)
    assert process.returncode == 2 and "the same by hand" in process.stdout, process.stdout + process.stderr
    assert "needs 1 GPU, this machine has none" in process.stderr, process.stderr


def test_allocator_is_set_by_a_call_once_cuda_has_started(monkeypatch):
    """It has read its variable then."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", GROWING)
    values = argparse.Namespace(use_peft=True, activation_checkpointing_kwargs=None)
    config = configs.read(str(ROOT / "accelerate_configs/1x3090_offload.yaml"))
    machine.set_allocator(config, values)
    found = torch._C._accelerator_getAllocatorSettings()
    assert found.startswith(f"{GROWING},pinned_max_round_threshold_mb:1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert machine.set_allocator(config, values) == "expandable_segments:False"
    assert torch._C._accelerator_getAllocatorSettings() == found, "the user's own value stays"
