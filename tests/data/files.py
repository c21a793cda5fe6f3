"""Files as people have them, and what becomes of each. `python tests/data/files.py` prints a table."""

import contextlib
import dataclasses
import gzip
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from harness.data import chat_templates, reading  # noqa: E402
from harness.data.loading import PREVIEWED_ROWS, REHEARSED_ROWS, load  # noqa: E402
from harness.data.script_arguments import ScriptArguments  # noqa: E402
from harness.data.settings import DataSettings, settings_of_data  # noqa: E402
from harness.messages import UserError  # noqa: E402
from harness.rehearsal import tiny  # noqa: E402

import datasets  # noqa: E402
import trl  # noqa: E402

ROWS = 30
CHAT, TEXT, TASK = ("messages",), ("text",), ("instruction", "prompt_completion")
TOOL = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
OTHER_TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def chat(number: int) -> list[dict]:
    return [user(f"Question {number}?"), answer(f"Answer {number}.")]


def call(arguments: object) -> dict:
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    result = {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 20}'}
    return {"messages": [user("Weather?"), {"role": "assistant", "content": None, "tool_calls": calls}, result, answer("20.")]}


def share_gpt(number: int) -> list[dict]:
    return [{"from": "human", "value": f"Question {number}?"}, {"from": "gpt", "value": f"Answer {number}."}]


def glaive(number: int) -> dict:
    """LLaMA-Factory's glaive_toolcall."""
    turns = [
        {"from": "human", "value": f"Weather {number}?"},
        {"from": "function_call", "value": json.dumps({"name": "get_weather", "arguments": {"city": f"City {number}"}})},
        {"from": "observation", "value": '{"degrees": 20}'},
        {"from": "gpt", "value": "20."},
    ]
    return {"conversations": turns, "tools": json.dumps([TOOL]), "system": "Be brief."}


def lines(make: object, count: int = ROWS) -> str:
    return "\n".join(json.dumps(make(number), ensure_ascii=False) for number in range(count))


def text(number: int) -> dict:
    return {"text": f"Text {number} – ä"}


TEXTS, CHATS = lines(text), lines(lambda number: {"messages": chat(number)})
CSV = "prompt,completion\n" + "\n".join(f'"Question {n}, or?",Answer {n}' for n in range(ROWS))


def make_parquet(folder: Path, name: str, rows: list[dict]) -> None:
    datasets.Dataset.from_list(rows).to_parquet(str(folder / name))


def save(folder: Path, splits: bool) -> None:
    rows = datasets.Dataset.from_list([text(number) for number in range(ROWS)])
    (datasets.DatasetDict(train=rows, test=rows.take(3)) if splits else rows).save_to_disk(str(folder / "saved"))


