"""qwen35_4b_images: rows with and without images on several processes, a resumed run, what it saves, and what it refuses."""

import json

import pytest
from conftest import slow
from runs import losses, merge
from transformers import AutoProcessor

pytest.importorskip("torchvision")
RECIPE = "qwen35_4b_images"
# Of the tiny rows, in turn one has an image, one two, one none and one an image. In float32, losses differ by rounding only.
SAME_STEPS = ["--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--per_device_train_batch_size", "1"]
SAME_STEPS += ["--global_batch_size", "4", "--bf16", "false", "--learning_rate", "3e-3", "--lora_dropout", "0"]


@slow
@pytest.mark.parametrize("config", ["4gpu_ddp", "4gpu_full_shard"])
def test_rows_with_and_without_images_on_two_processes(rehearse, config):
    """A process whose rows have no image waits for no other. Two processes compute what one does."""
    alone = losses(rehearse(RECIPE, "1x3090", *SAME_STEPS))
    together = losses(rehearse(RECIPE, config, *SAME_STEPS, NPROC_PER_NODE="2"))
    assert alone.keys() == together.keys() and len(alone) == 4
    for step, (loss, grad_norm) in alone.items():
        assert together[step][0] == pytest.approx(loss, abs=1e-4), step
        assert together[step][1] == pytest.approx(grad_norm, rel=1e-3), step


def test_saved_model_reads_images(rehearse, tmp_path, capsys):
    """The processor is saved with its limit, also merged; --verify computes the loss of the run; an image can be asked about."""
    from harness.commands import verify

    run = rehearse(RECIPE, "4gpu_ddp")
    merge(run, tmp_path / "merged")
    capsys.readouterr()
    assert verify.main(str(run), str(tmp_path / "merged"), "--json") == 0
    checks = json.loads(capsys.readouterr().out)
    assert [check["result"] for check in checks] == ["ok"] * 4
    for folder in (run, tmp_path / "merged"):
        assert AutoProcessor.from_pretrained(folder).image_processor.size["longest_edge"] == 64 * 64
    samples = (run / "samples.txt").read_text()
    assert "<|image_pad|>" in samples and "<|image_pad|><|image_pad|>" not in samples  # one token of each image is printed


def test_packing_is_refused(build_trainer, capsys):
    with pytest.raises(SystemExit) as end:
        build_trainer(RECIPE, "--packing", "true")
    assert end.value.code == 2 and "error: --packing" in capsys.readouterr().err


def test_adapter_is_in_text_part_with_linear_attention(build_trainer):
    trainer = build_trainer(RECIPE)
    names = {name.rpartition(".lora_A")[0] for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    ends = {name.rpartition(".")[2] for name in names if name}
    assert {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"} <= ends
    assert all(".language_model." in name for name in names if name)
