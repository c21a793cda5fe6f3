"""The formats of rows that a recipe can train on, and how a row is converted to one of them.

- text: {text_field: str}
- messages: {"messages": [{"role": str, "content": str}, …]}, or "prompt" and "completion" as lists of messages; also with
  "tools" and "chat_template_kwargs". A turn with "train": False does not count in the loss.
- prompt_completion: {"prompt": str, "completion": str}
- instruction: {"instruction": str, "input": str, "output": str}
- preference: {"prompt": […], "chosen": […], "rejected": […]}, lists of messages; also with "tools" and "chat_template_kwargs"

For `messages` and `prompt_completion`, preference data is read as `prompt` and `completion`, or as `messages`, without
`rejected`.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Features, Json, List, Value

# Other names of the four roles: of ShareGPT, LLaMA-Factory, OpenAI and others.
ROLES = {
    **{name: "system" for name in ("system", "developer")},
    **{name: "user" for name in ("user", "human", "prompter")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "model", "function_call", "tool_call")},
    **{name: "tool" for name in ("tool", "observation", "function", "function_response", "tool_response", "ipython")},
}
CALLS = ("function_call", "tool_call")  # roles whose content is a call as JSON
TOOLS, TEMPLATE_ARGUMENTS = ("tools", "functions"), "chat_template_kwargs"  # columns a chat template reads besides the turns
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a turn, by the names that chat templates have for it
# Keys of a turn that say whether it counts in the loss (1, true), whether it does not, and which parts of it do (not supported).
TRAINED, MASKED = ("train", "training", "trainable", "weight", "loss", "loss_mask"), ("masked",)
TRAINED_PARTS = ("train_detail", "training_detail")
TURNS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns of a converted row that have turns
THINK, END_OF_THINK = "<think>", "</think>"
THOUGHT = re.compile(rf"{THINK}(.*?){END_OF_THINK}", re.DOTALL)
EMPTY_TURN, NO_ANSWER = "with a turn that is empty", "without an answer"


CONVERSATIONS = ("messages", "preference")  # formats whose rows a chat template renders


class SkippedRow(ValueError):
    """A row that cannot be trained on. Its message continues "3 rows …"."""


def convert(row: dict, *settings: Any, **named_settings: Any) -> dict | None:
    """`row` in a format, None if it has nothing to train on. "" returns the row as it is. The settings are those of `examine`."""
    return examine(row, *settings, **named_settings)[0]


def examine(
    row: dict,
    format: str,
    text_field: str = "text",
    column_map: dict[str, str] | None = None,
    structs: tuple[str, ...] = (),
    template_arguments: dict[str, Any] | None = None,
) -> tuple[dict | None, str]:
    """`row` in a format and "", or None and why the row is skipped.

    Args:
        column_map: new names of columns.
        structs: columns that are Arrow structs, whose rows have null for every key that another row has.
        template_arguments: what the chat template gets besides the turns; a row's own have precedence.
    """
    row = rename(dict(row), column_map)  # `Dataset.map` passes a mapping that is no dict
    if not format:
        return row, ""
    row = row | {name: _without_nulls(row[name]) for name in structs if name in row}
    try:
        if format in PREFERENCE_FORMATS and is_preference(row):
            row = _of_preference(row)
        converted = CONVERTERS[format](row, text_field)
        if template_arguments and format in CONVERSATIONS:
            converted[TEMPLATE_ARGUMENTS] = template_arguments | converted.get(TEMPLATE_ARGUMENTS, {})
        return converted, ""
    except SkippedRow as skipped:
        return None, str(skipped)


def as_messages(row: dict) -> dict:
    """A converted row with `messages` instead of `prompt` and `completion`; the prompt's answers do not count in the loss."""
    context = [turn | {"train": False} if turn["role"] == "assistant" else turn for turn in row["prompt"]]
    others = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    return {"messages": context + row["completion"], **others}


