"""bitsandbytes' 8-bit AdamW: on one GPU, and sharded by FSDP."""

import shutil

from harness.compat.bitsandbytes import sharded_adamw
from harness.run.disk import estimated_sizes, folder_size

import pytest
import torch
from conftest import losses, read, slow
from torch.distributed.checkpoint import FileSystemReader

RECIPE = "qwen2_fineweb_edu"
FLAGS = ["--optim", "adamw_8bit", "--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--eval_strategy", "no"]
FLAGS += ["--global_batch_size", "4", "--dataset_streaming", "false"]


def resume(run, copy, fork_launch, config, **variables):
    """Resumes a copy of a finished run from its first checkpoint."""
    shutil.copytree(run, copy)
    for path in (copy / "checkpoint-4", copy / "train_results.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    process = fork_launch("--tiny", RECIPE, config, "--output_dir", copy, *FLAGS, **variables)
    assert process.returncode == 0 and read(copy)["resumed_from_step"] == 2, process.stdout + process.stderr


@slow
def test_one_gpu(rehearse, fork_launch, build_trainer, tmp_path):
    """A resumed run is the same, and its checkpoint has the size that the check of the disk expects."""
    run = rehearse(RECIPE, "1x3090", *FLAGS)
    resume(run, tmp_path / "run", fork_launch, "1x3090")
    assert losses(tmp_path / "run") == losses(run)
    assert (tmp_path / "run/model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    trainer = build_trainer(RECIPE, "--optim", "adamw_8bit")
    checkpoint, _ = estimated_sizes(trainer)
    weights = sum(weight.nbytes for weight in trainer.model.parameters())
    assert checkpoint == 1.5 * weights, "two moments of 1 byte for weights of 4"
    assert checkpoint < folder_size(run / "checkpoint-2") < 3 * weights, "the moments of the embeddings have 4 bytes"


def test_sharded(rehearse, fork_launch, tmp_path):
    """Two processes. Resumed in one process, the run goes on with the same losses: states are sharded as the weights are."""
    run = rehearse(RECIPE, "4gpu_full_shard", *FLAGS, NPROC_PER_NODE="2")
    saved = FileSystemReader(run / "checkpoint-2/optimizer_0").read_metadata().state_dict_metadata
    dtypes = {name: entry.properties.dtype for name, entry in saved.items() if name.endswith("state1")}
    assert torch.uint8 in dtypes.values()
    (of_embedding,) = (dtype for name, dtype in dtypes.items() if "embed_tokens" in name)
    assert of_embedding == torch.float32 and "bitsandbytes" in str(sharded_adamw())
    resume(run, tmp_path / "run", fork_launch, "4gpu_full_shard", NPROC_PER_NODE="1")
    for step, (loss, grad_norm) in losses(tmp_path / "run").items():
        assert (loss, grad_norm) == pytest.approx(losses(run)[step], rel=5e-3)
