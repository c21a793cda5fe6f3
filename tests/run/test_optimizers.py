"""bitsandbytes' 8-bit AdamW on one GPU."""

import shutil

from harness.run.disk import estimated_sizes

from conftest import slow
from runs import losses, read

RECIPE = "qwen2_fineweb_edu"
FLAGS = ["--optim", "adamw_8bit", "--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--eval_strategy", "no"]
FLAGS += ["--global_batch_size", "4", "--dataset_streaming", "false"]


@slow
def test_resumed_equals_uninterrupted(rehearse, fork_launch, build_trainer, tmp_path):
    """And its checkpoint has the size that the check of the disk expects."""
    run, copy = rehearse(RECIPE, "1x3090", *FLAGS), tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoint-4")
    (copy / "train_results.json").unlink()
    process = fork_launch("--tiny", RECIPE, "1x3090", "--output_dir", copy, *FLAGS)
    assert process.returncode == 0 and read(copy)["resumed_from_step"] == 2, process.stdout + process.stderr
    assert losses(copy) == losses(run)
    assert (copy / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    trainer = build_trainer(RECIPE, "--optim", "adamw_8bit")
    checkpoint, _ = estimated_sizes(trainer)
    weights = sum(weight.nbytes for weight in trainer.model.parameters())
    assert checkpoint == 1.5 * weights, "two moments of 1 byte for weights of 4"
    size = sum(file.stat().st_size for file in (run / "checkpoint-2").rglob("*") if file.is_file())
    assert checkpoint < size < 3 * weights, "the moments of the embeddings have 4 bytes"
