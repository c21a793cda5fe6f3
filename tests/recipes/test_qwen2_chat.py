"""The loss is on the assistant's turns and their end, by a template that writes what the model's own writes."""

from harness.rehearsal import tiny_model

from trained import in_the_loss


def test_chat_trains_on_the_assistants_turns_and_their_end(build_trainer):
    trainer = build_trainer("qwen2_chat", "--max_length", "8192")
    row = trainer.train_dataset[0]
    text = trainer.processing_class.decode(row["input_ids"])
    # Everything between the assistant's header and the end of its turn, that end included, and nothing else.
    turns = [turn.split("<|im_end|>")[0] + "<|im_end|>" for turn in text.split("<|im_start|>assistant\n")[1:]]
    assert len(turns) > 3
    assert "".join(in_the_loss(trainer, row)) == "".join(turns)
    known = tiny_model.family_of("Qwen/Qwen2-0.5B-Instruct")["tokenizer"]
    assert trainer.processing_class.chat_template == known["chat_template"]  # what is saved is the model's own
