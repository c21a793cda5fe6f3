"""Rows in the formats that people have are converted to the formats that recipes train on."""

import json
import random

from harness.data import conversion, formats, turns

import pytest

pytestmark = pytest.mark.unit

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
SYSTEM = {"role": "system", "content": "Be brief."}
SHARE_GPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TEXT_PART = {"type": "text", "text": "Why?"}
THINKING = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "thinking": "Hm."}
TOOL = {"name": "look", "parameters": {"properties": {"at": {"type": "integer"}}}}
BUILT_IN = {"type": "web_search"}  # a tool without a function
TASK = {"instruction": "Add.", "input": "1 2", "output": "3"}
PREFERENCE = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "score": 5.0}
TASK_AS_CHAT = [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]


def convert(row, format, **settings):
    return formats.convert(row, format, **settings)[0]


def as_user(content):
    return {"role": "user", "content": content}


def as_assistant(content):
    return {"role": "assistant", "content": content}


TOOLS = [{"type": "function", "function": TOOL}]
PAIR = {"prompt": CHAT[:1], "completion": CHAT[1:]}
RAW_CALL = {"from": "function_call", "value": '{"name": "look", "arguments": {"at": 1}}'}
CALL_IN_JSON = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": 1}'}}]}
AS_CALL = TOOL_CALL | {"content": ""}
# Rows, and what they become for a recipe on messages; a list is `messages`.
CONVERTED = {
    "messages": ({"messages": CHAT, "id": 1}, CHAT),
    "ShareGPT": ({"conversations": SHARE_GPT}, [SYSTEM, *CHAT]),
    "texts, next to an empty column": ({"prompt": "Why?", "completion": "So.", "messages": None}, CHAT),
    "other names of roles": ({"messages": [as_user("Why?") | {"role": "User"}, as_assistant("So.") | {"role": "GPT"}]}, CHAT),
    "call without content": ({"messages": [CHAT[0], TOOL_CALL, *CHAT]}, [CHAT[0], AS_CALL, *CHAT]),
    "list of texts": ({"messages": [as_user([TEXT_PART, TEXT_PART]), CHAT[1]]}, [as_user("Why?Why?"), CHAT[1]]),
    "instruction": (TASK, TASK_AS_CHAT),
    "UltraFeedback": (PREFERENCE | {"chosen": CHAT}, CHAT),
    "chosen is the answer, as messages": (PREFERENCE | {"chosen": CHAT[1:]}, PAIR),
    "messages as prompt, chosen is a text": (
        PREFERENCE | {"prompt": [SYSTEM, CHAT[0]], "tools": [BUILT_IN]},
        PAIR | {"prompt": [SYSTEM, CHAT[0]], "tools": [BUILT_IN]},
    ),
    "prompt and chosen as texts": (PREFERENCE, CHAT),
    "messages and tools as JSON": (
        {"messages": json.dumps(CHAT), "tools": json.dumps([TOOL])},
        {"messages": CHAT, "tools": TOOLS},
    ),
    "parameters as JSON": (
        {"messages": CHAT, "tools": [{"function": TOOL | {"parameters": json.dumps(TOOL["parameters"])}}]},
        {"messages": CHAT, "tools": [{"function": TOOL}]},
    ),
    "null system turn": ({"messages": [SYSTEM | {"content": None}, *CHAT]}, CHAT),
    "arguments as JSON": ({"messages": [CHAT[0], CALL_IN_JSON]}, [CHAT[0], AS_CALL]),
    "LLaMA-Factory's calls and system column": (
        {"conversations": [SHARE_GPT[1], RAW_CALL, {"from": "observation", "value": "3"}, SHARE_GPT[2]], "system": "Be brief."},
        [SYSTEM, CHAT[0], AS_CALL, {"role": "tool", "content": "3"}, CHAT[1]],
    ),
    "Alpaca with history and system": (
        TASK | {"history": [["Why?", "So."]], "system": "Be brief."},
        [SYSTEM, *CHAT, *TASK_AS_CHAT],
    ),
    "a thought by all of its names": (
        {"messages": [CHAT[0], CHAT[1] | {"thinking": "Hm."}]},
        [CHAT[0], CHAT[1] | {"thinking": "Hm.", "reasoning_content": "Hm."}],
    ),
    "texts that alternate": ({"messages": ["Why?", "So."]}, CHAT),
    "tools in the system turn": (
        {"messages": [SYSTEM | {"tools": [TOOL]}, *CHAT]},
        {"messages": [SYSTEM, *CHAT], "tools": TOOLS},
    ),
    "functions as JSON in the system turn of a prompt": (
        PAIR | {"prompt": [SYSTEM | {"functions": json.dumps([TOOL])}, CHAT[0]]},
        PAIR | {"prompt": [SYSTEM, CHAT[0]], "tools": TOOLS},
    ),
    "keys that only some chat templates read": (
        {"messages": [CHAT[0], CHAT[1] | {"id": 7, "images": []}]},
        [CHAT[0], CHAT[1] | {"id": 7, "images": []}],
    ),
    "a prompt of messages and a completion as text": (PAIR | {"completion": "So."}, PAIR),
    "a prompt as text and a completion as message": ({"prompt": "Why?", "completion": CHAT[1]}, PAIR),
}


