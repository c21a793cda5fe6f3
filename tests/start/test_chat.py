"""Whatever the family: what is trained on is written as the model's own template writes it, its answers and their ends marked."""

from pathlib import Path
from types import SimpleNamespace

from harness.rehearsal import tiny_model
from harness.start import chat

import pytest
import trl
from conftest import ROOT
from trl.chat_template_utils import has_generation_markers

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ASKED, TOLD = {"role": "user", "content": "Why is it so?"}, {"role": "assistant", "content": "Because of that."}
ONE, MORE = [ASKED, TOLD], [ASKED, TOLD, ASKED, {"role": "assistant", "content": "Once more."}]
# A family, and what it ends an answer with.
ENDS = {
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "qwen2_5": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "smolvlm": None,  # writes lists of parts
    "deepseekv3": "<｜end▁of▁sentence｜>",  # TRL's: its own writes what it asks with in another way
    "phi3": "<|end|>",
}


@pytest.fixture(scope="module")
def tokenizer():
    """With the special tokens of all these families."""
    tokenizer = tiny_model.make_tokenizer(tiny_model.family_of("meta-llama/Llama-3.1-8B"))
    tokenizer.add_special_tokens({"additional_special_tokens": [end for end in ENDS.values() if end]})
    return tokenizer


def rendered(tokenizer, template, turns) -> tuple[str, str]:
    """What `template` writes, and the part of it that is marked."""
    text = tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
    mask = {"return_dict": True, "return_assistant_tokens_mask": True}
    both = tokenizer.apply_chat_template(turns, chat_template=template, **mask)
    marked = [token for token, is_it in zip(both["input_ids"], both["assistant_masks"], strict=True) if is_it]
    return text, tokenizer.decode(marked)


@pytest.mark.parametrize("family", [name for name, end in ENDS.items() if end])
def test_a_template_to_train_with(tokenizer, family):
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    template = chat.training_template(tokenizer)
    for turns in (ONE, MORE):
        text, marked = rendered(tokenizer, template, turns)
        assert text == tokenizer.apply_chat_template(turns, tokenize=False)
        answers = [turn["content"] + ENDS[family] for turn in turns if turn["role"] == "assistant"]
        assert all(answer in marked for answer in answers) and ASKED["content"] not in marked


def test_what_a_turn_is_written_as_may_not_change(tokenizer, says):
    """Qwen3 leaves its thoughts out of all answers but the last: rows of one answer train, others are one line."""
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    template = chat.training_template(tokenizer)
    assert rendered(tokenizer, template, ONE)[0] == tokenizer.apply_chat_template(ONE, tokenize=False)
    args = SimpleNamespace(chat_template_path=None, assistant_only_loss=True)
    check_with = lambda rows: chat.check(args, SimpleNamespace(tokenizer=tokenizer), frozenset(), rows, "Qwen/Qwen3-0.6B")  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "_tokenizer", lambda model: model.tokenizer)
        check_with([{"messages": ONE}, {"prompt": ONE[:1], "completion": ONE[1:]}, {"text": "no chat"}])
        message = says(check_with, [{"messages": ONE}, {"messages": MORE}])
    assert "Qwen/Qwen3-0.6B" in message and "--assistant_only_loss false" in message


def test_a_template_with_marks_of_its_own_is_left_alone(tokenizer):
    tokenizer.chat_template = (TEMPLATES / "llama3_training.jinja").read_text()
    assert has_generation_markers(tokenizer.chat_template) and chat.training_template(tokenizer) is None


def test_plain_headings(tokenizer):
    """For base models: an answer ends as a text does, and a server's prompt is what was trained on."""
    tokenizer.chat_template = (ROOT / "recipes/headings.jinja").read_text()
    text, marked = rendered(tokenizer, chat.training_template(tokenizer), MORE)
    start = "<|begin_of_text|>### User\nWhy is it so?\n\n### Assistant\n"
    assert text.startswith(f"{start}Because of that.<|end_of_text|>\n\n### User\n")
    assert marked == "Because of that.<|end_of_text|>Once more.<|end_of_text|>"
    assert tokenizer.apply_chat_template(MORE[:1], tokenize=False, add_generation_prompt=True) == start


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model_name_or_path", "meta-llama/Llama-3.1-8B"], ["Llama-3.1-8B has no chat template", "headings.jinja"]),
        (["--chat_template_path", "nowhere.jinja"], ["--chat_template_path nowhere.jinja is no file"]),
    ],
)
def test_chat_with_a_model_that_knows_no_turns(build_trainer, capsys, flags, words):
    with pytest.raises(SystemExit):
        build_trainer("qwen2_chat", *flags)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words)


def test_headings_for_a_base_model_and_a_template_of_its_own(build_trainer):
    """A recipe's template is for a model that has none."""
    headings = (ROOT / "recipes/headings.jinja").read_text()
    flags = ["--model_name_or_path", "meta-llama/Llama-3.1-8B", "--chat_template_path", str(ROOT / "recipes/headings.jinja")]
    assert build_trainer("qwen2_chat", *flags).processing_class.chat_template == headings
    instruct = ["--load_in_4bit", "false", "--model_name_or_path", "Qwen/Qwen2-0.5B-Instruct", "--lora_dropout", "0"]
    assert "im_start" in build_trainer("llama31_70b_qlora", *instruct).processing_class.chat_template
