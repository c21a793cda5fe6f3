"""A marked chat template renders the same text as the model's own, and marks the answers with their end tokens."""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from harness.data import chat_templates, conversion, formats
from harness.data.chat_templates import check_conversations, training_template
from harness.data.reading import DataSettings
from harness.rehearsal import tiny

import pytest
import trl
from conftest import ROOT
from runs import tiny_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QUESTION = {"role": "user", "content": "Why is it so?"}
ANSWER, SECOND_ANSWER = ({"role": "assistant", "content": text} for text in ("Because of that.", "Once more."))
ONE_ANSWER, TWO_ANSWERS = [QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION, SECOND_ANSWER]
# The end token of an answer in the chat template of each family.
END_TOKENS = {
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "qwen2_5": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",  # TRL's copy is used: the family's own renders the prompt differently
    "phi3": "<|end|>",
}


def placed(rows):
    return [(f"a.jsonl, line {number}", row) for number, row in enumerate(rows, 1)]


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer with the end tokens of all these families."""
    tokenizer = tiny_tokenizer("meta-llama/Llama-3.1-8B")
    tokenizer.add_special_tokens({"additional_special_tokens": list(END_TOKENS.values())})
    return tokenizer


def render(tokenizer, template, turns) -> tuple[str, str]:
    """The text that `template` renders, and its marked part."""
    text = tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
    mask = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = tokenizer.apply_chat_template(turns, chat_template=template, **mask)
    marked = [token for token, is_marked in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if is_marked]
    return text, tokenizer.decode(marked)


@pytest.mark.parametrize("family", END_TOKENS)
def test_training_template(tokenizer, family):
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    template = training_template(tokenizer)
    for turns in (ONE_ANSWER, TWO_ANSWERS):
        text, marked = render(tokenizer, template, turns)
        assert text == tokenizer.apply_chat_template(turns, tokenize=False)
        answers = [turn["content"] + END_TOKENS[family] for turn in turns if turn["role"] == "assistant"]
        assert all(answer in marked for answer in answers) and QUESTION["content"] not in marked


SFT = {"chat_template_path": None, "assistant_only_loss": True}


@pytest.fixture
def check(tokenizer, monkeypatch):
    """`check_conversations` of rows with the chat template of a family."""
    monkeypatch.setattr(chat_templates, "load_bare_tokenizer", lambda *arguments: tokenizer)

    def call(family, *rows, splits=False, **flags):
        tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
        check_conversations(placed(rows), SimpleNamespace(**flags), trl.ModelConfig("Qwen/Qwen3-0.6B"), splits)

    return call


def test_template_that_renders_earlier_answers_differently(tokenizer, check, error_of):
    """Qwen3's template drops the reasoning of all answers but the last: only rows with one answer can be trained on."""
    pair = {"prompt": ONE_ANSWER[:1], "completion": ONE_ANSWER[1:]}
    check("qwen3", {"messages": ONE_ANSWER}, pair, {"text": "no conversation"}, **SFT)
    template = training_template(tokenizer)
    assert render(tokenizer, template, ONE_ANSWER)[0] == tokenizer.apply_chat_template(ONE_ANSWER, tokenize=False)
    message = error_of(check, "qwen3", {"messages": ONE_ANSWER}, {"messages": TWO_ANSWERS}, **SFT)
    assert "Qwen/Qwen3-0.6B" in message and "--assistant_only_loss false" in message
    for splits in (False, True):  # two answers in a row, of which only the last has reasoning: a row for each does not help
        message = error_of(check, "qwen3", {"messages": [QUESTION, ANSWER, ANSWER]}, splits=splits, **SFT)
        assert "--split_conversations" not in message and "line 1" in message