@pytest.mark.parametrize(("row", "expected"), CONVERTED.values(), ids=CONVERTED)
def test_convert(row, expected):
    expected = {"messages": expected} if isinstance(expected, list) else expected
    assert convert(json.loads(json.dumps(row)), "messages") == expected


@pytest.mark.parametrize(
    ("row", "format", "expected"),
    [
        ({"text": "a", "id": 1}, "text", {"text": "a"}),
        (TASK | {"input": None}, "instruction", TASK | {"input": ""}),
        ({"prompt": "a", "completion": "b", "text": "c"}, "prompt_completion", {"prompt": "a", "completion": "b"}),
        ({"anything": 1, "text": None}, "", {"anything": 1, "text": None}),
    ],
)
def test_convert_to_texts(row, format, expected):
    assert convert(row, format) == expected
    if format == "text":
        assert convert({"body": "a"} | row, "text", text_field="body") == {"body": "a"}


@pytest.mark.parametrize("key", [*turns.TRAINED, *turns.MASKED])
def test_answers_that_do_not_count(key):
    """By each name that a key of a turn has for it."""

    def mark(counts):
        return int(not counts) if key == "masked" else counts

    turns = [CHAT[0], CHAT[1] | {key: mark(False)}, CHAT[0], CHAT[1] | {key: mark(True)}]
    assert convert({"messages": turns}, "messages") == {"messages": [CHAT[0], CHAT[1] | {"train": False}, *CHAT]}


@pytest.mark.parametrize(
    "marks",
    [
        {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
        {"training_detail": json.dumps([{"train": True}])},
        {"content": [{"text": "Wrong", "masked": 1}, {"text": ", right"}]},
    ],
)
def test_marks_of_parts_of_a_turn_are_not_ignored(marks):
    turns = [CHAT[0], CHAT[1] | {"train_detail": None}, CHAT[0], CHAT[1] | marks]
    assert formats.convert({"messages": turns[:2]}, "messages") == ({"messages": CHAT}, "")
    converted, reason = formats.convert({"messages": turns}, "messages")
    assert converted is None and "part of a turn" in reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": CHAT[:1]}, "without an answer"),
        ({"messages": [CHAT[0], as_assistant("")]}, "empty"),
        ({"messages": [*CHAT, {"role": "critic", "content": "No."}]}, "critic"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0.5}]}, "weight"),
        ({"messages": [CHAT[0], as_assistant([{"type": "text", "text": "a", "weight": 0.5}, "b"])]}, "weight"),
        ({"messages": [SYSTEM | {"tools": [TOOL]}, *CHAT], "tools": [BUILT_IN]}, "different tools"),
        ({"messages": [CHAT[1], CHAT[0]]}, "only answer"),
        ({"prompt": "Why?", "completion": [5]}, "without a role"),
        ({"completion": "So."}, "without a prompt"),
        (TASK | {"input": [1, 2]}, "input"),
        (TASK | {"output": False}, "output"),
        (TASK | {"history": [["Why?"]]}, "history"),
        *((TASK | {"system": value}, "system") for value in ({"a": 1}, [SYSTEM], ["Be brief.", "Be kind."])),
        ({"messages": {"role": ["user", "assistant"], "content": ["Why?", "So."]}}, "unknown role"),
        ({"messages": [["Why?", "So."]]}, "without a role"),
        ({"messages": [str(turn) for turn in CHAT]}, "JSON"),
        ({"messages": [SYSTEM, *CHAT], "system": "Be long."}, "different system messages"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"text": ""}, "text"),
        ({"text": ["a"]}, "not a text"),
    ],
)
def test_reasons_to_skip_a_row(row, reason):
    converted, found = formats.convert(row, "text" if "text" in row else "messages")
    assert converted is None and reason in found