@dataclass(frozen=True)
class CallForm:
    """How a chat template expects turns with tool calls. The default is the form of converted rows."""

    text_arguments: bool = False  # JSON, as in OpenAI's form, not an object

    def apply(self, row: dict) -> dict:
        """A converted row in this form."""
        columns = [name for name in TURNS if isinstance(row.get(name), list)]
        return row | {name: [self._of_turn(turn) for turn in row[name]] for name in columns}

    def _of_turn(self, turn: dict) -> dict:
        if not turn.get("tool_calls"):
            return turn
        return turn | {"tool_calls": [self._of_call(call) for call in turn["tool_calls"]]}

    def _of_call(self, call: dict) -> dict:
        arguments = call["function"]["arguments"]
        if self.text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}


def rename(row: dict, column_map: dict[str, str] | None) -> dict:
    """`row` with the new names of its columns, which replace columns that have these names already."""
    if not column_map:
        return row
    kept = {name: value for name, value in row.items() if name not in column_map and name not in column_map.values()}
    return kept | {column_map[name]: value for name, value in row.items() if name in column_map}


def is_preference(row: dict) -> bool:
    """Whether a row has a chosen answer and nothing else that could be trained on."""
    others = ("messages", "conversations", "completion", "output")
    return bool(row.get("chosen")) and not any(row.get(column) for column in others)


def _of_preference(row: dict) -> dict:
    """A row of preference data with `chosen` in the columns of `messages`, or of `prompt` and `completion`.

    TRL's two forms: `chosen` is the answer to `prompt`, or the whole conversation. Each is a text or a list of messages.
    """
    prompt = _turns_of(row.get("prompt")) or row.get("prompt")
    chosen = _turns_of(row["chosen"]) or row["chosen"]
    if isinstance(chosen, str):
        if isinstance(prompt, list):
            chosen = [{"role": "assistant", "content": chosen}]
        return row | {"prompt": prompt, "completion": chosen}
    if not isinstance(chosen, list):
        raise SkippedRow(NO_ANSWER)
    if not prompt or _role(chosen[0]) != "assistant":  # the whole conversation
        return row | {"messages": chosen}
    return row | {"prompt": prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}], "completion": chosen}


def _to_text(row: dict, text_field: str) -> dict:
    if not _has_text(row, text_field):
        is_other = row.get(text_field) not in (None, "") and not isinstance(row[text_field], str)
        raise SkippedRow(f"whose {text_field} is not a string" if is_other else "without a text")
    return {text_field: row[text_field]}


def _to_prompt_completion(row: dict, text_field: str) -> dict:
    if not isinstance(row.get("prompt"), str):
        raise SkippedRow("without a prompt as text")
    if not _has_text(row, "completion"):
        raise SkippedRow(NO_ANSWER)
    return {"prompt": row["prompt"], "completion": row["completion"]}


def _to_instruction(row: dict, text_field: str) -> dict:
    if not _has_text(row, "instruction"):
        raise SkippedRow("without an instruction")
    if not _has_text(row, "output"):
        raise SkippedRow(NO_ANSWER)
    return {name: row.get(name) or "" for name in ("instruction", "input", "output")}


def _to_messages(row: dict, text_field: str) -> dict:
    """A row with messages, or with a prompt and a completion that are messages. Raises SkippedRow if it has no answer."""
    extra = _template_columns(row)
    for column in ("messages", "conversations"):
        if turns := _turns_of(row.get(column), is_conversation=True):
            messages = _clean_conversation(turns, row.get("system"))
            extra = _with_tools_of_turns(extra, turns)
            if not any(turn["role"] == "assistant" and turn.get("train", True) for turn in messages[1:]):
                raise SkippedRow("whose only answer is its first message")
            return {"messages": messages} | extra
    prompt, completion = _turns_of(row.get("prompt")), _answer_of(row.get("completion"))
    if completion and _has_text(row, "prompt") and not _has_text(row, "completion"):  # a text and messages
        prompt = prompt or [{"role": "user", "content": row["prompt"]}]
    if prompt and completion:
        context = _clean_conversation(prompt, row.get("system"), is_complete=False)
        return {"prompt": context, "completion": _clean_conversation(completion)} | _with_tools_of_turns(extra, prompt)
    if isinstance(row.get("prompt"), str) and _has_text(row, "completion"):
        question, answer = row["prompt"], row["completion"]
    elif _has_text(row, "instruction") and _has_text(row, "output"):
        question, answer = f"{row['instruction']}\n\n{row.get('input') or ''}".strip(), row["output"]
    elif _has_text(row, "messages") or _has_text(row, "conversations"):
        raise SkippedRow("whose messages are a string, not a list of messages")
    else:
        raise SkippedRow(NO_ANSWER)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": _clean_conversation([*_earlier_turns(row.get("history")), *turns], row.get("system"))} | extra


