"""The shapes of rows that people have, and how one becomes another."""

from trl.data_utils import is_conversational, maybe_convert_to_chatml

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's words, and everybody else's
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
            chat = {name: [turn | {"role": ROLES.get(turn["role"], turn["role"])} for turn in chat[name]] for name in chat}
            answers = [turn for turn in chat[[*chat][-1]] if turn["role"] == "assistant"]
            return chat | {name: row[name] for name in BESIDE if row.get(name)} if answers else None
    if pair := _prompt(row, _):
        return _conversation(pair["prompt"], pair["completion"])
    if task := _instruction(row, _):
        return _conversation(f"{task['instruction']}\n\n{task['input']}".strip(), task["output"])
    return None


def _conversation(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _has(row: dict, name: str) -> bool:
    return isinstance(row.get(name), str) and bool(row[name].strip())


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