@pytest.mark.parametrize(
    ("turn", "word"),
    [
        ({"content": [{"type": "document", "text": "So."}]}, "document"),
        ({"content": [{"type": "text", "text": "So.", "speaker": "Ann"}]}, "speaker"),
        ({"content": ["So.", {"type": "thinking", "thinking": "Hm."}]}, "reasoning after it"),
        ({"reasoning_content": {"effort": "high"}}, "reasoning"),
        ({"reasoning_content": "Hm.", "thinking": "Ah."}, "two places"),
        ({"value": "No."}, "content and value"),
        ({"from": "human"}, "two roles"),
        ({"role": "function_call", "content": "{'name': 'look'}"}, "not JSON"),
        ({"role": "tool_call", "content": '{"name": "look", "arguments": {"at": "a\nb"}}'}, "not JSON"),
        ({"role": "tool_call", "content": [CALL], "tool_calls": [CALL]}, "two places"),
        ({"tool_calls": [CALL], "function_call": CALL["function"]}, "two places"),
        ({"function_call": {"name": "look", "arguments": "{'at': 1}"}}, "arguments"),
        ({"function_call": {"name": "look", "arguments": 5}}, "arguments"),
        ({"tool_calls": [{"name": "look", "args": {"at": 1}}]}, "key args"),
        ({"reasoning": ["Hm.", "Ah."]}, "reasoning"),
        ({"tool_calls": [{"function": CALL["function"] | {"result": 3}}]}, "key result"),
        ({"content": "<think>hm, so"}, "does not end"),
        ({"content": "<think>hm</think>So.", "reasoning_content": "hm"}, "too"),
    ],
)
def test_turns_that_cannot_be_read(turn, word):
    converted, reason = formats.convert({"messages": [*CHAT, CHAT[0], CHAT[1] | turn]}, "messages")
    assert converted is None and word in reason


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"content": [{"type": "reasoning", "text": "Hm."}, TEXT_PART | {"annotations": [1]}]}, THINKING | {"content": "Why?"}),
        ({"content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, "So."]}, THINKING),
        ({"reasoning_content": [{"type": "text", "text": "Hm."}], "thinking": "Hm.", "reasoning": None}, THINKING),
        ({"content": None, "value": 105}, as_assistant("105")),
        ({"content": [], "value": "So."}, CHAT[1]),
        (TOOL_CALL | {"content": [], "value": " "}, TOOL_CALL | {"content": ""}),
        ({"content": float("nan"), "value": " So."}, as_assistant(" So.")),
        ({"function_call": {"name": "look", "arguments": {}, "parameters": {"at": 1}}}, TOOL_CALL | {"content": "So."}),
        ({"from": "gpt", "role": None}, CHAT[1]),
        ({"content": "", "function_call": json.dumps(CALL["function"])}, TOOL_CALL | {"content": ""}),
        ({"content": "", "tool_calls": [json.dumps(CALL)]}, TOOL_CALL | {"content": ""}),
    ],
)
def test_turns_that_can_be_read(turn, expected):
    converted = convert({"messages": [CHAT[0], CHAT[1] | turn, *CHAT]}, "messages")
    assert converted == {"messages": [CHAT[0], expected, *CHAT]}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.5, "2.5"), (float("nan"), ""), ([], ""), (25 * 10**18, "25" + "0" * 18), (-5e-5, "-0.00005")],
)
def test_numbers_are_texts(value, text):
    """NaN and an empty list are nothing."""
    assert convert(TASK | {"input": value}, "instruction") == TASK | {"input": text}
    question = f"Add.\n\n{text}" if text else "Add."
    assert convert(TASK | {"input": value}, "messages") == {"messages": [as_user(question), as_assistant("3")]}


def test_spaces_of_texts_are_kept():
    turns = [CHAT[0], TOOL_CALL | {"content": "\n"}, {"role": "tool", "content": " "}, {"role": "tool", "content": {}}, CHAT[1]]
    contents = [turn["content"] for turn in convert({"messages": turns}, "messages")["messages"]]
    assert contents == ["Why?", "\n", " ", "{}", "So."]
    found = convert({"instruction": "  Add.\n", "input": " ", "output": " 3\n"}, "messages")
    assert found == {"messages": [as_user("  Add.\n"), as_assistant(" 3\n")]}


