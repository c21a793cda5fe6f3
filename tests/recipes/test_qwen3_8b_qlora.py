"""qwen3_8b_qlora: the loss is on the reasoning and the answer, and every answer of a conversation keeps its reasoning."""

import json

import pytest
from trained import texts_in_loss


def test_reasoning_of_every_answer_counts(build_trainer):
    trainer = build_trainer("qwen3_8b_qlora", "--load_in_4bit", "false", "--max_length", "8192")
    row = trainer.train_dataset[0]
    documents = trainer.processing_class.decode(row["input_ids"]).split("<|im_start|>user\n")
    assert any("</think>" not in part for part in documents), "the template drops the reasoning of earlier answers"
    counted = texts_in_loss(trainer, row)
    assert len(counted) > 3
    for text in counted:
        assert text.startswith("<think>\nA short thought.\n</think>\n\n") and text.endswith("<|im_end|>"), text
        assert text.count("<think>") == 1


def test_answers_without_thinking(build_trainer, tmp_path):
    """Without a thought in the rows the empty one counts, unless the prompt already has it."""
    data = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    data.write_text("\n".join(json.dumps({"messages": turns, "system": f"Number {number}"}) for number in range(20)))
    flags = ["--load_in_4bit", "false", "--dataset_name", str(data), "--packing", "true"]
    for more, expected in ([], "<think>\n\n</think>\n\nSo.<|im_end|>"), (["--chat_template_kwargs"], "So.<|im_end|>"):
        trainer = build_trainer("qwen3_8b_qlora", *flags, *more, *(['{"enable_thinking": false}'] if more else []))
        assert set(texts_in_loss(trainer, trainer.train_dataset[0])) == {expected}


def test_reasoning_without_thinking_is_an_error(build_trainer, capsys):
    with pytest.raises(SystemExit):
        build_trainer("qwen3_8b_qlora", "--load_in_4bit", "false", "--chat_template_kwargs", '{"enable_thinking": false}')
    assert "enable_thinking is false, but" in capsys.readouterr().err
