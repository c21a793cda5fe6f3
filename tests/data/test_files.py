"""Files as people have them: run, rehearsal and preview agree on the outcome, the counts and the rows of each."""

import dataclasses
import gzip
import json

from harness.data.conversion import REHEARSED_ROWS
from harness.data.loading import PREVIEWED_ROWS, load_rows
from harness.messages import UserError

import datasets
import pytest
from runs import data_settings

ROWS = 30
CHAT, TEXT, TASK = ("messages",), ("text",), ("instruction", "prompt_completion")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def chat(number):
    return [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": f"Answer {number}."}]


def text(number):
    return {"text": f"Text {number} – ä"}


def lines(make, count=ROWS):
    return "\n".join(json.dumps(make(number), ensure_ascii=False) for number in range(count))


def parquet(folder, name, rows):
    (folder / name).parent.mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(folder / name))


def save(folder, splits):
    rows = datasets.Dataset.from_list([text(number) for number in range(ROWS)])
    (datasets.DatasetDict(train=rows, test=rows.take(3)) if splits else rows).save_to_disk(str(folder / "saved"))


TEXTS, CHATS = lines(text), lines(lambda number: {"messages": chat(number)})
LIST = [text(number) for number in range(ROWS)]
CSV = "prompt,completion\n" + "\n".join(f'"Question {n}, or?",Answer {n}' for n in range(ROWS))
PAIRS = lines(lambda n: {"prompt": chat(n)[:1], "completion": chat(n)[1:]})
ALL = (27, 0, 3)  # rows that are trained on, skipped and evaluated on

# Name: formats of the recipe; files by name, or a function that makes them in a folder; --dataset_name below the folder; words of
# the error message, or the rows that are trained on, skipped and evaluated on; other arguments.
FILES = {
    "JSONL": (TEXT, {"a.jsonl": TEXTS}, "a.jsonl", ALL),
    "JSON list": (TEXT, {"a.json": json.dumps(LIST, indent=1)}, "a.json", ALL),
    "list of strings": (TEXT, {"a.json": json.dumps([row["text"] for row in LIST])}, "a.json", ALL),
    "objects without line breaks": (TEXT, {"a.jsonl": TEXTS.replace("\n", "")}, "a.jsonl", "line 1: JSON parse error"),
    "CSV": (TASK, {"a.csv": CSV}, "a.csv", ALL),
    "CSV with words like NA": (
        TASK,
        {"a.csv": "prompt,completion\n" + "\n".join(f"Q{n},{w}" for n, w in enumerate(["NA", "None", "nan", "007", "null"] * 6))},
        "a.csv",
        ALL,
    ),
    "CSV with semicolons": (TASK, {"a.csv": CSV.replace('",', '";').replace("t,c", "t;c")}, "a.csv", ALL),
    "TSV": (TASK, {"a.tsv": "prompt\tcompletion\n" + "\n".join(f"Q {n}\tA, {n}" for n in range(ROWS))}, "a.tsv", ALL),
    "CSV with conversations as JSON": (
        CHAT,
        {"a.csv": "messages\n" + "\n".join('"' + json.dumps(chat(n)).replace('"', '""') + '"' for n in range(ROWS))},
        "a.csv",
        ALL,
    ),
    "CSV with an open quote": (TASK, {"a.csv": CSV + '\n"an open quote,x\nQ,A\n'}, "a.csv", "line 33: not readable as CSV"),
    "CSV with CRLF, other line separators and spaces within quotes": (
        TASK,
        {"a.csv": (CSV + '\n"x ""y"" , z",a\u2028b\n"x\nx",y \n').replace("\n", "\r\n")},
        "a.csv",
        (29, 0, 3),
    ),
    "CSV with too many values": (TASK, {"a.csv": CSV + "\na,b,c"}, "a.csv", "line 32: not readable as CSV: 3 values"),
    "Parquet": (TEXT, lambda folder: parquet(folder, "a.parquet", LIST), "a.parquet", ALL),
    "saved dataset": (TEXT, lambda folder: save(folder, splits=False), "saved", ALL),
    "saved splits": (TEXT, lambda folder: save(folder, splits=True), "saved", (30, 0, 3)),
    "gzip": (TEXT, {"a.jsonl.gz": gzip.compress(TEXTS.encode())}, "a.jsonl.gz", ALL),
    "incomplete gzip": (TEXT, {"a.jsonl.gz": gzip.compress(TEXTS.encode())[:-20]}, "a.jsonl.gz", "a.jsonl.gz"),
    "zip": (TEXT, {"a.zip": b"PK\x03\x04\0 rest"}, "a.zip", "a.zip: no files found that end with .json"),
    "capital suffix": (TEXT, {"A.JSONL": TEXTS}, "A.JSONL", ALL),
    "brackets and spaces in the name": (TEXT, {"my [own] rows (1)?.jsonl": TEXTS}, "my [own] rows (1)?.jsonl", ALL),
    "BOM": (TEXT, {"a.jsonl": b"\xef\xbb\xbf" + TEXTS.encode()}, "a.jsonl", ALL),
    "Latin-1": (TEXT, {"a.jsonl": '{"text": "a"}\n{"text": "ä"}'.encode("latin-1")}, "a.jsonl", "a.jsonl is not UTF-8"),
    "broken JSON": (TEXT, {"a.jsonl": TEXTS + '\n{"text": "a'}, "a.jsonl", "a.jsonl, line 31: JSON parse error"),
    "broken JSON list": (TEXT, {"a.json": '[{"text": "a"},\n{"text": }]'}, "a.json", "a.json, line 2: JSON parse error"),
    "JSON list without its end": (TEXT, {"a.json": json.dumps(LIST)[:-1]}, "a.json", "a.json, line 1: JSON parse error"),
    "numbers instead of objects": (TEXT, {"a.jsonl": "1\n2"}, "a.jsonl", "line 1: found 1, expected an object"),
    "empty file": (TEXT, {"a.jsonl": ""}, "a.jsonl", "it is empty"),
    "empty list": (TEXT, {"a.json": "[]"}, "a.json", "it is empty"),
    "text by lines": (TEXT, {"a.txt": "\n".join(f"Line {n}" for n in range(ROWS)) + "\n"}, "a.txt", ALL),
    "Markdown documents": (TEXT, {f"d/{n}.md": f"# Title {n}\n\nText." for n in range(ROWS)}, "d", ALL),
    "one document": (TEXT, {"a.md": "# Title\n\nText."}, "a.md", "no row"),
    "glob": (TEXT, {f"d/{n}.jsonl": lines(lambda i, n=n: text(10 * n + i), 10) for n in range(3)}, "d/*.jsonl", ALL),
    "folder with two shapes": (CHAT, {"d/a.jsonl": CHATS, "d/b.jsonl": PAIRS.replace("Question", "Q")}, "d", (54, 0, 6)),
    "folder with two formats": (TEXT, {"d/a.jsonl": TEXTS, "d/notes.txt": "notes"}, "d", ALL),
    "folder with dev": (TEXT, {"d/train.jsonl": TEXTS, "d/dev.jsonl": lines(lambda n: text(n + 50), 5)}, "d", (30, 0, 5)),
    "folder with eval": (TEXT, {"d/rows.jsonl": TEXTS, "d/eval.jsonl": lines(lambda n: text(n + 50), 5)}, "d", (30, 0, 5)),
    "folder of images": (TEXT, {"d/a.png": b"\x89PNG\r\n\x1a\n\0\0\0"}, "d", "no files found that end with .json"),
    "missing file": (TEXT, {}, "no.jsonl", "file or folder not found"),
    "two files for a stream": (
        TEXT,
        {f"d/{n}.jsonl": lines(lambda i, n=n: text(100 * n + i), 100) for n in range(2)},
        "d",
        (180, 0, 20),
        {"dataset_streaming": True},
    ),
    "three rows": (TEXT, {"a.jsonl": lines(text, 3)}, "a.jsonl", (2, 0, 1)),
    "one row": (TEXT, {"a.jsonl": lines(text, 1)}, "a.jsonl", "train on: 1 held out"),
    "equal rows": (TEXT, {"a.jsonl": lines(lambda n: text(0))}, "a.jsonl", "no row"),
    "oversampled rows": (TEXT, {"a.jsonl": lines(lambda n: text(n % 20), 100)}, "a.jsonl", (90, 0, 2)),
    "some without answer": (CHAT, {"a.jsonl": lines(lambda n: {"messages": chat(n)[: 1 + (n % 3 > 0)]})}, "a.jsonl", (18, 10, 2)),
    "first rows null": (TEXT, {"a.jsonl": lines(lambda n: {"text": f"T {n}" if n > 24 else None}, 50)}, "a.jsonl", (23, 25, 2)),
    "mixed types in a column": (TEXT, {"a.jsonl": lines(lambda n: {"text": f"Text {n}" if n % 2 else n})}, "a.jsonl", ALL),
    "question and answer": (CHAT, {"a.jsonl": lines(lambda n: {"question": "Q", "answer": "A"})}, "a.jsonl", "--column_map '{"),
    "question and answer, renamed": (
        CHAT,
        {"a.jsonl": lines(lambda n: {"question": f"Q {n}", "answer": f"A {n}"})},
        "a.jsonl",
        ALL,
        {"column_map": '{"question": "prompt", "answer": "completion"}'},
    ),
    "unknown roles": (CHAT, {"a.jsonl": CHATS.replace("assistant", "bot")}, "a.jsonl", "unknown role bot"),
}


