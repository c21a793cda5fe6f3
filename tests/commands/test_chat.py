"""`--chat` loads the model of a run as it was trained, and answers lines of standard input in the run's chat template."""

import io
import json
import shutil
import sys
from pathlib import Path

from harness.commands import chat, saved
from harness.data.chat_templates import describe_rows

import pytest
import torch
from datasets import Dataset
from runs import assert_one_error, read

QLORA = ("llama31_70b_qlora", "2x3090_qlora")


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


def answer_lines(lines: str, monkeypatch, run, *words: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    chat.main(str(run), *words)


@pytest.fixture
def asked(monkeypatch):
    """What --chat gives to the model, and what it answers; the first token of an answer is the one that the model predicts."""
    prompts, answers, generate = [], [], chat.generate

    def record(model, tokenizer, inputs, new_tokens):
        prompts.append(tokenizer.decode(inputs["input_ids"][0]))
        answers.append(generate(model, tokenizer, inputs, new_tokens))
        with torch.no_grad():
            first = model(input_ids=inputs["input_ids"]).logits[0, -1].argmax()
        assert answers[-1].startswith(tokenizer.decode(first, skip_special_tokens=True).strip())
        return answers[-1]

    monkeypatch.setattr(chat, "generate", record)
    return prompts, answers


def test_conversation_with_a_4bit_model(rehearse, monkeypatch, capsys, asked):
    """The prompts have the run's template and the earlier turns; answers are what the model says, up to --max_new_tokens."""
    answer_lines("Why?\nHow?\n\nWho?\n", monkeypatch, rehearse(*QLORA), "--max_new_tokens", "4")
    printed, ((first, second, third), answers) = capsys.readouterr().out, asked
    assert first == "<|begin_of_text|>### User\nWhy?\n\n### Assistant\n"
    assert second.startswith(first + answers[0]) and second.endswith("### User\nHow?\n\n### Assistant\n")
    assert third == first.replace("Why", "Who"), "an empty line starts a new conversation"
    assert all(answer in printed for answer in answers)


def test_run_on_texts_continues_a_text(rehearse, monkeypatch, asked):
    """Qwen2-0.5B has a chat template, which this run has not used."""
    run = rehearse("qwen2_fineweb_edu", "1x3090")
    assert saved.load_saved_tokenizer(run).chat_template
    answer_lines("The sun\\nis\n\n", monkeypatch, run, "--max_new_tokens=3")
    assert asked[0] == ["The sun\nis"]


def test_system_message_of_the_training_rows():
    def described(*systems):
        rows = [[{"role": "system", "content": text}] if text else [] for text in systems]
        answer = {"role": "assistant", "content": "Yes."}
        return describe_rows(Dataset.from_list([{"messages": [*turns, answer]} for turns in rows]))

    assert described("Be brief.", "Be brief.") == {"rows": "conversations", "system": "Be brief."}
    assert described("Be brief.", "Be kind.")["system"] is described("Be brief.", None)["system"] is None


def test_system_message(rehearse, monkeypatch, tmp_path, asked):
    """A run's own system message is in every prompt, and --system replaces it."""
    run = tmp_path / "run"
    shutil.copytree(rehearse("qwen2_chat", "1x3090"), run)
    (run / "prompt.json").write_text(json.dumps(read(run, "prompt.json") | {"system": "Be brief."}))
    answer_lines("Why?\n\nHow?\n", monkeypatch, run, "--max_new_tokens=1")
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert [prompt.startswith(start) for prompt in asked[0]] == [True, True]
    answer_lines("Why?\n", monkeypatch, run, "--max_new_tokens=1", "--system", "Be kind.")
    assert "Be kind." in asked[0][-1] and "Be brief." not in asked[0][-1]


def change_results(run: Path, **values) -> None:
    (run / "train_results.json").write_text(json.dumps(read(run) | values))


def test_quantized_weights_that_are_not_there(rehearse, monkeypatch, tmp_path, error_of):
    """Those of another machine are looked for by the name of their folder, which --prepare with the same flags gives them too.

    A run without FSDP has no such folder. Quantizing again gives the same weights.
    """
    run = Path(shutil.copytree(rehearse(*QLORA), tmp_path / "run"))
    results, expected = read(run), logits(saved.load_model(run))
    known = Path(results["quantized_weights"])
    change_results(run, quantized_weights=f"/on/another/machine/{known.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert "./launch.sh --prepare llama31_70b_qlora" in error_of(saved.load_model, run)
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / known.name).symlink_to(known)
    assert torch.equal(logits(saved.load_model(run)), expected)
    change_results(run, quantized_weights="")
    assert torch.equal(logits(saved.load_model(run)), expected)
    change_results(run, quantization=results["quantization"] | {"bnb_4bit_compute_dtype": "float32"})  # of a run with --dtype
    assert saved.load_model(run).get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("words", [[], [".", "--image", "no"], [".", "--max_new_tokens", "many"], [".", "--top_p", "1"], ["."]])
def test_mistake_is_one_error(launch, words):
    assert_one_error(launch("--chat", *words), "./launch.sh", *words[1:2])
