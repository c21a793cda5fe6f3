"""Several datasets in one run: shares by weight, evaluation rows of their own, the same rows when it resumes."""

import itertools
import json

from harness.data import loading
from harness.data.loading import load_rows
from harness.data.stream_rows import rows_of_cycle
from harness.folder import DATA, read_json

import pytest
from runs import data_settings, write_rows


def write(path, rows):
    return str(write_rows(path, rows))


def texts(name, count):
    return [{"text": f"{name} {index}"} for index in range(count)]


def arguments_of(names, weights, formats=("text",), **settings):
    return data_settings(names, formats, dataset_weights=weights, **settings)


@pytest.fixture
def names(tmp_path):
    """Three files of 30, 200 and 200 texts; of each a tenth is held out."""
    return [write(tmp_path / f"{name}.jsonl", texts(name, count)) for name, count in (("a", 30), ("b", 200), ("c", 200))]


def sources_of(rows):
    return [row["text"].split()[0] for row in rows]


def test_shares_in_memory(names, tmp_path):
    """An epoch ends with the dataset that is read first; its rows are all there, once."""
    train, evaluated = load_rows(arguments_of(names, [6, 3, 1], output_dir=tmp_path / "run"))
    found = sources_of(train)
    assert [found.count(name) for name in "abc"] == [27, 14, 4] and len({row["text"] for row in train}) == 45
    assert found != sorted(found)
    held_out = sources_of(evaluated)
    assert [held_out.count(name) for name in "abc"] == [3, 20, 20] and held_out[:3] == ["a", "b", "c"]
    assert len(set(evaluated["text"])) == 43 and not {row["text"] for row in train} & set(evaluated["text"])
    assert list(load_rows(arguments_of(names, [6, 3, 1]))[0]) == list(train)
    data = read_json(tmp_path / "run" / DATA)
    assert (data["rows"], data["held_out"]) == (430, 43)


def test_small_datasets_are_repeated(names):
    train, _ = load_rows(arguments_of(names, [6, 3, 1], max_samples=100))
    counts = [sum(row["text"] == text for row in train) for text in {row["text"] for row in train} if text.startswith("a")]
    assert len(train) == 100 and len(counts) == 27 and set(counts) == {2, 3}  # 60 rows of 27


def test_rows_held_out_of_one_are_not_in_another(names, tmp_path):
    """b.jsonl again in another order, so that other rows of it are held out: those of either are trained on from neither."""
    copy = write(tmp_path / "copy.jsonl", texts("b", 200)[::-1])
    train, evaluated = load_rows(arguments_of([names[1], copy], [1, 1], max_samples=1000))
    held_out = set(evaluated["text"])
    assert len(held_out) > 20 and not held_out & {row["text"] for row in train}


