"""A data set in the shapes people have: opened, held out of, turned into rows; what cannot be is one line."""

import ast
import json

from harness import shapes
from harness.data import DataArguments
from harness.run import stream_state

import datasets
import pytest
from conftest import RECIPES

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
SHARE = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
PART, TWICE = {"type": "text", "text": "Why?"}, {"role": "user", "content": "Why?Why?"}
TASK = {"instruction": "Add.", "input": "1 2", "output": "3"}


def opened(name, takes=(), given=(), **settings) -> DataArguments:
    data = DataArguments(dataset_name=str(name), **settings)
    data.takes, data.given, data.named = takes, frozenset(given), str(name)
    return data


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def texts(count, start=0):
    return [{"text": f"text {index}", "id": index} for index in range(start, start + count)]


@pytest.mark.parametrize(
    ("row", "shape", "expected"),
    [
        ({"text": "a", "id": 1}, "text", {"text": "a"}),
        ({"text": None}, "text", None),
        ({"messages": CHAT, "id": 1}, "messages", {"messages": CHAT}),
        ({"messages": CHAT[:1]}, "messages", None),  # nobody answers
        ({"conversations": SHARE}, "messages", {"messages": [{"role": "system", "content": "Be brief."}, *CHAT]}),
        ({"conversations": CHAT}, "messages", {"messages": CHAT}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "messages", {"prompt": CHAT[:1], "completion": CHAT[1:]}),
        ({"prompt": "Why?", "completion": "So.", "messages": None}, "messages", {"messages": CHAT}),
        ({"prompt": "Why?", "messages": CHAT, "tools": [1]}, "messages", {"messages": CHAT, "tools": [1]}),
        ({"prompt": "Why?"}, "messages", None),
        ({"messages": [{"role": "User", "content": "Why?"}, {"role": "GPT", "content": "So."}]}, "messages", {"messages": CHAT}),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "messages", None),
        ({"messages": [CHAT[0], CALL, *CHAT]}, "messages", {"messages": [CHAT[0], CALL | {"content": ""}, *CHAT]}),
        ({"messages": [{"role": "user", "content": [PART, PART]}, CHAT[1]]}, "messages", {"messages": [TWICE, CHAT[1]]}),
        ({"messages": [{"role": "user", "content": [PART, {"image": 1}]}, CHAT[1]]}, "messages", None),
        (TASK, "messages", {"messages": [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]}),
        (TASK | {"prompt": "All of it"}, "instruction", TASK),
        (TASK | {"input": None}, "instruction", TASK | {"input": ""}),
        (TASK | {"output": " "}, "instruction", None),
        ({"prompt": "a", "completion": "b", "text": "c"}, "prompt", {"prompt": "a", "completion": "b"}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "prompt", None),
    ],
)
def test_rows_in_the_shapes_people_have(row, shape, expected):
    assert shapes.convert(json.loads(json.dumps(row)), shape, "text") == expected


def test_what_is_wrong_with_rows_of_the_right_columns(tmp_path, says):
    silent = write(
        tmp_path / "silent.jsonl", [{"messages": [{"role": "user", "content": "Why?"}, {"role": "bot", "content": "So."}]}]
    )
    message = says(opened(silent, ("messages",)).check)
    assert "columns messages, but in its first 1 rows no text or answer" in message and "roles bot, user" in message
    numbers = write(tmp_path / "numbers.jsonl", [{"prompt": "Why?", "completion": 5}])
    assert "but in its first 1 rows no text or answer" in says(opened(numbers, ("prompt",)).check)
    assert "has the columns prompt, completion; this" in says(opened(numbers, ("text",)).check)


@pytest.mark.parametrize("streaming", [False, True])
def test_nothing_is_left_to_train_on(tmp_path, capsys, streaming):
    same = write(tmp_path / "same.jsonl", [{"text": "again"}] * 40)
    with pytest.raises(SystemExit) as ended:
        opened(same, ("text",), dataset_streaming=streaming).load()
    assert ended.value.code == 2 and "error: no row of" in capsys.readouterr().err


@pytest.mark.parametrize("streaming", [False, True])
def test_max_samples_counts_rows_that_train(tmp_path, streaming):
    rows = [{"text": f"text {index}" if index % 4 == 0 else None} for index in range(400)]
    data = opened(
        write(tmp_path / "rows.jsonl", rows), ("text",), dataset_streaming=streaming, max_samples=40, max_eval_samples=2
    )
    train, _ = data.load()
    assert len(list(train)) == 40


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "txt"])
def test_one_file(tmp_path, capsys, ending, streaming):
    rows = datasets.Dataset.from_list([{"text": f"text {index}"} for index in range(40)])
    path = tmp_path / f"my [own] file.{ending}"
    if ending == "txt":
        path.write_text("\n".join(rows["text"]))
    else:
        getattr(rows, f"to_{ending.removesuffix('l')}")(str(path))
    data = opened(path, ("text",), dataset_streaming=streaming, max_eval_samples=3)
    data.check()
    train, test = data.load()
    assert {row["text"] for row in train} | set(test["text"]) == set(rows["text"]) and len(test) == 3
    assert len(list(train)) == 37
    assert "3 rows of train are held out for evaluation" in capsys.readouterr().out


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_rows_are_never_trained_on(tmp_path, streaming):
    """Nor are rows that say the same; at most a tenth is held out; other processes hold out the same rows."""
    write(tmp_path / "d/train.jsonl", [*texts(50), *texts(50)])
    data = opened(tmp_path / "d", ("text",), dataset_streaming=streaming)
    train, test = data.load()
    assert 5 <= len(test) <= 10 and not {row["text"] for row in train} & set(test["text"])
    assert {row["text"] for row in train} | set(test["text"]) == {row["text"] for row in texts(50)}
    assert opened(tmp_path / "d", ("text",), dataset_streaming=streaming).load()[1][:] == test[:]


