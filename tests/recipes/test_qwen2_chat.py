"""qwen2_chat: the loss is on the assistant's turns and their end tokens; the model's own chat template is saved."""

from runs import tiny_tokenizer
from trained import texts_in_loss


def test_loss_is_on_assistant_turns_only(build_trainer):
    trainer = build_trainer("qwen2_chat", "--max_length", "8192")
    row = trainer.train_dataset[0]
    text = trainer.processing_class.decode(row["input_ids"])
    # Everything from after the assistant's header up to and including the end of its turn.
    turns = [turn.split("<|im_end|>")[0] + "<|im_end|>" for turn in text.split("<|im_start|>assistant\n")[1:]]
    assert len(turns) > 3
    assert "".join(texts_in_loss(trainer, row)) == "".join(turns)
    template = tiny_tokenizer("Qwen/Qwen2-0.5B-Instruct").chat_template
    assert template and trainer.processing_class.chat_template == template  # it is saved with the model