WEATHER = {"name": "get_weather", "description": "Get it.", "parameters": {"properties": {"city": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
WITH_CALL = {
    "messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "20"}, ANSWER],
    "tools": [{"type": "function", "function": WEATHER}],
}
THOUGHT = {"messages": [QUESTION, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."}]}
TWO_THOUGHTS = {"messages": [{**turn} for turn in THOUGHT["messages"] * 2]}
REASONING = {"messages": [QUESTION, ANSWER | {"reasoning_content": "Hm.", "thinking": "Hm."}]}


@pytest.mark.parametrize(
    ("family", "row", "missing"),
    [
        ("qwen2", WITH_CALL, "the tool calls of turn 2 (assistant)"),
        ("qwen2", {"messages": ONE_ANSWER, "tools": WITH_CALL["tools"]}, "the tools of the conversation"),
        ("qwen2_5", WITH_CALL, None),
        ("qwen3", WITH_CALL, None),
        ("llama3_1", WITH_CALL, None),
        ("gemma3", WITH_CALL, "fails (Conversation roles must alternate"),
        ("qwen2", THOUGHT, None),
        ("qwen3", THOUGHT, None),
        ("deepseek_r1_distill", THOUGHT, "the reasoning of turn 2 (assistant)"),
        ("llama3_1", TWO_THOUGHTS, None),
        ("qwen3", TWO_THOUGHTS, "pass --split_conversations true"),
        ("llama3_1", REASONING, "write it into the content as <think>"),
        ("qwen3", REASONING, None),
        ("gptoss", REASONING, None),
        ("qwen2_5", {"messages": [{"role": "critic", "content": "No."}, *ONE_ANSWER]}, "the content of turn 1 (critic)"),
    ],
)
def test_what_a_template_leaves_out_is_an_error(tokenizer, error_of, family, row, missing):
    if family == "qwen2":
        tokenizer.chat_template = tiny.family_of("Qwen/Qwen2-0.5B-Instruct")["tokenizer"]["chat_template"]
    else:
        tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    if missing is None:
        chat_templates.check_rendering(tokenizer, f"of {family}", placed([row]), can_split=True)
    else:
        assert missing in error_of(chat_templates.check_rendering, tokenizer, f"of {family}", placed([row]), True)


# Whether each family needs the arguments of tool calls as JSON. TRL's copy of DeepSeek's template for the training does not.
NEEDS_TEXT = {"deepseekv3": True, "deepseekv3_training": False, "qwen2_5": False, "llama3_1": False, "python": True}


@pytest.mark.parametrize("family", NEEDS_TEXT)
def test_form_of_tool_calls(tokenizer, family):
    """Arguments are JSON if the template fails on objects, or writes them as Python does."""
    if family == "python":
        calls = "{% for c in m.tool_calls %}{{ c.function.name ~ c.function.arguments }}{% endfor %}"
        tokenizer.chat_template = "{% for m in messages %}{{ m.role ~ m.content }}" + calls + "{% endfor %}"
    else:
        tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    assert chat_templates.expects_text_arguments(tokenizer) == NEEDS_TEXT[family]
    ((_, fitted),) = chat_templates.fit_calls(tokenizer, placed([{"messages": WITH_CALL["messages"]}]))
    chat_templates.check_rendering(tokenizer, f"of {family}", [("a row", fitted)], can_split=True)
    arguments = fitted["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == ('{"city": "Paris"}' if NEEDS_TEXT[family] else {"city": "Paris"})
    assert WITH_CALL["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}, "the row is another one"


def test_arguments_of_calls_in_the_run(tokenizer, monkeypatch):
    """As the template needs them that makes the tokens: DeepSeek's own, or TRL's copy that marks the answers."""
    tokenizer.chat_template = (TEMPLATES / "deepseekv3.jinja").read_text()
    monkeypatch.setattr(chat_templates, "load_bare_tokenizer", lambda *arguments: tokenizer)
    rows = placed([{"messages": WITH_CALL["messages"]}])
    for assistant_only_loss, has_text in ((False, True), (True, False)):
        training_args = SimpleNamespace(chat_template_path=None, assistant_only_loss=assistant_only_loss)
        check_conversations(rows, training_args, trl.ModelConfig("a model"))
        data = chat_templates.fit_template(DataSettings((), ("messages",)), training_args, SimpleNamespace(), frozenset())
        assert data.has_text_arguments == has_text and data.template_date == ""
    tokenizer.chat_template = (TEMPLATES / "llama3_2.jinja").read_text()
    data = chat_templates.fit_template(DataSettings((), ("messages",)), training_args, SimpleNamespace(), frozenset())
    assert datetime.now().strftime("%d %b %Y") in data.template_date


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_1"])
def test_turns_that_do_not_count_are_not_marked(tokenizer, family):
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    turns = [QUESTION, ANSWER | {"train": False}, QUESTION, SECOND_ANSWER]
    text, marked = render(tokenizer, training_template(tokenizer), turns)
    assert text == tokenizer.apply_chat_template(turns, tokenize=False)
    assert SECOND_ANSWER["content"] in marked and ANSWER["content"] not in marked


def test_marks_that_a_template_cannot_follow(check, error_of):
    marked = {"messages": [QUESTION, ANSWER | {"train": False}, QUESTION, SECOND_ANSWER]}
    assert "marks the answers itself" in error_of(check, "llama3_training", marked, **SFT)
    check("llama3_1", marked, **SFT)
    two_shapes = {"messages": ONE_ANSWER}, {"prompt": ONE_ANSWER[:1], "completion": ONE_ANSWER[1:]}
    every_turn = SFT | {"assistant_only_loss": False}
    for wrong in ((marked,), two_shapes):
        assert "pass --assistant_only_loss true" in error_of(check, "llama3_1", *wrong, **every_turn)
    check("llama3_1", two_shapes[0], **every_turn)


def test_row_of_the_page(check):
    """The row with reasoning and tools in docs/your-data.md is complete, and both of its answers count."""
    rows = re.findall(r"```json\n(\{\"messages.*?)```", (ROOT / "docs/your-data.md").read_text(), re.DOTALL)
    (text,) = [row for row in rows if "tool_calls" in row]
    row, reason = formats.convert(json.loads(text), "messages")
    assert not reason and len(conversion.split_answers(row)) == 2
    check("qwen3", row, splits=True, **SFT)


def test_preferences(check, error_of):
    """Their loss counts all of an answer. With thinking turned off, reasoning would begin in the prompt's empty one."""
    good = ANSWER | {"content": "<think>\nHm.\n</think>\n\nSo."}
    row = {"prompt": [QUESTION], "chosen": [good], "rejected": [ANSWER]}
    check("qwen3", row | {"chat_template_kwargs": {"enable_thinking": True}})
    row["chat_template_kwargs"] = {"enable_thinking": False}
    message = error_of(check, "qwen3", row | {"chosen": [ANSWER]}, row)
    assert "--chat_template_kwargs" in message and "line 2" in message
    row = {"prompt": [QUESTION], "chosen": [ANSWER, QUESTION, SECOND_ANSWER], "rejected": [SECOND_ANSWER]}
    check("llama3_1", row)
    message = error_of(check, "llama3_1", row, row | {"chosen": [ANSWER | {"train": False}, QUESTION, SECOND_ANSWER]})
    assert message.startswith("a.jsonl, line 2: a part of an answer is marked")


def test_named_templates(tokenizer):
    """Rows with tools are rendered and marked with the second one."""
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>\n{% endfor %}"
    plain = turns + "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer.chat_template = {"default": plain, "tool_use": "{{ tools[0].function.name }}\n" + plain}
    template = training_template(tokenizer)
    for tools in (None, WITH_CALL["tools"]):
        text = tokenizer.apply_chat_template(TWO_ANSWERS, tokenize=False, tools=tools)
        assert text.startswith("get_weather\nuser" if tools else "user")
        assert text == tokenizer.apply_chat_template(TWO_ANSWERS, tokenize=False, tools=tools, chat_template=template)
        assert render(tokenizer, template, TWO_ANSWERS)[1] == "Because of that.<|im_end|>Once more.<|im_end|>"
    tokenizer.chat_template["tool_use"] += "{% generation %}{% endgeneration %}"
    with pytest.raises(ValueError, match="only one marks"):
        training_template(tokenizer)


@pytest.mark.parametrize(
    ("template", "ignored"),
    [
        ("{{ m.name }}{{ m.content }}{{ m.tool_calls }}", "mood, id"),
        ("{{ m.content }}", "name, mood, id, tool_calls.status"),
        # The turn's key id, which its calls have too.
        ("{{ m.content }}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}", "name, mood, id, tool_calls.status"),
    ],
)
def test_keys_of_turns_that_a_template_ignores(tokenizer, capsys, template, ignored):
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    call = {"function": {"name": "look", "arguments": {}}, "status": "ok", "id": "call-1"}
    turns = [QUESTION | {"name": "Ann", "mood": "good"}, ANSWER | {"id": "turn-1", "tool_calls": [call]}]
    chat_templates.print_ignored_keys(tokenizer, placed([{"messages": turns}]))
    assert capsys.readouterr().out.endswith(f": {ignored}.\n")


def test_template_with_markers_is_used_as_it_is(tokenizer):
    tokenizer.chat_template = (TEMPLATES / "llama3_training.jinja").read_text()
    assert training_template(tokenizer) == tokenizer.chat_template.removesuffix("\n")


def test_headings_template(tokenizer):
    """For base models: an answer ends with the end-of-text token, and the prompt of a server is one that was trained on."""
    tokenizer.chat_template = (ROOT / "recipes/headings.jinja").read_text()
    text, marked = render(tokenizer, training_template(tokenizer), TWO_ANSWERS)
    prompt = "<|begin_of_text|>### User\nWhy is it so?\n\n### Assistant\n"
    assert text.startswith(f"{prompt}Because of that.<|end_of_text|>\n\n### User\n")
    assert marked == "Because of that.<|end_of_text|>Once more.<|end_of_text|>"
    assert tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True) == prompt


@pytest.mark.parametrize(
    ("flag", "value", "word"),
    [("--model_name_or_path", "meta-llama/Llama-3.1-8B", "headings.jinja"), ("--chat_template_path", "no.jinja", "not found")],
)
def test_no_template(build_trainer, error_of, flag, value, word):
    message = error_of(build_trainer, "qwen2_chat", flag, value)
    assert flag in message and word in message


def test_template_of_recipe_is_for_models_without_one(build_trainer):
    headings = (ROOT / "recipes/headings.jinja").read_text()
    flags = ["--model_name_or_path", "meta-llama/Llama-3.1-8B", "--chat_template_path", str(ROOT / "recipes/headings.jinja")]
    assert build_trainer("qwen2_chat", *flags).processing_class.chat_template == headings
    instruct = ["--load_in_4bit", "false", "--model_name_or_path", "Qwen/Qwen2-0.5B-Instruct", "--lora_dropout", "0"]
    assert "im_start" in build_trainer("llama31_70b_qlora", *instruct).processing_class.chat_template


def test_rows_that_are_not_judged():
    """Of recipes without dataset_formats: pairs without a prompt as messages, and contents that are lists of parts."""
    answer = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in answer]
    for row in ({"chosen": answer, "rejected": answer}, {"messages": parts}):
        assert chat_templates.conversations_of(row) == []
    assert chat_templates.conversations_of({"messages": answer}) == [{"messages": answer}]


def test_completion_only_loss_needs_completions(error_of):
    """Otherwise every token would count."""
    args = SimpleNamespace(completion_only_loss=True)
    assert "--completion_only_loss" in error_of(check_conversations, placed([{"text": "a"}]), args, None)