def _to_preference(row: dict, text_field: str) -> dict:
    """A row with the turns before the answers as `prompt`, and a chosen and a rejected answer; all three lists of messages."""
    chosen, rejected = (_answer_of(row.get(name)) for name in ("chosen", "rejected"))
    prompt = next((turns for name in ("prompt", "messages", "conversations") if (turns := _turns_of(row.get(name)))), None)
    question = next((row[name] for name in ("prompt", "instruction") if _has_text(row, name)), None)
    if not prompt and question:
        prompt = [{"role": "user", "content": f"{question}\n\n{row.get('input') or ''}".strip()}]
    if not chosen or not rejected:
        raise SkippedRow("without a chosen and a rejected answer")
    if _role(chosen[0]) != "assistant":  # two conversations that begin alike
        pairs = enumerate(zip(chosen, rejected, strict=False))
        same = next((number for number, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
        if not same:
            raise SkippedRow("whose chosen and rejected conversations do not begin alike")
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    if not prompt:
        raise SkippedRow("without a prompt")
    if not chosen or not rejected:
        raise SkippedRow("whose chosen and rejected answers are the same")
    answers = {name: _without_last_questions(turns) for name, turns in (("chosen", chosen), ("rejected", rejected))}
    if answers["chosen"] == answers["rejected"]:
        raise SkippedRow("whose chosen and rejected answers are the same")
    if any(turn["role"] != "assistant" for turns in answers.values() for turn in turns):
        raise SkippedRow("whose answers have turns of a user or a tool in them, which would count in the loss")
    return {"prompt": _clean_conversation(prompt, row.get("system"), is_complete=False), **answers, **_template_columns(row)}


def _without_last_questions(turns: list[dict]) -> list[dict]:
    """The cleaned turns up to the last answer."""
    cleaned = _clean_conversation(turns)
    last = max(number for number, turn in enumerate(cleaned) if turn["role"] == "assistant")
    return cleaned[: last + 1]


def _answer_of(value: Any) -> list[dict] | None:
    """The turns of an answer: a text, a turn, or several."""
    if isinstance(value, dict):
        value = [value]
    if turns := _turns_of(value):
        return turns
    return [{"role": "assistant", "content": value}] if isinstance(value, str) and value.strip() else None


def _earlier_turns(history: Any) -> list[dict]:
    """LLaMA-Factory's `history`: pairs of a question and an answer."""
    history = _from_json(history)
    pairs = [pair for pair in history if isinstance(pair, list) and len(pair) == 2] if isinstance(history, list) else []
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _turns_of(value: Any, is_conversation: bool = False) -> list[dict] | None:
    """The turns in a column, which can be JSON; None if it has none. In `is_conversation`, texts are turns that alternate."""
    turns = _from_json(value)
    if not isinstance(turns, list) or not turns:
        return None
    if is_conversation and all(isinstance(turn, str) for turn in turns):
        roles = itertools.cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return turns if all(isinstance(turn, dict) and _role(turn) is not None for turn in turns) else None


def _role(turn: dict) -> str | None:
    """The role of a turn by its usual name, or its own name in small letters; None if it has none."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return None if role is None else ROLES.get(str(role).lower(), str(role).lower())


def _clean_conversation(turns: list[dict], system: Any = None, is_complete: bool = True) -> list[dict]:
    """Turns with the usual roles and keys. Raises SkippedRow if a turn is empty or no answer counts in the loss."""
    cleaned = [clean for turn in turns if (clean := _clean_turn(turn))]
    if isinstance(system, str) and system.strip() and not (cleaned and cleaned[0]["role"] == "system"):
        cleaned.insert(0, {"role": "system", "content": system})
    answers = [turn for turn in cleaned if turn["role"] == "assistant"]
    if is_complete and not answers:
        raise SkippedRow(NO_ANSWER)
    if is_complete and not any(turn.get("train", True) for turn in answers):
        raise SkippedRow("without an answer that counts in the loss")
    return cleaned


def _clean_turn(turn: dict) -> dict | None:
    """A turn whose content is one text, "" next to tool calls; None for a system turn without a text.

    Calls have their arguments as objects, as chat templates expect them, and a thought has all of its usual keys.
    """
    role, content = _role(turn), turn.get("content", turn.get("value"))
    if role not in ROLES:
        raise SkippedRow(f"with the unknown role {role}")
    name = str(turn.get("role", turn.get("from"))).lower()
    if name in CALLS and isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if any(turn.get(key) for key in TRAINED_PARTS) or any(map(_marks_of, parts)):
        raise SkippedRow("in which a part of a turn is marked to count in the loss, or not to: mark the turn")
    if isinstance(content, list):  # a list of parts; only text can be trained on
        content = "".join(_text_of_part(part) for part in content)
    calls = _from_json(turn.get("tool_calls")) or []
    if not isinstance(calls, list):
        raise SkippedRow("with tool_calls that are not a list")
    calls = [_clean_call(call) for call in calls]
    if turn.get("function_call"):
        calls.append(_clean_call(_from_json(turn["function_call"])))
    if name in CALLS and isinstance(content, str):
        content, calls = _split_calls(content)
    thought = next((turn[key] for key in REASONING if isinstance(turn.get(key), str) and turn[key].strip()), None)
    if content is None and (calls or role in ("system", "tool")):
        content = ""
    if role == "tool" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    if content is not None and not isinstance(content, str):
        raise SkippedRow("with a turn that is not a text")
    if content and THINK in content and END_OF_THINK not in content:
        raise SkippedRow(f"with a {THINK} that does not end")
    if content and thought and THOUGHT.search(content):
        raise SkippedRow(f"with reasoning under {REASONING[0]} and in {THINK} too")
    if content is None or (not content.strip() and not calls and role != "tool"):
        if role == "system":
            return None
        raise SkippedRow(EMPTY_TURN)
    dropped = {"from", "value", "tool_calls", "function_call", *TRAINED, *MASKED, *TRAINED_PARTS, *REASONING}
    if role == "system":  # see `_with_tools_of_turns`
        dropped |= {key for key in TOOLS if isinstance(_from_json(turn.get(key)), list)}
    kept = {key: value for key, value in turn.items() if key not in dropped and value is not None}
    kept |= {"role": role, "content": content}
    if calls:
        kept["tool_calls"] = calls
    if thought:
        kept |= dict.fromkeys(REASONING[:2], thought)
    return kept if _counts_in_loss(turn, role) else kept | {"train": False}


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise SkippedRow("with a turn that is not a text")
    return text


def _counts_in_loss(turn: dict, role: str) -> bool:
    """False for an answer that is marked so. Only answers can count in the loss."""
    marks = _marks_of(turn)
    if role == "assistant":
        return all(marks)
    if any(marks) and "weight" not in turn:
        raise SkippedRow(f"in which a turn of the {role} is marked to be trained on")
    return True


def _marks_of(marked: dict) -> list[bool]:
    """Whether each key of a turn, or of a part of one, says that it counts in the loss."""
    found = {key: marked[key] for key in (*TRAINED, *MASKED) if marked.get(key) is not None}
    if wrong := [key for key, mark in found.items() if mark not in (0, 1)]:
        raise SkippedRow(f"with a turn whose {wrong[0]} is neither true nor false, 1 nor 0")
    return [bool(not mark if key in MASKED else mark) for key, mark in found.items()]


def _clean_call(call: Any) -> dict:
    """A call as chat templates expect it: OpenAI's form, with its arguments as an object and not as JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name") or not isinstance(function["name"], str):
        raise SkippedRow("with a tool call without a name")
    others = {key: value for key, value in call.items() if key not in ("function", "name", "arguments", "parameters")}
    arguments = _from_json(function.get("arguments", function.get("parameters")))
    return others | {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }


def _split_calls(content: str) -> tuple[str, list[dict]]:
    """The text and the calls of LLaMA-Factory's `function_call`: one call or several as JSON, perhaps after a thought."""
    thought = THOUGHT.match(content.strip())
    calls = _from_json(content.strip()[thought.end() if thought else 0 :].strip())
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        return content, []
    return thought[0] if thought else "", [_clean_call(call) for call in calls]


def _template_columns(row: dict) -> dict:
    """The columns that chat templates read besides the turns: tools in OpenAI's form, and arguments of the template."""
    tools = next((found for name in TOOLS if (found := _from_json(row.get(name)))), None)
    arguments = _from_json(row.get(TEMPLATE_ARGUMENTS))
    columns = {}
    if isinstance(tools, list):
        columns["tools"] = [_clean_tool(_from_json(tool)) for tool in tools]
    elif tools is not None:
        raise SkippedRow("with tools that are not a list")
    if arguments and isinstance(arguments, dict):
        columns[TEMPLATE_ARGUMENTS] = arguments
    return columns


def _with_tools_of_turns(columns: dict, turns: list[dict]) -> dict:
    """The columns that chat templates read, with the tools that a system turn has."""
    for turn in turns:
        tools = next((value for key in TOOLS if isinstance(value := _from_json(turn.get(key)), list)), None)
        if _role(turn) == "system" and tools:
            found = [_clean_tool(_from_json(tool)) for tool in tools]
            if columns.setdefault("tools", found) != found:
                raise SkippedRow("with different tools in two places")
    return columns


def _clean_tool(tool: Any) -> dict:
    """A tool in OpenAI's form, whose function, parameters and properties are objects, as chat templates expect them."""
    problem = SkippedRow("with a tool that is not an object, or whose parameters are not")
    if not isinstance(tool, dict):
        raise problem
    if "function" not in tool:
        if "name" not in tool:
            return tool  # one of a server's own, such as web_search
        tool = {"type": "function", "function": tool}
    function = _from_json(tool["function"])
    if not isinstance(function, dict):
        raise problem
    if function.get("parameters"):
        parameters = _from_json(function["parameters"])
        if not isinstance(parameters, dict):
            raise problem
        if parameters.get("properties"):
            parameters = parameters | {"properties": _from_json(parameters["properties"])}
            if not isinstance(parameters["properties"], dict):
                raise problem
        function = function | {"parameters": parameters}
    return tool | {"function": function}


def _from_json(value: Any) -> Any:
    """The list or object that a text holds as JSON; any other value as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return None if value == "" else value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _has_text(row: dict, column: str) -> bool:
    return isinstance(row.get(column), str) and bool(row[column].strip())


CONVERTERS: dict[str, Callable[[dict, str], dict]] = {
    "text": _to_text,
    "messages": _to_messages,
    "prompt_completion": _to_prompt_completion,
    "instruction": _to_instruction,
    "preference": _to_preference,
}
PREFERENCE_FORMATS = ("messages", "prompt_completion")
DESCRIPTIONS = {
    "text": "texts (a column `text`, or the one of --dataset_text_field)",
    "messages": "conversations (`messages` with role and content, or `conversations` with from and value), `prompt` and "
    "`completion` or `chosen`, or `instruction`, `input` and `output`",
    "prompt_completion": "`prompt` and `completion` or `chosen` as texts",
    "instruction": "`instruction`, `input` and `output`",
    "preference": "`chosen` and `rejected` answers to a `prompt`, as texts or messages, or two conversations that begin alike",
}


def to_json_columns(row: dict) -> dict:
    """A converted row whose turns, tools and arguments of the chat template are JSON, for the features of `stored_features`.

    `datasets` would make this JSON itself, but with ten decimals of each number only.
    """
    encoded = {}
    for name, value in row.items():
        if isinstance(value, list):
            value = [json.dumps(part, ensure_ascii=False) for part in value]
        elif isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False)
        encoded[name] = value
    return encoded


@functools.cache
def stored_features(format: str, text_field: str) -> Features:
    """The columns of converted rows. Turns are JSON, because Arrow would give every turn the keys of all others as null."""
    texts = {
        "": (),
        "text": (text_field,),
        "prompt_completion": ("prompt", "completion"),
        "instruction": ("instruction", "input", "output"),
    }
    if format in texts:
        return Features({name: Value("string") for name in texts[format]})
    columns = ("prompt", "chosen", "rejected") if format == "preference" else ("messages", "prompt", "completion")
    turns = {name: List(Json()) for name in (*columns, "tools")}
    return Features(turns | {TEMPLATE_ARGUMENTS: Json()})


def complete(row: dict, features: Features, encodes: bool = True) -> dict:
    """`row` with all columns of `features`. TRL passes `chat_template_kwargs` on, so it must not be null."""
    completed = {name: row.get(name, {} if name == TEMPLATE_ARGUMENTS else None) for name in features}
    return to_json_columns(completed) if encodes else completed


def split_answers(row: dict) -> list[dict]:
    """One row for every answer of a conversation that counts in the loss; the turns before it are its context."""
    turns = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    first = 1 if "messages" in row else len(row["prompt"])  # a first message never counts
    extra = {name: value for name, value in row.items() if name not in ("messages", "prompt", "completion")}
    rows = []
    for index, turn in enumerate(turns):
        if index >= first and turn["role"] == "assistant" and turn.get("train", True):
            context = [before | {"train": False} if before["role"] == "assistant" else before for before in turns[:index]]
            rows.append({"messages": [*context, turn], **extra})
    return rows


def has_untrained_turn(row: dict) -> bool:
    """Whether a turn of a converted row is marked not to count in the loss."""
    turns = [turn for name in ("messages", "prompt", "completion") for turn in row.get(name) or [] if isinstance(turn, dict)]
    return any(not turn.get("train", True) for turn in turns)


def kind_of_conversation(row: dict) -> str:
    """The roles of a converted row's turns, in words: "user assistant+calls tool assistant, tools"; "" without turns."""
    turns = [turn for name in TURNS for turn in row.get(name) or [] if isinstance(turn, dict)]
    words = []
    for turn in turns:
        has_thought = "reasoning_content" in turn or "</think>" in turn["content"]
        parts = [turn["role"], "calls" if "tool_calls" in turn else "", "thought" if has_thought else ""]
        words.append("+".join(part for part in [*parts, "" if turn.get("train", True) else "untrained"] if part))
    return " ".join(words) + (", tools" if row.get("tools") else "")


def explain_mismatch(
    rows: list[dict], accepted: tuple[str, ...], text_field: str, column_map: dict[str, str] | None = None
) -> str:
    """Why none of `rows` can be converted to one of the formats."""
    reasons = {f"{format}: {examine(row, format, text_field, column_map)[1]}": None for format in accepted for row in rows}
    columns = ", ".join(rename(rows[0], column_map))
    roles = f" (accepted roles: {', '.join(ROLES)})" if any("unknown role" in reason for reason in reasons) else ""
    return f"has the columns {columns}: its first rows cannot be used ({', '.join(reasons)}){roles}"