def test_a_split_for_evaluation_is_used(tmp_path, capsys):
    write(tmp_path / "d/train.jsonl", texts(20))
    write(tmp_path / "d/test.jsonl", texts(20, start=100))
    train, test = opened(tmp_path / "d", ("text",), max_eval_samples=5, max_samples=7).load()
    assert test["text"] == [f"text {index}" for index in range(100, 105)] and len(train) == 7
    assert not capsys.readouterr().out


def test_a_stream_is_shuffled_and_goes_on_exactly(tmp_path):
    """Files in turn, rows in a buffer; what is evaluated comes from the end of the last file."""
    stream_state.complete()
    for file in range(6):
        rows = datasets.Dataset.from_list(texts(100, start=100 * file))
        (tmp_path / "d").mkdir(exist_ok=True)
        rows.to_parquet(str(tmp_path / f"d/{file}.parquet"), batch_size=50)

    def load(seed):
        data = opened(tmp_path / "d", ("text",), dataset_streaming=True, max_eval_samples=20)
        data.seed = seed
        return data.load()

    train, test = load(0)
    assert test["text"] == [f"text {index}" for index in range(550, 570)]
    order = [int(row["text"].split()[1]) for row in train]
    assert sorted(order) == [*range(550), *range(570, 600)]
    assert len({number // 100 for number in order[:20]}) >= 3 and order != sorted(order)
    assert [row["text"] for row in load(1)[0]] != [f"text {number}" for number in order]
    rows = iter(train)
    for _ in range(123):
        next(rows)
    again, _ = load(0)
    again.load_state_dict(train.state_dict())
    assert [row["text"] for row in again] == [f"text {number}" for number in order[123:]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["takes texts", "columns instruction, input, output", "--dataset_text_field"]),
        ({"takes": ("messages", "prompt")}, ["columns text, id", "`messages` of role and content"]),
        ({"dataset_train_split": "trian"}, ["has the split train, none called trian", "--dataset_train_split"]),
        ({"dataset_test_split": "tset", "given": ["dataset_test_split"]}, ["none called tset"]),
        ({"dataset_test_split": "train"}, ["another --dataset_test_split"]),
        ({"dataset_config": "fr"}, ["fr"]),
        ({"max_samples": 0}, ["--max_samples is 0"]),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, says, settings, words):
    write(tmp_path / "d/train.jsonl", texts(1) if "takes" in settings else [TASK])
    (tmp_path / "d/README.md").write_text("---\nconfigs:\n- {config_name: de, data_files: train.jsonl}\n---\n")
    message = says(opened(tmp_path / "d", **{"takes": ("text",)} | settings).check)
    assert str(tmp_path / "d") in message or "max_samples" in settings or "another" in words[0]
    for word in words:
        assert word in message


def test_files_that_are_not_there_or_not_readable(tmp_path, says):
    assert "there is no file or folder ./my.jsonl" in says(opened("./my.jsonl").check)
    assert "there is no file or folder my.jsonl" in says(opened("my.jsonl").check)
    (tmp_path / "bad.jsonl").write_text('{"text": \n]')
    assert f"data set {tmp_path}/bad.jsonl: " in says(opened(tmp_path / "bad.jsonl").check)
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in says(opened(tmp_path / "empty.jsonl").check)
    assert "is one file" in says(opened(write(tmp_path / "a.jsonl", [TASK]), dataset_config="de").check)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_which_rows_it_takes(recipe):
    tree = ast.parse(recipe.read_text())
    (call,) = (node for node in ast.walk(tree) if getattr(getattr(node, "func", None), "id", "") == "parse")
    takes = next(ast.literal_eval(argument.value) for argument in call.keywords if argument.arg == "takes")
    said = " ".join(ast.get_docstring(tree).split())
    columns = {
        "text": "`text`",
        "messages": "`messages` of role and content, or ShareGPT's `conversations`), `prompt` and `completion`, or `instruction`",
        "prompt": "`prompt` and `completion`",
        "instruction": "`instruction`, `input` and `output`",
    }
    for shape in [takes] if isinstance(takes, str) else takes:
        assert columns[shape] in said
