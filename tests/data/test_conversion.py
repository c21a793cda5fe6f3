"""Every row is read and converted once, by one process; an error of a row names its file and line."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime

from harness.data import formats, loading, reading, turns
from harness.data.loading import load_rows

import datasets
import pytest
from conftest import ROOT
from runs import data_settings, write_rows
from trl import ModelConfig

ANSWER = {"role": "assistant", "content": "So."}


def conversation(number, **more):
    return {"messages": [{"role": "user", "content": f"Why {number}?"}, ANSWER | more]}


def question_of(row):
    return row["messages"][0]["content"] if "messages" in row else ""


def arguments_for(path, formats=("messages",), **settings):
    return data_settings(path, formats, **settings)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_converted_once(tmp_path, monkeypatch, kind):
    """Later starts read the result from the cache. Only the first rows tell what the format is."""
    rows = [conversation(number) for number in range(300)]
    path = tmp_path / f"rows.{kind}"
    datasets.Dataset.from_list(rows).to_parquet(str(path)) if kind == "parquet" else write_rows(path, rows)
    seen, convert = [], formats.convert
    monkeypatch.setattr(formats, "convert", lambda row, *more: seen.append(question_of(row)) or convert(row, *more))
    data = arguments_for(path)
    for _ in range(2):
        train, test = load_rows(data)
        assert len(train) + len(test) == 300
    later = [f"Why {number}?" for number in range(100, 300)]
    assert sorted(content for content in seen if content in later) == sorted(later)


COUNT = """
import json, sys
from types import SimpleNamespace
import datasets
from harness.data import formats
sys.path.insert(0, "tests/data")
import test_conversion
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
seen, convert = [], formats.convert
formats.convert = lambda row, *more: seen.append(test_conversion.question_of(row)) or convert(row, *more)
from harness.data.loading import load_rows
train, _ = load_rows(test_conversion.arguments_for(sys.argv[1]))
print(json.dumps([seen, len(train)]))
"""


def test_two_processes_convert_each_row_once(tmp_path, environment):
    path = write_rows(tmp_path / "rows.jsonl", [conversation(number) for number in range(2000)])
    command = [sys.executable, "-c", COUNT, path, tmp_path / "shared"]
    variables = environment | {"PYTHONPATH": f"{ROOT / 'recipes'}:{ROOT / 'tests'}"}
    options = {"env": variables, "cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    found = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]
    later = [f"Why {number}?" for number in range(100, 2000)]
    assert sorted(content for seen, _ in found for content in seen if content in set(later)) == sorted(later)
    assert found[0][1] == found[1][1] == 1800


@pytest.mark.parametrize("streaming", [False, True])
def test_row_that_cannot_be_converted(tmp_path, error_of, streaming, monkeypatch):
    """No row is known that the conversion fails for, so its function for calls is replaced."""
    monkeypatch.setattr(turns, "_read_call", lambda call: call + 1)
    rows = [conversation(number, **({"tool_calls": [{"name": "a"}]} if number == 45 else {})) for number in range(60)]
    data = arguments_for(write_rows(tmp_path / "rows.jsonl", rows), dataset_streaming=streaming)
    assert f"{tmp_path}/rows.jsonl, line 46: this row, or `keep`, fails: TypeError" in error_of(lambda: list(load_rows(data)[0]))
    datasets.Dataset.from_list([{"text": f"{number}"} for number in range(60)]).to_parquet(str(tmp_path / "rows.parquet"))
    data = arguments_for(tmp_path / "rows.parquet", ("text",), dataset_streaming=streaming)
    message = error_of(lambda: load_rows(data, keep=lambda row: 1 / (int(row["text"]) - 45)))
    assert f"{tmp_path}/rows.parquet" in message and "ZeroDivisionError" in message
    assert "row 46 of train" in message


@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_are_exact(tmp_path, streaming):
    """Also integers of more than 64 bits, and the last digit of a float."""
    numbers = {"wei": 25 * 10**18, "more": 2**256 - 1, "ratio": 0.1234567890123456789, "small": 5e-324}
    call = {"type": "function", "function": {"name": "send", "arguments": numbers}}
    rows = [conversation(number, tool_calls=[call]) for number in range(30)]
    data = arguments_for(write_rows(tmp_path / "rows.jsonl", rows), dataset_streaming=streaming)
    for row in itertools.chain(*load_rows(data)):
        assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == numbers


@pytest.mark.parametrize("is_json", [False, True])
def test_turns_with_other_values_in_parquet_files(tmp_path, is_json):
    """Dates become texts: JSON has none. Columns of JSON are what `datasets` writes turns with different keys as."""
    calls = [{"name": "a", "arguments": {"at": 0.1}}]
    rows = [conversation(number, **({"tool_calls": calls} if is_json else {"at": datetime(2026, 1, 2)})) for number in range(20)]
    features = datasets.Features({"messages": datasets.List(datasets.Json())}) if is_json else None
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    turn = load_rows(arguments_for(tmp_path / "rows.parquet"))[0][0]["messages"][1]
    assert turn["tool_calls"][0]["function"] == calls[0] if is_json else turn["at"] == "2026-01-02 00:00:00"


@pytest.mark.parametrize("is_mixture", [False, True])
def test_what_the_chat_template_needs(tmp_path, is_mixture):
    """Arguments of calls as JSON; and if it prints the date, rows of another day are not those whose tokens are in the cache."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    names = [
        write_rows(tmp_path / f"{name}.jsonl", [conversation(number, tool_calls=[call]) for number in range(9)]) for name in "ab"
    ]
    data = arguments_for(names, dataset_weights=[1, 1]) if is_mixture else arguments_for(names[0])
    found = set()
    for date in ("", "Monday", "Tuesday", "Tuesday"):
        data = replace(data, template_date=date, has_text_arguments=bool(date))
        train, test = load_rows(data)
        for rows in (train, test):
            arguments = rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
            assert arguments == ('{"at": 1}' if date else {"at": 1})
            found.add(rows._fingerprint)
    assert len(found) == 3 * 2


def test_marks_that_would_be_dropped(tmp_path, error_of):
    """In rows of a stream, which were not checked before the run."""
    rows = [{"messages": conversation(number)["messages"] * 2} for number in range(60)]
    rows[45]["messages"] = [rows[45]["messages"][0], ANSWER | {"train": False}, *rows[45]["messages"][2:]]
    data = arguments_for(write_rows(tmp_path / "rows.jsonl", rows), dataset_streaming=True)
    assert len(list(load_rows(data)[0])) > 50
    assert "marks are dropped" in error_of(lambda: list(load_rows(replace(data, drops_marks="marks are dropped"))[0]))


def test_every_kind_of_conversation_is_checked_when_all_rows_are_there(tmp_path, error_of, monkeypatch):
    """Before the run only the first rows of a large dataset are; one of each part is, also of more kinds than that."""
    monkeypatch.setattr(reading, "SMALL", 0)
    monkeypatch.setattr(loading, "MOST_KINDS", 2)
    rows = [{"messages": conversation(number)["messages"] * (number // 20 + 1)} for number in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    checked = []
    monkeypatch.setattr(loading, "check_conversations", lambda rows, *arguments: checked.extend(rows))
    load_rows(arguments_for(path), None, None, ModelConfig("a model"))
    assert [place for place, _ in checked] == [f"{path}, line {line}" for line in (1, 21)]
