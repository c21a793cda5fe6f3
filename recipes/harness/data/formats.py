"""The formats of rows that a recipe can train on, and how a row is converted to one of them.

`convert` takes a row as it was read, and returns it in a format, or why it is skipped. Turns are read in turns.py.

- text: {text_field: str}
- messages: {"messages": [{"role": str, "content": str}, …]}, or "prompt" and "completion" as lists of messages; also with
  "tools" and "chat_template_kwargs". A turn with "train": False does not count in the loss.
- prompt_completion: {"prompt": str, "completion": str}
- instruction: {"instruction": str, "input": str, "output": str}
- question_answer: {"question": str, "answer": str}
- images: {"messages": […], "images": [{"bytes": …, "path": …}, …]}, as `messages`, with <image> in contents; see images.py
- preference: {"prompt": […], "chosen": […], "rejected": […]}, lists of messages; also with "tools" and "chat_template_kwargs"

For `messages` and `prompt_completion`, preference data is read as `prompt` and `completion`, or as `messages`, without
`rejected`.
"""

from collections.abc import Callable
from typing import Any

from harness.data import images
from harness.data.turns import (
    CONVERSATION_COLUMNS,
    TEMPLATE_ARGUMENTS,
    check_answers,
    is_nothing,
    read_json,
    read_turn,
    read_turns,
    row_of_turns,
    text_of,
    with_turns_in_json,
    without,
)
from harness.messages import SkippedRow

CONVERSATIONS = ("messages", "images", "preference")  # formats whose rows a chat template renders
PREFERENCE_FORMATS = ("messages", "prompt_completion")
DESCRIPTIONS = {
    "text": "texts (a column `text`, or the one of --dataset_text_field)",
    "messages": "conversations (`messages` with role and content, or `conversations` with from and value), `prompt` and "
    "`completion` or `chosen`, or `instruction`, `input` and `output`",
    "images": "conversations (`messages` with role and content) with `images`, one for each part of the type image",
    "prompt_completion": "`prompt` and `completion` or `chosen` as texts",
    "instruction": "`instruction`, `input` and `output`",
    "question_answer": "`question` and `answer`",
    "preference": "`chosen` and `rejected` answers to a `prompt`, as texts or messages, or two conversations that begin alike",
}


def convert(
    row: dict,
    format: str,
    text_field: str = "text",
    column_map: dict[str, str] | None = None,
    structs: tuple[str, ...] = (),
    template_arguments: dict[str, Any] | None = None,
) -> tuple[dict | None, str]:
    """`row` in a format and "", or None and why the row is skipped.

    Args:
        format: "" returns the row as it is.
        column_map: new names of columns.
        structs: columns that are Arrow structs, whose rows have null for every key that another row has.
        template_arguments: what the chat template gets besides the turns; a row's own have precedence.
    """
    row = rename(dict(row), column_map)  # `Dataset.map` passes a mapping that is no dict
    if not format:
        return row, ""
    for name in structs:
        if name in row:
            row[name] = _without_nulls(row[name])
    try:
        converted = CONVERTERS[format](row, text_field)
    except SkippedRow as skipped:
        return None, str(skipped)
    if template_arguments and format in CONVERSATIONS:
        converted[TEMPLATE_ARGUMENTS] = template_arguments | converted.get(TEMPLATE_ARGUMENTS, {})
    return converted, ""


def rename(row: dict, column_map: dict[str, str] | None) -> dict:
    """`row` with the new names of its columns, which replace columns that have these names already."""
    if not column_map:
        return row
    kept = without(row, *column_map, *column_map.values())
    return kept | {new: row[name] for name, new in column_map.items() if name in row}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None and part == part}  # NaN is not
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def is_preference(row: dict) -> bool:
    """Whether a row has a chosen answer and nothing else that could be trained on."""
    others = ("messages", "conversations", "completion", "output")
    return _has(row, "chosen") and not any(_has(row, column) for column in others)


def _has(row: dict, column: str) -> bool:
    return not is_nothing(row.get(column))


def _text(row: dict, column: str) -> str:
    return text_of(row.get(column), f"whose {column}")