def test_texts_that_are_json():
    """A prompt is one, next to an answer as text; turns are read from JSON if the answer is JSON or a list too."""
    text = json.dumps(CHAT[:1])
    assert convert({"prompt": text, "completion": "So."}, "messages") == {"messages": [as_user(text), CHAT[1]]}
    expected = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    for answer in (CHAT[1:], json.dumps(CHAT[1:])):
        assert convert({"prompt": text, "completion": answer}, "messages") == expected
    assert convert({"messages": list(map(json.dumps, CHAT))}, "messages") == {"messages": CHAT}
    texts = ["Why?", '{"because": "so"}']
    assert convert({"messages": texts}, "messages") == {"messages": [as_user(texts[0]), as_assistant(texts[1])]}


def test_nulls_of_structs_are_not_in_the_data():
    """Arrow gives every struct the keys of all others. In JSON, a null is what somebody wrote."""
    call = {"function": {"name": "look", "arguments": {"at": 1, "by": None}}}
    row = {"messages": [CHAT[0], TOOL_CALL | {"tool_calls": [call]}]}
    for structs, expected in ((("messages",), {"at": 1}), ((), {"at": 1, "by": None})):
        turns = convert(json.loads(json.dumps(row)), "messages", structs=structs)["messages"]
        assert turns[1]["tool_calls"][0]["function"]["arguments"] == expected