# Name: formats of the recipe; files by name, or a function that makes them in a folder; --dataset_name below the folder; words of
# the error message, or the rows that are trained on, skipped and evaluated on; other arguments.
FILES: dict[str, tuple] = {
    # files
    "JSONL": (TEXT, {"a.jsonl": TEXTS}, "a.jsonl", (27, 0, 3)),
    "JSON list": (TEXT, {"a.json": json.dumps([text(n) for n in range(ROWS)], indent=1)}, "a.json", (27, 0, 3)),
    "JSON list in one line": (TEXT, {"a.json": json.dumps([text(n) for n in range(ROWS)])}, "a.json", (27, 0, 3)),
    "list of strings": (TEXT, {"a.json": json.dumps([f"Text {n}" for n in range(ROWS)])}, "a.json", (27, 0, 3)),
    "object with a list": (TEXT, {"a.json": json.dumps({"data": [text(n) for n in range(ROWS)]})}, "a.json", (27, 0, 3)),
    "indented objects": (TEXT, {"a.json": "\n".join(json.dumps(text(n), indent=1) for n in range(ROWS))}, "a.json", (27, 0, 3)),
    "objects without line breaks": (TEXT, {"a.jsonl": TEXTS.replace("\n", "")}, "a.jsonl", (27, 0, 3)),
    "CSV": (TASK, {"a.csv": CSV}, "a.csv", (27, 0, 3)),
    "CSV with words like NA": (
        TASK,
        {"a.csv": "prompt,completion\n" + "\n".join(f"Q{n},{w}" for n, w in enumerate(["NA", "None", "nan", "007", "null"] * 6))},
        "a.csv",
        (27, 0, 3),
    ),
    "CSV with semicolons": (
        TASK,
        {"a.csv": "prompt;completion\n" + "\n".join(f"Question {n}, or?;Answer, {n}" for n in range(ROWS))},
        "a.csv",
        (27, 0, 3),
    ),
    "TSV": (TASK, {"a.tsv": "prompt\tcompletion\n" + "\n".join(f"Q {n}\tA, {n}" for n in range(ROWS))}, "a.tsv", (27, 0, 3)),
    "CSV with conversations as JSON": (
        CHAT,
        {"a.csv": "messages\n" + "\n".join('"' + json.dumps(chat(n)).replace('"', '""') + '"' for n in range(ROWS))},
        "a.csv",
        (27, 0, 3),
    ),
    "CSV with an open quote": (
        TASK,
        {"a.csv": CSV + '\n"an open quote,x\n' + "\n".join(f"Q{n},A{n}" for n in range(9))},
        "a.csv",
        "line 32: not readable as CSV: unexpected end of data (is a quotation mark of this row not closed",
    ),
    "CSV with a quotation mark that is not doubled": (
        TASK,
        {"a.csv": CSV + '\n"He said "no" to me",x'},
        "a.csv",
        "line 32: not readable as CSV",
    ),
    "CSV with line breaks": (TASK, {"a.csv": CSV + '\n"x\nx","y\ny"'}, "a.csv", (28, 0, 3)),
    "CSV with a space behind a quotation mark": (TASK, {"a.csv": CSV + '\n"x" ,y'}, "a.csv", "line 32: not readable as CSV"),
    "CSV with CRLF, other line separators and spaces within quotes": (
        TASK,
        {"a.csv": (CSV + '\n"x ""y"" , z",a\u2028b\n"x",y \n').replace("\n", "\r\n")},
        "a.csv",
        (29, 0, 3),
    ),
    "TSV without quoting": (TASK, {"a.tsv": CSV.replace(",", "\t") + '\n"x" x\ty'}, "a.tsv", (28, 0, 3)),
    "CSV with two columns of one name": (TEXT, {"a.csv": "text,text\na,b"}, "a.csv", "line 1: two columns are called text"),
    "CSV with too many values": (TASK, {"a.csv": CSV + "\na,b,c"}, "a.csv", "line 32: 3 values, but the header names 2 columns"),
    "Parquet": (TEXT, lambda folder: make_parquet(folder, "a.parquet", [text(n) for n in range(ROWS)]), "a.parquet", (27, 0, 3)),
    "Parquet with calls": (
        CHAT,
        lambda folder: make_parquet(folder, "a.parquet", [call({"city": f"City {n}"}) for n in range(ROWS)]),
        "a.parquet",
        (27, 0, 3),
    ),
    "saved dataset": (TEXT, lambda folder: save(folder, splits=False), "saved", (27, 0, 3)),
    "saved splits": (TEXT, lambda folder: save(folder, splits=True), "saved", (30, 0, 3)),
    "gzip": (TEXT, {"a.jsonl.gz": gzip.compress(TEXTS.encode())}, "a.jsonl.gz", (27, 0, 3)),
    "gzip that was not copied to its end": (
        TEXT,
        {"a.jsonl.gz": gzip.compress(TEXTS.encode())[:-20]},
        "a.jsonl.gz",
        "a.jsonl.gz is damaged or incomplete",
    ),
    "damaged gzip": (
        TEXT,
        {"a.jsonl.gz": gzip.compress(TEXTS.encode())[:-8] + b"\0" * 8},
        "a.jsonl.gz",
        "a.jsonl.gz is damaged or incomplete",
    ),
    "zip": (TEXT, {"a.zip": b"PK\x03\x04\0 rest"}, "a.zip", "a.zip: expected a file .json"),
    "capital suffix": (TEXT, {"A.JSONL": TEXTS}, "A.JSONL", (27, 0, 3)),
    "no suffix": (TEXT, {"rows": TEXTS}, "rows", "rows: expected a file .json"),
    "brackets and spaces in the name": (TEXT, {"my [own] rows (1)?.jsonl": TEXTS}, "my [own] rows (1)?.jsonl", (27, 0, 3)),
    "brackets in a folder's name": (
        TEXT,
        lambda folder: ((folder / "d [1]").mkdir(), make_parquet(folder, "d [1]/a.parquet", [text(n) for n in range(ROWS)])),
        "d [1]",
        (27, 0, 3),
    ),
    "BOM": (TEXT, {"a.jsonl": b"\xef\xbb\xbf" + TEXTS.encode()}, "a.jsonl", (27, 0, 3)),
    "CSV with BOM": (TASK, {"a.csv": b"\xef\xbb\xbf" + CSV.encode()}, "a.csv", (27, 0, 3)),
    "UTF-16": (TEXT, {"a.jsonl": TEXTS.encode("utf-16")}, "a.jsonl", "a.jsonl, line 1: byte 0xff is not UTF-8"),
    "Latin-1": (TEXT, {"a.jsonl": '{"text": "a"}\n{"text": "ä"}'.encode("latin-1")}, "a.jsonl", "line 2: byte 0xe4 is not UTF-8"),
    "broken JSON": (TEXT, {"a.jsonl": TEXTS + '\n{"text": "a'}, "a.jsonl", "a.jsonl, line 31: JSON parse error"),
    "control character in JSON": (TEXT, {"a.jsonl": '{"text": "a\tb"}'}, "a.jsonl", "Invalid control character at character 12"),
    "broken JSON list": (TEXT, {"a.json": '[{"text": "a"},\n{"text": }]'}, "a.json", "a.json, line 2: JSON parse error"),
    "numbers instead of objects": (TEXT, {"a.jsonl": "1\n2"}, "a.jsonl", "line 1: found 1, expected an object"),
    "empty file": (TEXT, {"a.jsonl": ""}, "a.jsonl", "it is empty"),
    "empty list": (TEXT, {"a.json": "[]"}, "a.json", "it is empty"),
    "empty text": (TEXT, {"a.txt": ""}, "a.txt", "it is empty"),
    "text by lines": (TEXT, {"a.txt": "\n".join(f"Line {n}" for n in range(ROWS)) + "\n"}, "a.txt", (27, 0, 3)),
    "Markdown documents": (TEXT, {f"d/{n}.md": f"# Title {n}\n\nText." for n in range(ROWS)}, "d", (27, 0, 3)),
    "text documents": (TEXT, {f"d/{n}.txt": f"Title {n}\n\nText." for n in range(ROWS)}, "d", (27, 0, 3)),
    "one document": (TEXT, {"a.md": "# Title\n\nText."}, "a.md", "1 row that can be used"),
    "glob": (TEXT, {f"d/{n}.jsonl": lines(lambda i, n=n: text(10 * n + i), 10) for n in range(3)}, "d/*.jsonl", (27, 0, 3)),
    "several files": (TEXT, {"a.jsonl": TEXTS, "b.jsonl": lines(lambda n: text(n + 100))}, "*.jsonl", (54, 0, 6)),
    "folder with two shapes": (
        CHAT,
        {"d/a.jsonl": CHATS, "d/b.jsonl": lines(lambda n: {"prompt": [user(f"Q {n}")], "completion": [answer(f"A {n}")]})},
        "d",
        (54, 0, 6),
    ),
    "folder with two formats": (TEXT, {"d/a.jsonl": TEXTS, "d/notes.txt": "notes"}, "d", (27, 0, 3)),
    "folder with dev": (TEXT, {"d/train.jsonl": TEXTS, "d/dev.jsonl": lines(lambda n: text(n + 50), 5)}, "d", (30, 0, 5)),
    "folder with eval": (TEXT, {"d/rows.jsonl": TEXTS, "d/eval.jsonl": lines(lambda n: text(n + 50), 5)}, "d", (30, 0, 5)),
    "folder of images": (TEXT, {"d/a.png": b"\x89PNG\r\n\x1a\n\0\0\0"}, "d", "no files in JSON, CSV"),
    "missing file": (TEXT, {}, "no.jsonl", "file or folder not found"),
    # rows
    "two files for a stream": (
        TEXT,
        {f"d/{n}.jsonl": lines(lambda i, n=n: text(100 * n + i), 100) for n in range(2)},
        "d",
        (180, 0, 20),
        {"dataset_streaming": True},
    ),
    "three rows": (TEXT, {"a.jsonl": lines(text, 3)}, "a.jsonl", (2, 0, 1)),
    "one row": (TEXT, {"a.jsonl": lines(text, 1)}, "a.jsonl", "1 row that can be used"),
    "equal rows": (TEXT, {"a.jsonl": lines(lambda n: text(0))}, "a.jsonl", "all of them equal"),
    "oversampled rows": (TEXT, {"a.jsonl": lines(lambda n: text(n % 20), 100)}, "a.jsonl", (90, 8, 2)),
    "some rows without an answer": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": chat(n)[: 1 + (n % 3 > 0)]})},
        "a.jsonl",
        (18, 10, 2),
    ),
    "first rows null": (
        TEXT,
        {"a.jsonl": lines(lambda n: {"text": None if n < 25 else f"Text {n}"}, 50)},
        "a.jsonl",
        (23, 25, 2),
    ),
    "mixed types in a column": (
        TEXT,
        {"a.jsonl": lines(lambda n: {"text": f"Text {n}" if n % 2 else n})},
        "a.jsonl",
        (27, 0, 3),
    ),
    "Dolly": (
        TASK,
        {"a.jsonl": lines(lambda n: {"instruction": f"Do {n}", "context": "", "response": "Done"})},
        "a.jsonl",
        "--column_map '{",
    ),
    "question and answer": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"question": f"Q {n}", "answer": f"A {n}"})},
        "a.jsonl",
        """--column_map '{"OLD": "NEW",""",
    ),
    "question and answer, renamed": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"question": f"Q {n}", "answer": f"A {n}"})},
        "a.jsonl",
        (27, 0, 3),
        {"column_map": '{"question": "prompt", "answer": "completion"}'},
    ),
    # conversations
    "messages": (CHAT, {"a.jsonl": CHATS}, "a.jsonl", (27, 0, 3)),
    "ShareGPT": (CHAT, {"a.jsonl": lines(lambda n: {"conversations": share_gpt(n)})}, "a.jsonl", (27, 0, 3)),
    "messages as JSON": (CHAT, {"a.jsonl": lines(lambda n: {"messages": json.dumps(chat(n))})}, "a.jsonl", (27, 0, 3)),
    "dialogue of texts": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"dialog": [f"Hi {n}", "Hello"]})},
        "a.jsonl",
        (27, 0, 3),
        {"column_map": {"dialog": "messages"}},
    ),
    "unknown roles": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [user("Why?"), {"role": "bot", "content": "So."}]})},
        "a.jsonl",
        "unknown role bot",
    ),
    "some unknown roles": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [*chat(n), *([{"role": "critic", "content": "No."}] if n % 3 == 0 else [])]})},
        "a.jsonl",
        (18, 10, 2),
    ),
    "null system turn": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [{"role": "system", "content": None}, *chat(n)]})},
        "a.jsonl",
        (27, 0, 3),
    ),
    "developer turn": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [{"role": "developer", "content": "Short."}, *chat(n)]})},
        "a.jsonl",
        (27, 0, 3),
    ),
    "ends with the user": (CHAT, {"a.jsonl": lines(lambda n: {"messages": [*chat(n), user("Thanks")]})}, "a.jsonl", (27, 0, 3)),
    "weight 0": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [user("Q"), answer("No", weight=0), *chat(n)]})},
        "a.jsonl",
        (27, 0, 3),
    ),
    "empty answers": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [user("Q"), answer("" if n % 2 else f"A {n}")]})},
        "a.jsonl",
        (14, 15, 1),
    ),
    "Alpaca with system and history": (
        CHAT,
        {
            "a.jsonl": lines(
                lambda n: {"instruction": f"Add {n}", "output": "3", "system": "Be brief.", "history": [["Hi", "Hello"]]}
            )
        },
        "a.jsonl",
        (27, 0, 3),
    ),
    "UltraFeedback": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"prompt": f"Question {n}?", "chosen": chat(n), "rejected": chat(n), "score": 5})},
        "a.jsonl",
        (27, 0, 3),
    ),
    "OpenAI's calls": (
        CHAT,
        {
            "a.jsonl": lines(
                lambda n: call(json.dumps({"city": f"City {n}"})) | {"tools": [{"type": "function", "function": TOOL}]}
            )
        },
        "a.jsonl",
        (27, 0, 3),
    ),
    "arguments as objects": (
        CHAT,
        {"a.jsonl": lines(lambda n: call({"city": f"C {n}"} if n % 2 else {"days": n}))},
        "a.jsonl",
        (27, 0, 3),
    ),
    "different tools": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": chat(n), "tools": [TOOL if n % 2 else OTHER_TOOL]})},
        "a.jsonl",
        (27, 0, 3),
    ),
    "glaive_toolcall": (CHAT, {"a.jsonl": lines(glaive)}, "a.jsonl", (27, 0, 3)),
    "glaive_toolcall for Qwen2": (
        CHAT,
        {"a.jsonl": lines(glaive)},
        "a.jsonl",
        "leaves out the tool calls of turn 3",
        {"template": "qwen2"},
    ),
    "<think>": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [user(f"{n}?"), answer(f"<think>\nAdd.\n</think>\n\n{n}")]})},
        "a.jsonl",
        (27, 0, 3),
        {"template": "qwen3"},
    ),
    "reasoning_content": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"messages": [user(f"{n}?"), answer(f"{n}", reasoning_content="Add.")]})},
        "a.jsonl",
        "leaves out the reasoning of turn 2 (assistant)",
    ),
    "several thoughts": (
        CHAT,
        {
            "a.jsonl": lines(
                lambda n: {"messages": [user("Q"), answer("<think>A</think>B"), user(f"{n}"), answer("<think>C</think>D")]}
            )
        },
        "a.jsonl",
        "pass --split_conversations true",
        {"template": "qwen3"},
    ),
    "several thoughts, split": (
        CHAT,
        {
            "a.jsonl": lines(
                lambda n: {"messages": [user("Q"), answer("<think>A</think>B"), user(f"{n}"), answer("<think>C</think>D")]}
            )
        },
        "a.jsonl",
        (54, 0, 6),
        {"template": "qwen3", "split_conversations": True},
    ),
}