def _filled_text(row: dict, column: str) -> str:
    """A text that a row must have. Raises SkippedRow if it is missing."""
    if not _has(row, column):
        raise SkippedRow(f"without a text in the column {column}")
    return _text(row, column)


def _to_text(row: dict, text_field: str) -> dict:
    return {text_field: _filled_text(row, text_field)}


def _to_prompt_completion(row: dict, text_field: str) -> dict:
    if row.get("prompt") is None:
        raise SkippedRow("without a prompt as text")
    answer = "chosen" if is_preference(row) else "completion"
    return {"prompt": _text(row, "prompt"), "completion": _filled_text(row, answer)}


def _to_instruction(row: dict, text_field: str) -> dict:
    instruction = _filled_text(row, "instruction")
    output = _filled_text(row, "output")
    return {"instruction": instruction, "input": _text(row, "input"), "output": output}


def _to_question_answer(row: dict, text_field: str) -> dict:
    return {"question": _filled_text(row, "question"), "answer": _filled_text(row, "answer")}


def _to_messages(row: dict, text_field: str) -> dict:
    """A row with messages, or with a prompt and a completion that are messages. Raises SkippedRow if it has no answer."""
    if is_preference(row):
        row = _of_preference(row)
    row = with_turns_in_json(row, ("prompt", "completion"))
    for column in CONVERSATION_COLUMNS:
        turns = read_turns(row.get(column), column)
        if turns:
            converted = row_of_turns(row, messages=turns)
            check_answers(converted["messages"])
            check_answers(converted["messages"][1:], "whose only answer is its first message")
            return converted
    if _has(row, "prompt") and _has(row, "completion"):
        prompt = _turns(row, "prompt", "user")
        completion = _turns(row, "completion", "assistant")
        if isinstance(row["prompt"], list) or isinstance(row["completion"], list | dict):
            check_answers(completion)
            return row_of_turns(row, prompt=prompt, completion=completion)
        turns = prompt + completion
    elif _has(row, "instruction") and _has(row, "output"):
        turns = _pair(_task(row, "instruction"), _text(row, "output"))
    else:
        raise SkippedRow("without messages that have an answer, and without a prompt and a completion")
    return row_of_turns(row, messages=_history(row) + turns)


def _to_images(row: dict, text_field: str) -> dict:
    """A row with messages and the images that belong to them."""
    of_parts: list = []
    for column in (*CONVERSATION_COLUMNS, "prompt", "completion", "chosen"):
        if column in row:
            row[column] = images.mark_parts(row[column], of_parts)
    converted = _to_messages(row, text_field)
    if "completion" in converted:
        converted = as_messages(converted)
    found = images.read_row(row, of_parts)
    return converted | {"messages": images.add_marks(converted["messages"], len(found)), "images": found}


def _turns(row: dict, column: str, role: str) -> list[dict]:
    """The turns in a column: a text of this role, a turn, or several."""
    if isinstance(row.get(column), list | dict):
        return read_turns(row[column], column)
    if _has(row, column):
        return [read_turn({"role": role, "content": _text(row, column)})]
    return []


def _pair(question: Any, answer: Any) -> list[dict]:
    return [read_turn({"role": "user", "content": question}), read_turn({"role": "assistant", "content": answer})]


def _task(row: dict, column: str) -> str:
    """The instruction of Alpaca in `column`, and below it its input, if it has one."""
    if _has(row, "input"):
        return f"{_text(row, column)}\n\n{_text(row, 'input')}"
    return _text(row, column)


def _history(row: dict) -> list[dict]:
    """The turns of LLaMA-Factory's `history`: pairs of a question and an answer."""
    turns = []
    pairs = read_json(row.get("history")) or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise SkippedRow("whose history is not pairs of a question and an answer")
        turns += _pair(*pair)
    return turns


def _of_preference(row: dict) -> dict:
    """A row of preference data with `chosen` in the columns of `messages`, or of `prompt` and `completion`.

    TRL's two forms: `chosen` is the answer to `prompt`, or the whole conversation. Each is a text or a list of messages.
    """
    row = with_turns_in_json(row, ("prompt", "chosen"))
    chosen = row["chosen"]
    if isinstance(chosen, list):
        chosen = read_turns(chosen, "chosen")
        prompt = _turns(row, "prompt", "user")
        if not prompt or chosen[0]["role"] != "assistant":  # the whole conversation
            return row | {"messages": _join(prompt, chosen)}
    return row | {"completion": chosen}


