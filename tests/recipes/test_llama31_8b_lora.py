"""llama31_8b_lora: the loss is on the code only, and only adapters are trained."""

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
