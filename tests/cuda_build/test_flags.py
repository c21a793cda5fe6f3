"""Liger's layers, which need a package and a GPU."""

import re

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("needs PyTorch's CUDA build: ./launch.sh --test --cuda_build", allow_module_level=True)

from conftest import ROOT
from runs import losses


def test_package_is_that_of_the_docs():
    docs = (ROOT / "docs/precision-and-attention.md").read_text()
    assert re.findall("liger-kernel==[0-9.]+", docs) == (ROOT / "tests/cuda_build/requirements.txt").read_text().splitlines()[-1:]


def test_rehearsal_with_liger(rehearse):
    """Without a GPU, it has the losses of a rehearsal without the flag."""
    flags = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no"]
    plain = rehearse("llama31_8b_lora", "4gpu_full_shard", *flags)
    assert losses(rehearse("llama31_8b_lora", "4gpu_full_shard", *flags, "--use_liger_kernel", "true")) == losses(plain)