def settings_for(folder: Path, name: str, first_rows: int) -> DataSettings:
    formats, _, path, _, *more = FILES[name]
    settings = {key: value for key, value in (more[0] if more else {}).items() if key != "template"}
    script_args = ScriptArguments(dataset_name=f"{folder}/{path}".replace("{}", str(folder)), **settings)
    training_args = SimpleNamespace(seed=0, output_dir=str(folder / ".out"), max_steps=1)
    return settings_of_data(script_args, training_args, formats).with_each(first_rows=first_rows)


def make(folder: Path, name: str) -> None:
    files = FILES[name][1]
    if callable(files):
        files(folder)
        return
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)


def make_tokenizer(template: str) -> object:
    tokenizer = tiny.make_tokenizer(tiny.family_of("Qwen/Qwen2-0.5B-Instruct"))
    if template != "qwen2":
        tokenizer.chat_template = Path(trl.__file__).parent.joinpath(f"chat_templates/{template}.jinja").read_text()
    return tokenizer


def outcome(folder: Path, name: str, mode: str, tokenizer: object) -> tuple[str, dict, list[str]]:
    """The error message, what was counted, and the rendered rows to train on, of a run, a preview or a rehearsal."""
    data = settings_for(folder, name, {"run": 0, "preview": PREVIEWED_ROWS, "rehearsal": REHEARSED_ROWS}[mode])
    if mode == "rehearsal":
        data = data.with_each(eval_rows_of_run=data.max_eval_samples, cuts_texts=True)
        data = dataclasses.replace(data, max_eval_samples=16)

    def check(rows):
        for place, row in rows:
            if "messages" in row or isinstance(row.get("prompt"), list):
                parts = chat_templates.split_answers(row) if data.split_conversations else [row]
                chat_templates.check_rendering(tokenizer, "of this model", [(place, part) for part in parts], True)

    try:
        reading.print_ignored_files(data.sources[0].name, None)
        train, test = load(dataclasses.replace(data, check_conversations=check))
    except UserError as error:
        return str(error).replace(str(folder), ""), {}, []
    summary = json.loads((folder / ".out/data.json").read_text())
    rows = list(train)
    rendered = []
    for row in rows:
        if "messages" in row or isinstance(row.get("prompt"), list):
            turns, options = chat_templates.turns_of(row), chat_templates.options_of(row)
            rendered.append(tokenizer.apply_chat_template(turns, tokenize=False, **options))
        else:
            rendered.append(json.dumps(row, ensure_ascii=False))
    counted = {key: summary[key] for key in ("skipped", "held_out", "trained_rows", "ignored_columns")}
    return "", counted | {"counts": (len(rows), summary["skipped_rows"], len(test))}, rendered


def main() -> None:
    import logging

    logging.disable(logging.CRITICAL)
    datasets.disable_progress_bars()
    for name in FILES:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), name)
            tokenizer = make_tokenizer((FILES[name][4] if len(FILES[name]) > 4 else {}).get("template", "qwen2_5"))
            with contextlib.redirect_stdout(sys.stderr):  # the messages of a run
                message, counted, _ = outcome(Path(folder), name, "run", tokenizer)
        print(f"| {name} | {message or '{} trained on, {} skipped, {} evaluated on'.format(*counted['counts'])} |")


if __name__ == "__main__":
    main()