def outcome(folder, name, mode):
    """The error message, what was counted, and the rows to train on, of a run, a preview or a rehearsal."""
    formats, _, path, _, *more = FILES[name]
    first_rows = {"run": 0, "preview": PREVIEWED_ROWS, "rehearsal": REHEARSED_ROWS}[mode]
    data = data_settings(folder / path, formats, output_dir=folder / ".out", **(more[0] if more else {}))
    data = data.with_each(first_rows=first_rows)
    if mode == "rehearsal":
        data = data.with_each(eval_rows_of_run=data.max_eval_samples, cuts_texts=True)
        data = dataclasses.replace(data, max_eval_samples=16)
    try:
        train, test = load_rows(data)
    except UserError as error:
        return str(error), {}, []
    summary = json.loads((folder / ".out/data.json").read_text())
    rows = list(train)
    counted = {key: summary[key] for key in ("skipped", "held_out", "trained_rows")}
    return "", counted | {"counts": (len(rows), summary["skipped_rows"], len(test))}, rows


@pytest.mark.parametrize("name", FILES)
def test_run_rehearsal_and_preview_agree(tmp_path, name):
    _, files, _, expected = FILES[name][:4]
    if callable(files):
        files(tmp_path)
    else:
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(content.encode() if isinstance(content, str) else content)
    run, preview, rehearsal = (outcome(tmp_path, name, mode) for mode in ("run", "preview", "rehearsal"))
    message, counted, rows = run
    if isinstance(expected, str):
        assert expected in message, message
    else:
        assert not message and counted["counts"] == expected, (message, counted)
    assert preview == run
    if not message:  # a rehearsal evaluates on 16 of the rows that a run holds out
        trained, skipped, evaluated = counted["counts"]
        assert rehearsal[1] == counted | {"counts": (trained, skipped, min(evaluated, 16))}
    assert rehearsal[0] == message and rehearsal[2] == rows
