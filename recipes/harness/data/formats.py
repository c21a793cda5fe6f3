"""The formats of rows that a recipe can train on, and how a row is converted to one of them.

- text: {text_field: str}
- messages: {"messages": [{"role": str, "content": str}, …]}, or "prompt" and "completion" as lists of messages
- prompt_completion: {"prompt": str, "completion": str}
- instruction: {"instruction": str, "input": str, "output": str}

Preference data (`prompt`, `chosen`, `rejected`) is read as `prompt` and `completion`, or as `messages`, without `rejected`.
"""

from collections.abc import Callable

from trl.data_utils import is_conversational, maybe_convert_to_chatml

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for the usual roles
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # columns that a chat template reads besides the conversation
MESSAGE_COLUMNS = (("messages",), ("conversations",), ("prompt", "completion"))  # where conversations are found


def convert(row: dict, format: str, text_field: str) -> dict | None:
    """`row` in a format, None if it has nothing to train on. "" returns the row as it is."""
    if not format:
        return row
    if format in PREFERENCE_FORMATS and is_preference(row):
        row = _of_preference(row)
    return CONVERTERS[format](row, text_field)


def is_preference(row: dict) -> bool:
    """Whether a row has a chosen answer and nothing else that could be trained on."""
    others = ("messages", "conversations", "completion", "output")
    return bool(row.get("chosen")) and not any(row.get(column) for column in others)


def _of_preference(row: dict) -> dict:
    """A row of preference data with `chosen` in the columns of `messages`, or of `prompt` and `completion`.

    TRL's two forms: `chosen` is the answer to `prompt`, or the whole conversation. Each is a text or a list of messages.
    """
    prompt, chosen = row.get("prompt"), row["chosen"]
    if isinstance(chosen, str):
        if isinstance(prompt, list):
            chosen = [{"role": "assistant", "content": chosen}]
        return row | {"completion": chosen}
    role = chosen[0].get("role", chosen[0].get("from")) if isinstance(chosen[0], dict) else ""
    if not prompt or ROLES.get(role, role) != "assistant":  # the whole conversation
        return row | {"messages": chosen}
    return row | {"prompt": prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}], "completion": chosen}


def _to_text(row: dict, text_field: str) -> dict | None:
    return {text_field: row[text_field]} if _has_text(row, text_field) else None


def _to_prompt_completion(row: dict, text_field: str) -> dict | None:
    if isinstance(row.get("prompt"), str) and _has_text(row, "completion"):
        return {"prompt": row["prompt"], "completion": row["completion"]}
    return None


def _to_instruction(row: dict, text_field: str) -> dict | None:
    if _has_text(row, "instruction") and _has_text(row, "output"):
        return {name: row.get(name) or "" for name in ("instruction", "input", "output")}
    return None


def _to_messages(row: dict, text_field: str) -> dict | None:
    for columns in MESSAGE_COLUMNS:
        if not all(isinstance(row.get(column), list) and row[column] for column in columns):
            continue
        conversation = maybe_convert_to_chatml({column: row[column] for column in columns})
        if all(is_conversational({"messages": turns}) for turns in conversation.values()):
            return _clean_conversation(conversation, row)
    if pair := _to_prompt_completion(row, text_field):
        return _conversation_of(pair["prompt"], pair["completion"])
    if task := _to_instruction(row, text_field):
        return _conversation_of(f"{task['instruction']}\n\n{task['input']}".strip(), task["output"])
    return None


def _clean_conversation(conversation: dict[str, list[dict]], row: dict) -> dict | None:
    """A conversation with the usual roles; None if a turn is empty or nobody answers."""
    cleaned = {column: [_clean_turn(turn) for turn in turns] for column, turns in conversation.items()}
    if not all(turn for turns in cleaned.values() for turn in turns):
        return None
    last_column = list(cleaned)[-1]
    if not any(turn["role"] == "assistant" for turn in cleaned[last_column]):
        return None
    return cleaned | {name: row[name] for name in TEMPLATE_COLUMNS if row.get(name)}


def _clean_turn(turn: dict) -> dict | None:
    """A turn whose content is one text, "" next to tool calls; None if it has no text."""
    role, content = str(turn.get("role")).lower(), turn.get("content")
    if isinstance(content, list):  # a list of parts; only text can be trained on
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        return None
    return turn | {"role": ROLES.get(role, role), "content": content}


def _conversation_of(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _has_text(row: dict, column: str) -> bool:
    return isinstance(row.get(column), str) and bool(row[column].strip())


CONVERTERS: dict[str, Callable[[dict, str], dict | None]] = {
    "text": _to_text,
    "messages": _to_messages,
    "prompt_completion": _to_prompt_completion,
    "instruction": _to_instruction,
}
PREFERENCE_FORMATS = ("messages", "prompt_completion")
DESCRIPTIONS = {
    "text": "texts (a column `text`, or the one of --dataset_text_field)",
    "messages": "conversations (`messages` with role and content, or `conversations` with from and value), `prompt` and "
    "`completion` or `chosen`, or `instruction`, `input` and `output`",
    "prompt_completion": "`prompt` and `completion` or `chosen` as texts",
    "instruction": "`instruction`, `input` and `output`",
}


def explain_mismatch(rows: list[dict], formats: tuple[str, ...], text_field: str) -> str:
    """Why none of `rows` can be converted to one of `formats`: other columns, or the right columns without a text or answer."""
    pairs = [{"prompt", "completion"}, {"instruction", "output"}]
    columns_of = {
        "text": [{text_field}],
        "prompt_completion": [{"prompt", "completion"}, {"prompt", "chosen"}],
        "instruction": [{"instruction", "output"}],
        "messages": [{"messages"}, {"conversations"}, {"chosen"}, *pairs],
    }
    columns = ", ".join(rows[0])
    if not any(names <= rows[0].keys() for format in formats for names in columns_of[format]):
        return f"has the columns {columns}"
    turns = [turn for row in rows for name in ("messages", "conversations", "chosen") for turn in row.get(name) or []]
    roles = sorted({str(turn.get("role") or turn.get("from")) for turn in turns if isinstance(turn, dict)})
    found_roles = f" (roles found: {', '.join(roles)})" if roles else ""
    return f"has the columns {columns}, but its first {len(rows)} rows have no text or answer to train on{found_roles}"
