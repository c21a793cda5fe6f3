"""The shapes of rows that people have, and how one becomes another."""

from trl.data_utils import is_conversational, maybe_convert_to_chatml

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's words, and everybody else's; whatever their case
BESIDE = ("tools", "chat_template_kwargs")  # columns that a chat template reads besides the conversation


def convert(row: dict, shape: str, text_field: str) -> dict | None:
    """`row` in a shape, None when it has nothing of it to train on; as it is when no shape is asked for."""
    return SHAPES[shape][0](row, text_field) if shape else row


def _text(row: dict, text_field: str) -> dict | None:
    return {text_field: row[text_field]} if _has(row, text_field) else None


def _prompt(row: dict, _) -> dict | None:
    is_it = isinstance(row.get("prompt"), str) and _has(row, "completion")
    return {"prompt": row["prompt"], "completion": row["completion"]} if is_it else None


def _instruction(row: dict, _) -> dict | None:
    is_it = _has(row, "instruction") and _has(row, "output")
    return {name: row.get(name) or "" for name in ("instruction", "input", "output")} if is_it else None


def _messages(row: dict, _) -> dict | None:
    for names in (("messages",), ("conversations",), ("prompt", "completion")):
        if all(isinstance(row.get(name), list) and row[name] for name in names):
            chat = maybe_convert_to_chatml({name: row[name] for name in names})
            if not all(is_conversational({"messages": turns}) for turns in chat.values()):
                continue
            chat = {name: [_turn(turn) for turn in turns] for name, turns in chat.items()}
            if not all(turn for turns in chat.values() for turn in turns):
                return None  # somebody says nothing
            answers = [turn for turn in chat[[*chat][-1]] if turn["role"] == "assistant"]
            return chat | {name: row[name] for name in BESIDE if row.get(name)} if answers else None
    if pair := _prompt(row, _):
        return _conversation(pair["prompt"], pair["completion"])
    if task := _instruction(row, _):
        return _conversation(f"{task['instruction']}\n\n{task['input']}".strip(), task["output"])
    return None


def _turn(turn: dict) -> dict | None:
    """A turn with its text as one, which beside calls of tools may be none; None when nothing is said."""
    role, content = str(turn.get("role")).lower(), turn.get("content")
    if isinstance(content, list):  # of parts; those that are no text cannot be trained on here
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if content is None and turn.get("tool_calls"):
        content = ""
    return turn | {"role": ROLES.get(role, role), "content": content} if isinstance(content, str) else None


def _conversation(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _has(row: dict, name: str) -> bool:
    return isinstance(row.get(name), str) and bool(row[name].strip())


def lacks(rows: list[dict], takes: tuple[str, ...], text_field: str) -> str:
    """What is wrong with rows in none of these shapes, whose columns may have the right names all the same."""
    columns = {"text": [{text_field}], "prompt": [{"prompt", "completion"}], "instruction": [{"instruction", "output"}]}
    columns["messages"] = [{"messages"}, {"conversations"}, *columns["prompt"], *columns["instruction"]]
    if not any(names <= rows[0].keys() for shape in takes for names in columns[shape]):
        return f"has the columns {', '.join(rows[0])}"
    turns = [turn for row in rows for name in ("messages", "conversations") for turn in row.get(name) or []]
    roles = sorted({str(turn.get("role") or turn.get("from")) for turn in turns if isinstance(turn, dict)})
    spoken = f" (there are the roles {', '.join(roles)})" if roles else ""
    return f"has the columns {', '.join(rows[0])}, but in its first {len(rows)} rows no text or answer to train on{spoken}"


# What a recipe can say that it takes, and the words for it.
SHAPES = {
    "text": (_text, "texts (a column `text`, or the one that --dataset_text_field names)"),
    "messages": (
        _messages,
        "conversations (`messages` of role and content, `conversations` of from and value), `prompt` and `completion`, or "
        "`instruction`, `input` and `output`",
    ),
    "prompt": (_prompt, "`prompt` and `completion` as texts"),
    "instruction": (_instruction, "`instruction`, `input` and `output`"),
}
