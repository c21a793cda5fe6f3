"""Flags that need a package or a GPU: Liger's layers, and an optimizer for 16-bit weights."""

import re
import shutil
from functools import partial

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("needs PyTorch's CUDA build: ./launch.sh --test --cuda_build", allow_module_level=True)

from harness.model.loading import check_model_of_liger
from harness.start import checks

from conftest import ROOT, losses, read
from optimi import StableAdamW
from rehearsals import fewer_processes

DOCS = (ROOT / "docs/precision-and-attention.md").read_text()


def test_packages_are_those_of_the_messages():
    wanted = (ROOT / "tests/cuda_build/requirements.txt").read_text().splitlines()
    assert checks.LIGER in wanted and set(re.findall("torch-optimi==[0-9.]+", DOCS)) == {wanted[-1]}


def test_liger_is_refused_where_it_would_do_nothing(error_of):
    published = ROOT / "tests/published/models"
    check_model_of_liger(str(published / "Qwen/Qwen2-0.5B"), None)
    message = error_of(check_model_of_liger, str(published / "openai-community/gpt2-xl"), None)
    assert "Liger has no kernels for" in message and "(gpt2)" in message


@pytest.mark.parametrize(("optimizer", "is_kept"), [(torch.optim.AdamW, False), (partial(StableAdamW, triton=False), True)])
def test_small_updates_of_16bit_weights(optimizer, is_kept):
    """1,000 steps of 1e-5 move a weight from 1 to 0.99. A step alone is less than bf16 can subtract from 1."""
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = optimizer([weight], lr=1e-5, weight_decay=0)
    for _ in range(1000):
        weight.grad = torch.full_like(weight, 0.1)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(0.99 if is_kept else 1, abs=4e-3)


def test_rehearsal_with_liger(rehearse):
    """Without a GPU, it has the losses of a rehearsal without the flag."""
    flags = ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no"]
    plain = rehearse("llama31_8b_lora", "4gpu_full_shard", *flags)
    assert losses(rehearse("llama31_8b_lora", "4gpu_full_shard", *flags, "--use_liger_kernel", "true")) == losses(plain)


FLAGS = ["--optim", "stable_adamw", "--bf16", "false", "--logging_steps", "1", "--eval_strategy", "no"]
FLAGS += ["--dataset_streaming", "false"]


@pytest.mark.parametrize("config", ["1x3090", "1x3090_offload", "4gpu_full_shard"])
def test_16bit_weights_resume(rehearse, fork_launch, tmp_path, config):
    """The sums of what was rounded away are in the checkpoint: a resumed run logs the losses of an uninterrupted one."""
    flags = [*FLAGS, "--dtype", "bfloat16", "--max_steps", "4", "--save_steps", "2", "--global_batch_size", "4"]
    run, copy = rehearse("qwen2_fineweb_edu", config, *flags), tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoint-4")
    (copy / "train_results.json").unlink()
    variables = fewer_processes(config)
    process = fork_launch("--tiny", "qwen2_fineweb_edu", config, "--output_dir", copy, *flags, **variables)
    assert process.returncode == 0 and "warning: weights are trained in" not in process.stdout, process.stdout + process.stderr
    assert read(copy)["resumed_from_step"] == 2 and losses(copy) == losses(run)


def test_sharded_stable_adamw_equals_unsharded(rehearse):
    """It divides the learning rate by a mean over a weight, of which three processes have shards of different sizes."""
    flags = [*FLAGS, "--max_steps", "4", "--save_strategy", "no", "--learning_rate", "3e-3"]
    flags += ["--global_batch_size", "3", "--per_device_train_batch_size", "1"]
    sharded = losses(rehearse("qwen2_fineweb_edu", "4gpu_full_shard", *flags, NPROC_PER_NODE="3"))
    for step, (loss, grad_norm) in losses(rehearse("qwen2_fineweb_edu", "1x3090", *flags)).items():
        assert sharded[step] == (pytest.approx(loss, abs=1e-4), pytest.approx(grad_norm, rel=1e-3))
