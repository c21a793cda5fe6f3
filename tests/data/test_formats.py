"""Rows in the formats that people have are converted to the formats that recipes train on."""

import ast
import json

from harness.data import formats

import pytest
from conftest import RECIPES

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
SYSTEM = {"role": "system", "content": "Be brief."}
SHARE_GPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
TEXT_PART = {"type": "text", "text": "Why?"}
TASK = {"instruction": "Add.", "input": "1 2", "output": "3"}
PREFERENCE = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "score": 5.0}
TASK_AS_CHAT = [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]


def as_user(content):
    return {"role": "user", "content": content}


def as_assistant(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("row", "format", "expected"),
    [
        pytest.param({"text": "a", "id": 1}, "text", {"text": "a"}, id="text"),
        pytest.param({"text": None}, "text", None, id="text is None"),
        pytest.param({"messages": CHAT, "id": 1}, "messages", {"messages": CHAT}, id="messages"),
        pytest.param({"messages": CHAT[:1]}, "messages", None, id="no answer"),
        pytest.param({"conversations": SHARE_GPT}, "messages", {"messages": [SYSTEM, *CHAT]}, id="ShareGPT"),
        pytest.param({"conversations": CHAT}, "messages", {"messages": CHAT}, id="conversations with role and content"),
        pytest.param(
            {"prompt": CHAT[:1], "completion": CHAT[1:]},
            "messages",
            {"prompt": CHAT[:1], "completion": CHAT[1:]},
            id="prompt and completion as lists of messages",
        ),
        pytest.param(
            {"prompt": "Why?", "completion": "So.", "messages": None},
            "messages",
            {"messages": CHAT},
            id="prompt and completion as texts, next to an empty column",
        ),
        pytest.param(
            {"prompt": "Why?", "messages": CHAT, "tools": [1]},
            "messages",
            {"messages": CHAT, "tools": [1]},
            id="messages with tools, next to a prompt",
        ),
        pytest.param({"prompt": "Why?"}, "messages", None, id="prompt without completion"),
        pytest.param(
            {"messages": [{"role": "User", "content": "Why?"}, {"role": "GPT", "content": "So."}]},
            "messages",
            {"messages": CHAT},
            id="other names of roles",
        ),
        pytest.param({"messages": [CHAT[0], as_assistant(None)]}, "messages", None, id="answer without content"),
        pytest.param(
            {"messages": [CHAT[0], TOOL_CALL, *CHAT]},
            "messages",
            {"messages": [CHAT[0], TOOL_CALL | {"content": ""}, *CHAT]},
            id="tool call without content",
        ),
        pytest.param(
            {"messages": [as_user([TEXT_PART, TEXT_PART]), CHAT[1]]},
            "messages",
            {"messages": [as_user("Why?Why?"), CHAT[1]]},
            id="content as a list of texts",
        ),
        pytest.param({"messages": [as_user([TEXT_PART, {"image": 1}]), CHAT[1]]}, "messages", None, id="content with an image"),
        pytest.param(TASK, "messages", {"messages": TASK_AS_CHAT}, id="instruction as messages"),
        pytest.param(TASK | {"prompt": "All of it"}, "instruction", TASK, id="instruction, next to a prompt"),
        pytest.param(TASK | {"input": None}, "instruction", TASK | {"input": ""}, id="instruction without input"),
        pytest.param(TASK | {"output": " "}, "instruction", None, id="instruction without output"),
        pytest.param(
            {"prompt": "a", "completion": "b", "text": "c"},
            "prompt_completion",
            {"prompt": "a", "completion": "b"},
            id="prompt and completion as texts",
        ),
        pytest.param({"prompt": CHAT[:1], "completion": CHAT[1:]}, "prompt_completion", None, id="lists instead of texts"),
        pytest.param(PREFERENCE | {"chosen": CHAT}, "messages", {"messages": CHAT}, id="UltraFeedback"),
        pytest.param(
            PREFERENCE | {"prompt": None, "chosen": SHARE_GPT}, "messages", {"messages": [SYSTEM, *CHAT]}, id="no prompt"
        ),
        pytest.param(
            PREFERENCE | {"chosen": CHAT[1:]},
            "messages",
            {"prompt": CHAT[:1], "completion": CHAT[1:]},
            id="chosen is the answer, as messages",
        ),
        pytest.param(
            PREFERENCE | {"prompt": [SYSTEM, CHAT[0]], "tools": [1]},
            "messages",
            {"prompt": [SYSTEM, CHAT[0]], "completion": CHAT[1:], "tools": [1]},
            id="messages as prompt, chosen is a text",
        ),
        pytest.param(PREFERENCE, "messages", {"messages": CHAT}, id="prompt and chosen as texts"),
        pytest.param(
            PREFERENCE, "prompt_completion", {"prompt": "Why?", "completion": "So."}, id="prompt and chosen without turns"
        ),
        pytest.param(PREFERENCE | {"chosen": " "}, "messages", None, id="chosen is empty"),
        pytest.param(PREFERENCE | {"prompt": None}, "messages", None, id="a chosen text without a prompt"),
        pytest.param(PREFERENCE | {"text": "a"}, "text", {"text": "a"}, id="text, next to preference data"),
        pytest.param(
            PREFERENCE | {"messages": CHAT[:1] * 2 + CHAT[1:]}, "messages", {"messages": CHAT[:1] * 2 + CHAT[1:]}, id="both"
        ),
        pytest.param({"anything": 1, "text": None}, "", {"anything": 1, "text": None}, id="no format"),
    ],
)
def test_convert(row, format, expected):
    assert formats.convert(json.loads(json.dumps(row)), format, "text") == expected


def test_text_field_names_the_column():
    assert formats.convert({"body": "a", "text": "b"}, "text", "body") == {"body": "a"}


@pytest.mark.parametrize(
    ("row", "accepted", "words"),
    [
        ({"messages": [as_user("Why?"), {"role": "bot", "content": "So."}]}, ("messages",), ["no text or answer", "bot, user"]),
        ({"prompt": "Why?", "completion": 5}, ("prompt_completion",), ["prompt, completion", "no text or answer"]),
        ({"prompt": "Why?", "completion": 5}, ("text",), ["prompt, completion"]),
        ({"chosen": CHAT, "rejected": CHAT}, ("prompt_completion",), ["has the columns chosen, rejected"]),
        (PREFERENCE | {"chosen": CHAT}, ("prompt_completion",), ["no text or answer", "assistant, user"]),
    ],
    ids=["unknown role", "number as completion", "other columns", "no prompt", "messages instead of texts"],
)
def test_explain_mismatch(row, accepted, words):
    """Missing columns are distinguished from columns without a text or an answer."""
    message = formats.explain_mismatch([row], accepted, "text")
    assert all(word in message for word in words)
    assert ("no text or answer" in message) == ("no text or answer" in words)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_docstring_of_recipe_names_columns(recipe):
    """The docstring of a recipe names the columns of every format in its `dataset_formats`."""
    tree = ast.parse(recipe.read_text())
    (call,) = (node for node in ast.walk(tree) if getattr(getattr(node, "func", None), "id", "") == "parse")
    accepted = next(ast.literal_eval(argument.value) for argument in call.keywords if argument.arg == "dataset_formats")
    docstring = " ".join(ast.get_docstring(tree).split())
    columns = {
        "text": "`text`",
        "messages": "(`messages` with role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or "
        "`instruction`, `input` and `output`",
        "prompt_completion": "`prompt` and `completion`",
        "instruction": "`instruction`, `input` and `output`",
    }
    for format in [accepted] if isinstance(accepted, str) else accepted:
        assert columns[format] in docstring