def test_split_answers():
    turns = [*CHAT, CHAT[0], CHAT[1] | {"train": False}, *CHAT]
    rows = conversion.split_answers({"messages": turns, "tools": [TOOL]})
    assert [len(row["messages"]) for row in rows] == [2, 6] and all(row["tools"] == [TOOL] for row in rows)
    assert [[turn.get("train", True) for turn in row["messages"][1::2]] for row in rows] == [[True], [False, False, True]]


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        ({}, "assistant"),
        ({"tool_calls": [{}]}, "assistant+calls"),
        ({"reasoning_content": "so"}, "assistant+thought"),
        ({"content": "<think>so</think>Yes"}, "assistant+thought"),
        ({"train": False}, "assistant+untrained"),
        ({"tool_calls": [{}], "train": True}, "assistant+calls"),
        ({"name": "Ann", "images": []}, "assistant+key:name"),
        ({"tool_calls": [{"id": "1", "status": "ok"}]}, "assistant+calls+key:tool_calls.status"),
    ],
)
def test_kind_of_conversation(turn, kind):
    row = {"messages": [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes"} | turn]}
    assert conversion.kind_of_conversation(row) == f"user {kind}"
    assert conversion.kind_of_conversation(row | {"tools": [{}]}) == f"user {kind}, tools"


@pytest.mark.parametrize("content", ["hm</think>So.", "<think>hm</think>So."])
def test_thoughts_in_a_content(content):
    """The prompt of some templates ends with <think>."""
    turns = [CHAT[0], as_assistant(content)]
    assert convert({"messages": turns}, "messages") == {"messages": turns}


def test_think_in_turns_that_are_no_answers():
    turns = [{"role": role, "content": "Write <think> first."} for role in ("system", "user")]
    turns += [TOOL_CALL | {"content": ""}, {"role": "tool", "content": "<think>"}, CHAT[1]]
    assert convert({"messages": turns}, "messages") == {"messages": turns}


def test_preference_whose_turns_contradict_each_other():
    row = {name: [as_user(name), CHAT[1]] for name in ("chosen", "rejected")}
    assert "begin alike" in formats.convert(row, "preference")[1]
    for row in (PREFERENCE | {"messages": CHAT}, PREFERENCE | {"prompt": CHAT}):
        assert "ends with an answer" in formats.convert(row, "preference")[1]
    expected = {"prompt": CHAT[:1], "chosen": [as_assistant("So.")], "rejected": [as_assistant("No.")]}
    assert convert(PREFERENCE | {"messages": CHAT[:1]}, "preference") == expected


@pytest.mark.parametrize(
    ("prompt", "context"),
    [
        (None, [CHAT[0]]),
        ("Why?", [CHAT[0]]),
        ([SYSTEM, CHAT[0]], [SYSTEM, CHAT[0]]),
        ([SYSTEM], [SYSTEM, CHAT[0]]),
        ([CHAT[0], as_assistant("So?"), CHAT[0]], [CHAT[0], as_assistant("So?"), CHAT[0]]),
        ("How?", None),
        ([CHAT[0], SYSTEM], None),
    ],
)
def test_prompts_next_to_conversations(prompt, context):
    """Their first turns are kept if they end as the conversations begin; else the row contradicts itself."""
    answers = [as_assistant("Yes."), as_assistant("No.")]
    row = {"prompt": prompt, "chosen": [CHAT[0], answers[0]], "rejected": [CHAT[0], answers[1]]}
    pair, conversation = (convert(row, format) for format in ("preference", "messages"))
    if context is None:
        assert pair is None and conversation is None and "whose prompt" in formats.convert(row, "preference")[1]
    else:
        assert pair == {"prompt": context, "chosen": answers[:1], "rejected": answers[1:]}
        assert conversation == {"messages": [*context, answers[0]]}


def test_preferences_of_other_forms():
    pair = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [as_assistant("No.")]}
    share_gpt = {"conversations": SHARE_GPT[1:2], "chosen": SHARE_GPT[2], "rejected": as_assistant("No.")}
    for row in (pair, share_gpt, {"instruction": "Why?", "input": "", "chosen": "So.", "rejected": "No."}):
        assert convert(row, "preference") == pair


def test_preferences_with_tools_and_history():
    found = convert(PREFERENCE | {"prompt": [SYSTEM | {"tools": [TOOL]}, CHAT[0]], "history": None}, "preference")
    assert found["prompt"] == [SYSTEM, CHAT[0]] and found["tools"] == TOOLS
    found = convert(PREFERENCE | {"history": [["Hm?", "Ah."]]}, "preference")
    assert found["prompt"] == [as_user("Hm?"), as_assistant("Ah."), CHAT[0]]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_turns_in_answers_of_preferences(role):
    """All turns after the prompt count in the loss of preferences: those at the end are cut off, others make a row unusable."""
    answers = {name: [as_assistant(name), {"role": role, "content": "Hm?"}] for name in ("chosen", "rejected")}
    row = {"prompt": [CHAT[0]]} | answers
    found, reason = formats.convert(row, "preference")
    assert not reason and (found["chosen"], found["rejected"]) == ([as_assistant("chosen")], [as_assistant("rejected")])
    found, reason = formats.convert(row | {"rejected": answers["rejected"] + answers["chosen"]}, "preference")
    assert found is None and "count in the loss" in reason
    same = [as_assistant("chosen"), CHAT[0]]
    assert formats.convert(row | {"rejected": same}, "preference")[0] is None


PARTS = [{"type": "text", "text": "Be"}, {"type": "text", "text": "cause."}]
ODD = [
    {"messages": [SYSTEM | {"tools": [TOOL]}, CHAT[0], as_assistant(PARTS), CHAT[0], CHAT[1] | {"train": False}]},
    {"conversations": [SHARE_GPT[1], SHARE_GPT[2] | {"weight": 1}], "tools": "[]", "system": "B"},
    {"prompt": [CHAT[0]], "chosen": [CHAT[1]], "rejected": [as_assistant("No.")], "chat_template_kwargs": {"a": 1}},
    {"instruction": "Why?", "input": "x", "output": "So.", "history": [["a", "b"]]},
    {"messages": [CHAT[0], as_assistant("") | {"tool_calls": [CALL], "reasoning_content": "Hm."}]},
]
VALUES = (None, True, 0, -1, 1.5, "", "a", "1", [], [[]], [None], ["a"], {}, {"a": None}, [{}], [{"a": 1}])


def change(value, rng):
    """A copy in which some values, however deep, are others or gone."""
    if rng.random() < 0.08:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        return {key: change(part, rng) for key, part in value.items() if rng.random() > 0.03}
    return [change(part, rng) for part in value if rng.random() > 0.03] if isinstance(value, list) else value


@pytest.mark.parametrize("format", formats.CONVERTERS)
def test_odd_rows_are_converted_or_skipped(format):
    """Whatever is in a row: converted rows can be stored as JSON."""
    rng = random.Random(0)
    for row in ODD * 60:
        changed = change(row, rng)
        row = changed if isinstance(changed, dict) and changed else row
        converted, reason = formats.convert(row, format, structs=rng.choice([(), ("messages",)]))
        assert bool(converted) != bool(reason)
        if converted:
            json.dumps(converted)
            conversion.kind_of_conversation(converted)