@pytest.mark.parametrize("streaming", [False, True])
def test_each_in_its_own_shape(tmp_path, streaming):
    """Conversations, ShareGPT's with tools, and prompts with completions become rows with the same columns."""
    chats = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "So."}]} for i in range(20)]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    share_gpt = [[{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": "Yes."}] for i in range(20)]
    chat = write(tmp_path / "chat.jsonl", chats)
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": f"{i}?", "completion": "So."} for i in range(20)])
    called = write(tmp_path / "tools.json", [{"conversations": turns, "tools": json.dumps(tools)} for turns in share_gpt])
    train, evaluated = load_rows(arguments_of([chat, pairs], [1, 1], ("messages",), dataset_streaming=streaming))
    for row in itertools.islice(train, 20):
        assert row.keys() == {"messages"} and row["messages"][-1]["role"] == "assistant"
    assert evaluated.column_names == ["messages"] and len(evaluated) == 4
    train, _ = load_rows(arguments_of([chat, called], [1, 1], ("messages",), dataset_streaming=streaming))
    assert {json.dumps(row["tools"]) for row in itertools.islice(train, 20)} == {"null", json.dumps(tools)}


def open_stream(names):
    stream, _ = load_rows(arguments_of(names, [6, 3, 1], dataset_streaming=True))
    return stream


def test_shares_of_a_stream(names):
    """The shares hold for any number of rows, and a dataset that ends starts again, all its rows equally often."""
    found = sources_of(itertools.islice(open_stream(names), 200))
    for rows in (10, 50, 200):
        for name, weight in zip("abc", (0.6, 0.3, 0.1), strict=True):
            assert abs(found[:rows].count(name) - weight * rows) <= 2
    rows = [row["text"] for row in itertools.islice(open_stream(names), 90)]
    assert len({row for row in rows if row.startswith("a")}) == 27


def test_stream_in_parts(names, tmp_path):
    """A folder of four files beside one file: four parts. No two parts share a row, and they begin with different sources."""
    (tmp_path / "many").mkdir()
    for file in range(4):
        write(tmp_path / f"many/{file}.jsonl", texts(f"many{file}", 20))
    stream, _ = load_rows(arguments_of([str(tmp_path / "many"), names[1]], [1, 1], dataset_streaming=True))
    assert stream.num_shards == 4
    parts = [list(itertools.islice(stream.shard(4, part), 30)) for part in range(4)]
    for first, second in itertools.combinations(parts, 2):
        assert not {row["text"] for row in first} & {row["text"] for row in second}
    assert len({"".join(source[0] for source in sources_of(part[:6])) for part in parts}) > 1


def test_parts_of_one_process_resume_at_any_row(names, tmp_path):
    """A process that reads several parts in turn, of a folder and of one file, of which every part reads some rows."""
    for file in range(4):
        (tmp_path / "many").mkdir(exist_ok=True)
        write(tmp_path / f"many/{file}.jsonl", texts(f"many{file}", 20))

    def open_parts():
        stream, _ = load_rows(arguments_of([str(tmp_path / "many"), names[1]], [2, 1], dataset_streaming=True))
        return [stream.shard(2, part) for part in range(2)]

    parts, rows, positions = open_parts(), [], []
    for pair in itertools.islice(zip(*parts, strict=True), 40):
        rows.append(pair)
        positions.append([json.dumps(part.state_dict()) for part in parts])
    for number in range(0, 30, 7):
        again = open_parts()
        for part, position in zip(again, positions[number], strict=True):
            part.load_state_dict(json.loads(position))
        assert list(itertools.islice(zip(*again, strict=True), 9)) == rows[number + 1 : number + 10], number


def test_bad_mixtures(names, error_of, tmp_path):
    assert "--dataset_weights 1 1" in error_of(arguments_of, ["some/rows", names[0]], None)
    for weights in ([1, 2], [1, 2, -1], [1, 2, float("nan")]):
        assert "--dataset_weights" in error_of(arguments_of, names, weights)
    assert "--dataset_config" in error_of(arguments_of, names, [1, 2, 3], dataset_config=["x", "y"])
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
    chat = write(tmp_path / "chat.jsonl", [{"messages": turns}] * 3)
    assert chat in error_of(load_rows, arguments_of([names[0], chat], [1, 1], ("text", "messages")))
    missing = str(tmp_path / "missing.jsonl")
    assert missing in error_of(load_rows, arguments_of([names[0], missing], [1, 1]))
    assert "--dataset_weights" in error_of(load_rows, arguments_of(names, [1000, 1, 1]))  # no row of two of them


def test_rows_of_cycle():
    for weights, rows in (
        ([0.6, 0.3, 0.1], [6, 3, 1]),
        ([0.5, 0.5], [1, 1]),
        ([2 / 3, 1 / 3], [2, 1]),
        ([0.668, 0.2, 0.1, 0.032], [146, 44, 22, 7]),
        ([0.9999, 0.0001], [1000, 1]),  # a row in a thousand at least
    ):
        assert rows_of_cycle(weights) == rows


def test_shares_of_few_rows():
    data = arguments_of(["a/a", "b/b"], [1, 1])
    assert loading.share(data, [1, 100]) == [1, 1]
    names = ["a/a", "b/b", "c/c", "d/d"]
    for count in (4, 10, 11, 17):  # exactly as many as asked for
        assert sum(loading.share(arguments_of(names, [1, 1, 1, 1], max_samples=count), [50] * 4)) == count
        assert sum(loading.share(arguments_of(names[:3], [5, 3, 3], max_samples=count), [50] * 3)) == count
    sizes = [27, 500, 90, 33]
    for weights in ([7, 3, 3, 1], [0.668, 0.2, 0.1, 0.032], [1, 1, 1, 1]):  # what is read first is read once
        counts = loading.share(arguments_of(names, weights), sizes)
        assert any(map(int.__eq__, counts, sizes)) and all(map(int.__le__, counts, sizes)), counts


def test_flags_for_some_of_the_datasets(names, tmp_path, error_of):
    """--column_map and --text_rows are for the datasets with these columns or texts; one of them must have some."""
    questions = write(tmp_path / "questions.jsonl", [{"question": f"q {index}"} for index in range(20)])
    (tmp_path / "lines.txt").write_text("\n".join(f"line {index}" for index in range(20)))
    several = [names[0], questions, str(tmp_path / "lines.txt")]
    data = arguments_of(several, [1, 1, 1], column_map={"question": "text"}, text_rows="line")
    assert set(sources_of(load_rows(data)[0])) == {"a", "q", "line"}
    assert "answer" in error_of(load_rows, arguments_of(several, [1, 1, 1], column_map={"question": "text", "answer": "text"}))
