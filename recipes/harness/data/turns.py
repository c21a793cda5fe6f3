"""Reads turns, tool calls and tools as people write them into the one form that chat templates expect.

It takes a value of a row and returns turns with these keys:

- role: system, user, assistant or tool
- content: a text; "" only next to tool calls, and in what a tool returns
- tool_calls: a list of calls in OpenAI's form, their arguments as an object
- reasoning_content and thinking: the same text, a thought that is not in the content
- train: False for an answer that does not count in the loss
- tools: those that a system turn has
- every other key, as it is: some chat templates read it

Null, NaN and "" are nothing, wherever they are, and a number is its text. Whatever else cannot be read raises SkippedRow, whose
message is the reason that a run prints.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any

from harness.messages import SkippedRow

# Other names of the four roles: of ShareGPT, LLaMA-Factory, OpenAI and others.
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
IGNORED = -100  # the label of a token that does not count in the loss
CALLS = ("function_call", "tool_call")  # roles whose content is a call as JSON, and keys of a turn
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # a column that goes to the chat template, as the tools do
CONVERSATION_COLUMNS = ("messages", "conversations")
# Names of keys of a turn.
ROLE = ("role", "from")
CONTENT = ("content", "value")
TOOLS = ("tools", "functions")
REASONING = ("reasoning_content", "thinking", "reasoning")  # by the names that chat templates have for it
# Keys of a turn that say whether it counts in the loss (1, true), whether it does not, and which parts of it do (not supported).
TRAINED = ("train", "training", "trainable", "weight", "loss", "loss_mask")
MASKED = ("masked",)
TRAINED_PARTS = ("train_detail", "training_detail")
REPLACED = ("from", "value", "tool_calls", "function_call", *TRAINED, *MASKED, *TRAINED_PARTS, *REASONING)
# Of the parts of a content that is a list: their types, and keys that a model does not see.
TEXT_PARTS = (None, "text", "input_text", "output_text")
THOUGHT_PARTS = ("reasoning", "thinking")
NOTES_OF_PART = ("id", "index", "annotations", "cache_control", "citations", "logprobs", "signature")
KEYS_OF_CALL = ("id", "index", "type", "function", "name", "arguments", "parameters")
THINK = "<think>"
END_OF_THINK = "</think>"
THOUGHT = re.compile(rf"{THINK}(.*?){END_OF_THINK}", re.DOTALL)
CALLS_TWICE = "with tool calls in two places of a turn"
PART_MARKED = "in which a part of a turn is marked to count in the loss, or not to: mark the turn"
TURN_AS_TEXT = re.compile(r"""\s*\{\s*["'](role|from|content|value)["']\s*:""")


def is_nothing(value: Any) -> bool:
    """Whether a value is missing: null, NaN, a text of spaces, an empty list or object."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or value in ([], {}) or (isinstance(value, float) and math.isnan(value))


def without(found: dict, *keys: str) -> dict:
    """The same but for `keys`."""
    return {key: value for key, value in found.items() if key not in keys}


def text_of(value: Any, what: str) -> str:
    """A text, "" for a missing one; a number without an exponent. Raises SkippedRow for anything else: "`what` is not a text"."""
    if isinstance(value, str):
        return value
    if is_nothing(value):
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) != math.inf:
        return f"{Decimal(json.dumps(value)):f}"
    raise SkippedRow(f"{what} is not a text")


def read_text(value: Any, what: str) -> str:
    """See `text_of`; also of a list of parts, not of texts, whose separator is unknown."""
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        return "".join(_read_parts(value))
    return text_of(value, what)


def read_json(value: Any) -> Any:
    """The list or object that a text holds as JSON, with null for NaN; None for a missing value; any other as it is."""
    if is_nothing(value):
        return None
    if not isinstance(value, str) or value.strip()[0] not in "[{":
        return value
    try:
        return json.loads(value, parse_constant=lambda _: None)
    except json.JSONDecodeError:
        return value


def role_of(turn: Any) -> str | None:
    """The role of a turn by its usual name, or its own name in small letters; None if it has none."""
    name = _own_role(turn)
    return ROLES.get(name, name)


def _own_role(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return None
    role = turn.get("role")
    if role is None:
        role = turn.get("from")
    if role is None:
        return None
    return str(role).lower()


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of turns, or a turn, with known roles."""
    turns = value
    if isinstance(value, dict):
        turns = [value]
    return isinstance(turns, list) and bool(turns) and all(role_of(turn) in ROLES for turn in turns)


def read_turns(value: Any, column: str) -> list[dict]:
    """The turns in a column, also if it or each turn is JSON; [] if it is missing or a text that is no JSON.

    In a column of conversations, texts are turns of a user and an assistant that alternate.
    """
    turns = read_json(value)
    if turns is None or isinstance(turns, str):
        return []
    if isinstance(turns, dict) and role_of(turns) is not None:
        turns = [turns]
    if not isinstance(turns, list):
        raise SkippedRow(f"whose column {column} is not a list of messages")
    if all(isinstance(turn, str) for turn in turns):
        turns = _read_texts(turns, column)
    return list(map(read_turn, turns))


def _read_texts(texts: list[str], column: str) -> list[dict]:
    turns = [read_json(text) for text in texts]
    if is_conversation(turns):
        return turns
    if column not in CONVERSATION_COLUMNS or any(map(TURN_AS_TEXT.match, texts)):
        raise SkippedRow(f"whose column {column} has texts that are not messages as JSON")
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def read_turn(turn: Any) -> dict:
    """A turn in the form that the top of this file describes. Raises SkippedRow for one that cannot be read.

    A system turn without a text has the content "".
    """
    if role_of(turn) is None:
        raise SkippedRow("with a message without a role")
    turn = {key: value for key, value in turn.items() if value is not None}
    role = role_of(turn)
    if role not in ROLES:
        raise SkippedRow(f"with the unknown role {role}")
    if len({ROLES.get(str(turn[key]).lower()) for key in ROLE if key in turn}) > 1:
        raise SkippedRow("with a turn of two roles")
    content = _one_value(turn, CONTENT)
    calls = _calls_of(turn)
    if _own_role(turn) in CALLS and content is not None:
        content, calls = _split_calls(content, calls)
    text, thought = _read_content(content, role)
    thought = _join_thoughts(turn, thought)
    _check_text(role, text, thought, bool(calls))
    is_trained = _is_trained(turn, role)

    replaced = REPLACED
    if role == "system":
        replaced = (*REPLACED, *TOOLS)
    read = without(turn, *replaced) | {"role": role, "content": text}
    if calls:
        read["tool_calls"] = calls
    if thought:
        read |= dict.fromkeys(REASONING[:2], thought)
    if not is_trained:
        read["train"] = False
    if role == "system" and (tools := read_tools(turn)):
        read["tools"] = tools
    return read


def _one_value(turn: dict, keys: tuple[str, ...]) -> Any:
    """What a turn has under one of `keys`, None if nothing. Raises SkippedRow if it has two values."""
    values = [turn[key] for key in keys if turn.get(key) not in (None, "")]
    values = [value for value in values if not is_nothing(value)] or values[:1]  # alone, spaces and {} are what they are
    if len(values) > 1 and values[0] != values[1]:
        raise SkippedRow(f"with a turn that has {' and '.join(keys)}")
    if values:
        return values[0]
    return None


def _read_content(content: Any, role: str) -> tuple[str, str]:
    """The text and the thoughts in a content: a text, a list of parts, or the object that a tool returns."""
    if isinstance(content, list):
        return _read_parts(content)
    if role == "tool" and isinstance(content, dict):
        return json.dumps(content, ensure_ascii=False), ""
    return text_of(content, "with a turn that"), ""


def _read_parts(parts: list) -> tuple[str, str]:
    """The text and the thoughts in a list of parts, joined. Raises SkippedRow for a part that is neither."""
    text = ""
    thought = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if not isinstance(part, dict):
            raise SkippedRow("with a turn that is not a text")
        if _marks_of(part):
            raise SkippedRow(PART_MARKED)
        kind = part.get("type")
        if kind not in (*TEXT_PARTS, *THOUGHT_PARTS):
            raise SkippedRow(f"with a part of a turn of the type {kind}")
        for key, value in part.items():
            if key not in ("type", "text", kind, *NOTES_OF_PART) and not is_nothing(value):
                raise SkippedRow(f"with a part of a turn that has the key {key}")
        if kind in TEXT_PARTS and part.get("text") is not None:
            text += text_of(part["text"], "with a turn that")
        elif kind in THOUGHT_PARTS and not text.strip():
            thought += text_of(_one_value(part, ("text", kind)), "with reasoning that")
        else:
            raise SkippedRow("with a turn that is not a text, or with reasoning after it")
    return text, thought


def _join_thoughts(turn: dict, of_parts: str) -> str:
    """The reasoning of a turn, "" if it has none. Raises SkippedRow if it has two different ones."""
    thought = ""
    if of_parts.strip():
        thought = of_parts
    for key in REASONING:
        found = read_text(turn.get(key), "with reasoning that")
        if found.strip():
            if thought and found != thought:
                raise SkippedRow("with different reasoning in two places of a turn")
            thought = found
    return thought


def _check_text(role: str, text: str, thought: str, has_calls: bool) -> None:
    """Raises SkippedRow for a text that is missing, or has no place for its thought."""
    if role == "assistant" and THINK in text and END_OF_THINK not in text:
        raise SkippedRow(f"with a {THINK} that does not end")
    if thought and THOUGHT.search(text):
        raise SkippedRow(f"with reasoning under {REASONING[0]} and in {THINK} too")
    if not text.strip() and not has_calls and role not in ("system", "tool"):
        raise SkippedRow("with a turn that is empty")


def _is_trained(turn: dict, role: str) -> bool:
    """False for an answer that is marked not to count in the loss. Only answers can count."""
    if any(read_json(turn.get(key)) for key in TRAINED_PARTS):
        raise SkippedRow(PART_MARKED)
    marks = _marks_of(turn)
    if role != "assistant" and any(marks) and "weight" not in turn:
        raise SkippedRow(f"in which a turn of the {role} is marked to be trained on")
    return role != "assistant" or all(marks)


def _marks_of(marked: dict) -> list[bool]:
    """Whether each key of a turn, or of a part of one, says that it counts in the loss."""
    marks = []
    for key in (*TRAINED, *MASKED):
        mark = marked.get(key)
        if is_nothing(mark):
            continue
        if mark not in (0, 1):
            raise SkippedRow(f"with a turn whose {key} is neither true nor false, 1 nor 0")
        marks.append(bool(mark) != (key in MASKED))
    return marks


def _calls_of(turn: dict) -> list[dict]:
    """The calls under the keys `tool_calls` and `function_call`."""
    calls = read_json(turn.get("tool_calls")) or []
    single = read_json(turn.get("function_call"))
    if not isinstance(calls, list):
        raise SkippedRow("with tool_calls that are not a list")
    if calls and single is not None:
        raise SkippedRow(CALLS_TWICE)
    if single is not None:
        calls = [single]
    return list(map(_read_call, calls))


def _split_calls(content: Any, others: list[dict]) -> tuple[str, list[dict]]:
    """The text and the calls of LLaMA-Factory's `function_call`: one call or several as JSON, perhaps after a thought."""
    if others:
        raise SkippedRow(CALLS_TWICE)
    text = ""
    if isinstance(content, str):
        content = content.strip()
        thought = THOUGHT.match(content)
        if thought:
            text = thought[0]
        content = read_json(content.removeprefix(text))
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise SkippedRow("with a function_call that is not JSON")
    return text, list(map(_read_call, content))


def _read_call(call: Any) -> dict:
    """A call in OpenAI's form, with its arguments as an object and not as JSON."""
    call = read_json(call)
    function = call
    if isinstance(call, dict):
        function = read_json(call.get("function")) or call
    if not isinstance(function, dict) or is_nothing(function.get("name")) or not isinstance(function["name"], str):
        raise SkippedRow("with a tool call without a name")
    for key, value in function.items():
        if key not in KEYS_OF_CALL and not is_nothing(value):
            raise SkippedRow(f"with a tool call that has the key {key}")
    arguments = read_json(_one_value(function, ("arguments", "parameters")))
    is_text = isinstance(arguments, str) and arguments.strip()[0] not in '[{"'  # of a tool that takes a text
    if not is_text and not isinstance(arguments, dict | list | None):
        raise SkippedRow("with a tool call whose arguments are not an object")
    read = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return without(call, "function", "name", "arguments", "parameters") | {"type": "function", "function": read}


def read_tools(found: dict) -> list[dict]:
    """The tools that a row or a turn has under one of the names in TOOLS, in OpenAI's form; [] without."""
    tools = []
    for name in TOOLS:
        value = read_json(found.get(name))
        if value is not None and not isinstance(value, list):
            raise SkippedRow("with tools that are not a list")
        tools.append(list(map(_read_tool, value or [])))
    return _join_tools(*tools)


def _join_tools(*lists: list[dict]) -> list[dict]:
    """The tools in several lists. Raises SkippedRow if they are not the same."""
    found: list[dict] = []
    for tools in lists:
        if tools and found and tools != found:
            raise SkippedRow("with different tools in two places")
        found = found or tools
    return found


def _read_tool(tool: Any) -> dict:
    """A tool in OpenAI's form, whose function, parameters and properties are objects, as chat templates expect them."""
    tool = _read_object(tool)
    if "function" not in tool:
        if "name" not in tool:
            return tool  # one of a server's own, such as web_search
        tool = {"type": "function", "function": tool}
    function = _read_object(tool["function"])
    if function.get("parameters"):
        parameters = _read_object(function["parameters"])
        if parameters.get("properties"):
            parameters = parameters | {"properties": _read_object(parameters["properties"])}
        function = function | {"parameters": parameters}
    return tool | {"function": function}


def _read_object(value: Any) -> dict:
    value = read_json(value)
    if not isinstance(value, dict):
        raise SkippedRow("with a tool that is not an object, or whose parameters are not")
    return value


def with_turns_in_json(row: dict, columns: tuple[str, ...]) -> dict:
    """`row` with the turns that its texts in `columns` have as JSON, if all of them do: else such a text stays a text."""
    read = {}
    for column in columns:
        if isinstance(row.get(column), str):
            read[column] = read_json(row[column])
            if not is_conversation(read[column]):
                return row
    return row | read


def row_of_turns(row: dict, **columns: list[dict]) -> dict:
    """A converted row of the turns in `columns`, with the system message, the tools and the template's arguments of `row`."""
    converted: dict[str, Any] = {}
    tools = [read_tools(row)]
    system = read_text(row.get("system"), "whose system")
    for column, turns in columns.items():
        if not converted:
            turns = _with_system(turns, system)
        kept = converted[column] = []
        for turn in turns:
            if turn["role"] == "system":
                tools.append(turn.get("tools", []))
                turn = without(turn, "tools")
            if turn["role"] != "system" or turn["content"].strip():
                kept.append(turn)
    found = _join_tools(*tools)
    if found:
        converted["tools"] = found
    arguments = read_json(row.get(TEMPLATE_ARGUMENTS)) or {}
    if not isinstance(arguments, dict):
        raise SkippedRow(f"whose {TEMPLATE_ARGUMENTS} is not an object")
    return converted | ({TEMPLATE_ARGUMENTS: arguments} if arguments else {})


def _with_system(turns: list[dict], text: str) -> list[dict]:
    """`turns` with a system message, if there is one. Raises SkippedRow if they begin with another one."""
    first = ""
    if turns and turns[0]["role"] == "system":
        first = turns[0]["content"].strip()
    if first and text.strip() not in ("", first):
        raise SkippedRow("with different system messages in two places")
    if first or not text.strip():
        return turns
    return [{"role": "system", "content": text}, *turns]


def check_answers(turns: list[dict], reason: str = "without an answer that counts in the loss") -> None:
    """Raises SkippedRow unless one of the turns is an answer that counts in the loss."""
    if not any(turn["role"] == "assistant" and turn.get("train", True) for turn in turns):
        raise SkippedRow(reason)
