"""llama31_8b_lora: the loss is on the code only, and only adapters are trained unless --use_peft is false."""

from harness.commands import merge

import torch
from conftest import slow
from safetensors.torch import load_file
from trained import texts_in_loss


def test_loss_is_on_completions_only(build_trainer):
    trainer = build_trainer("llama31_8b_lora", "--max_length", "2048")
    tokenizer = trainer.processing_class
    for row in (trainer.train_dataset[0], trainer.eval_dataset[0]):
        text = tokenizer.decode(row["input_ids"])
        completions = [piece.split("<|end_of_text|>")[0] + "<|end_of_text|>" for piece in text.split("### Python")[1:]]
        assert len(completions) == len(row["seq_lengths"])
        assert texts_in_loss(trainer, row) == completions
    frozen = [name for name, weight in trainer.model.named_parameters() if not weight.requires_grad]
    trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert all("lora_" in name for name in trained) and not any("lora_" in name for name in frozen)
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_full_fine_tune(build_trainer):
    trainer = build_trainer("llama31_8b_lora", "--use_peft", "false")
    assert all(weight.requires_grad for weight in trainer.model.parameters())


@slow
def test_saved_adapter_is_not_rounded(rehearse):
    """The last evaluation comes after the checkpoint, and leaves the weights all-gathered in bf16; the saved ones are float32."""
    flags = ["--max_steps", "2", "--save_steps", "2", "--eval_strategy", "no"]
    run = rehearse("llama31_8b_lora", "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2")
    saved, shards = load_file(run / "adapter_model.safetensors"), merge.read_sharded(run / "checkpoint-2", None)
    assert len(saved) == 28 and {merge.WRAPPER + name for name in saved} == shards.keys()
    assert all(torch.equal(shards[merge.WRAPPER + name], weight) for name, weight in saved.items())
    assert all((weight != weight.bfloat16().float()).any() for name, weight in saved.items() if "lora_B" in name)