def _join(prompt: list[dict], conversation: list[dict]) -> list[dict]:
    """A conversation after the turns of a prompt that it lacks. Raises SkippedRow if it does not belong to the prompt."""
    asked = list(map(_what_is_said, prompt))
    said = list(map(_what_is_said, conversation))
    if any(asked == said[start : start + len(asked)] for start in range(len(said))):
        return conversation
    for count in range(min(len(asked), len(said)), 0, -1):
        if asked[-count:] == said[:count]:
            return prompt[:-count] + conversation
    if all(turn["role"] == "system" for turn in prompt):
        return prompt + conversation
    raise SkippedRow("whose prompt is not that of its conversations")


def _what_is_said(turn: dict) -> tuple:
    return turn["role"], turn["content"].strip(), turn.get("tool_calls")


def _to_preference(row: dict, text_field: str) -> dict:
    """A row with the turns before the answers as `prompt`, and a chosen and a rejected answer; all three lists of messages."""
    row = with_turns_in_json(row, ("prompt", "chosen", "rejected"))
    chosen = _turns(row, "chosen", "assistant")
    rejected = _turns(row, "rejected", "assistant")
    if not chosen or not rejected:
        raise SkippedRow("without a chosen and a rejected answer")
    if chosen[0]["role"] == "assistant":
        prompt = _prompt_of_answers(row)
        if prompt and prompt[-1]["role"] == "assistant":
            raise SkippedRow("whose prompt ends with an answer")
    else:  # two conversations that begin alike
        same = 0
        while chosen[same : same + 1] == rejected[same : same + 1] != []:
            same += 1
        if not same:
            raise SkippedRow("whose chosen and rejected conversations do not begin alike")
        prompt = _join(_turns(row, "prompt", "user"), chosen[:same])
        chosen = chosen[same:]
        rejected = rejected[same:]
    if not prompt:
        raise SkippedRow("without a prompt")
    if chosen and rejected:
        chosen = _without_last_questions(chosen)
        rejected = _without_last_questions(rejected)
    if not chosen or not rejected or chosen == rejected:
        raise SkippedRow("whose chosen and rejected answers are the same")
    if any(turn["role"] != "assistant" for turn in chosen + rejected):
        raise SkippedRow("whose answers have turns of a user or a tool in them, which would count in the loss")
    return row_of_turns(row, prompt=prompt, chosen=chosen, rejected=rejected)


def _prompt_of_answers(row: dict) -> list[dict]:
    """What the answers of a preference answer, [] if nothing."""
    if isinstance(row.get("prompt"), list) and _has(row, "prompt"):
        return _turns(row, "prompt", "user")
    for column in CONVERSATION_COLUMNS:
        turns = read_turns(row.get(column), column)
        if turns:
            return turns
    for column in ("prompt", "instruction"):
        if _has(row, column):
            return [*_history(row), read_turn({"role": "user", "content": _task(row, column)})]
    return []


def _without_last_questions(turns: list[dict]) -> list[dict]:
    """The turns up to the last answer."""
    check_answers(turns)
    last = max(index for index, turn in enumerate(turns) if turn["role"] == "assistant")
    return turns[: last + 1]


CONVERTERS: dict[str, Callable[[dict, str], dict]] = {
    "text": _to_text,
    "messages": _to_messages,
    "images": _to_images,
    "prompt_completion": _to_prompt_completion,
    "instruction": _to_instruction,
    "question_answer": _to_question_answer,
    "preference": _to_preference,
}


def as_messages(row: dict) -> dict:
    """A converted row with `messages` instead of `prompt` and `completion`; the prompt's answers do not count in the loss."""
    return {"messages": as_context(row["prompt"]) + row["completion"], **without(row, "prompt", "completion")}


def as_context(turns: list[dict]) -> list[dict]:
    """The same turns, none of which counts in the loss."""
    return [turn | {"train": False} if turn["role"] == "assistant" else turn for turn in turns]
