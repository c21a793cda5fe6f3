"""Datasets of every kind are opened, split and converted; a dataset that cannot be used is an error with what to do."""

import socket
from dataclasses import replace

from harness.data import loading, reading
from harness.data.loading import load_rows
from harness.start.arguments import ScriptArguments, settings_of_data

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from runs import data_settings, write_rows
from trl import KTOConfig

TASK = {"instruction": "Add.", "input": "1 2", "output": "3"}
QUESTION = {"role": "user", "content": "Why?"}


def check(name, *formats, **settings):
    return load_rows(data_settings(name, *formats, **settings))


def texts(count, start=0):
    return [{"text": f"text {index}", "id": index} for index in range(start, start + count)]


@pytest.mark.parametrize("streaming", [False, True])
def test_hidden_files_and_empty_shards_are_skipped(tmp_path, streaming):
    """As `datasets` skips what editors, git and archives leave in a folder."""
    folder = tmp_path / "rows"
    for number, (start, count) in enumerate([(0, 20), (20, 0), (20, 20)]):
        table = pyarrow.table({"text": pyarrow.array([row["text"] for row in texts(count, start)], pyarrow.string())})
        for place in (folder, folder / ".ipynb_checkpoints", folder / "__MACOSX", folder / "more/.git"):
            place.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(table, place / f"{number}.parquet")
    train, held_out = load_rows(data_settings(folder, ("text",), dataset_streaming=streaming, max_eval_samples=2))
    assert sorted(row["text"] for rows in (train, held_out) for row in rows) == sorted(row["text"] for row in texts(40))


@pytest.mark.parametrize("streaming", [False, True])
def test_max_samples_counts_rows_that_are_trained_on(tmp_path, streaming):
    rows = [{"text": f"text {index}" if index % 4 == 0 else None} for index in range(400)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    train, _ = load_rows(data_settings(path, ("text",), dataset_streaming=streaming, max_samples=40, max_eval_samples=2))
    assert len(list(train)) == 40


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_held_out_rows_of_a_recipe_without_formats(tmp_path, kind, streaming):
    """Its rows stay as they are. `Dataset.map` passes rows that are no dicts."""
    rows = datasets.Dataset.from_list([{"question": f"text {index}", "number": index} for index in range(50)])
    rows.to_json(str(tmp_path / "rows.jsonl")) if kind == "jsonl" else rows.to_parquet(str(tmp_path / "rows.parquet"))
    train, test = load_rows(data_settings(tmp_path / f"rows.{kind}", (), dataset_streaming=streaming, max_eval_samples=4))
    assert len(test) == 4 and len(list(train)) == 46
    assert not {row["question"] for row in train} & set(test["question"])


@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_in_json_of_a_recipe_without_formats(tmp_path, monkeypatch, streaming):
    """`datasets` reads them with pandas, which wraps integers and rounds floats."""
    for module in (datasets.features.features, datasets.utils.json):  # as they are at the start of a process
        monkeypatch.setattr(module, "ujson_dumps", pandas.io.json.ujson_dumps)
        monkeypatch.setattr(module, "ujson_loads", pandas.io.json.ujson_loads)
    numbers = [25 * 10**18, 0.12345678901234568]
    path = write_rows(tmp_path / "rows.jsonl", [{"numbers": [*numbers, row]} for row in range(40)])
    train, _ = load_rows(data_settings(path, (), dataset_streaming=streaming, max_eval_samples=4))
    assert all(row["numbers"][:2] == numbers for row in train)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_other_types_in_other_files(tmp_path, error_of, streaming):
    """They get a type that all values fit. If there is none, the column is named."""

    def write(path, rows):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    rows = [
        {"text": "a", "number": 1, "empty": None, "object": {"x": 1}, "list": [1], "objects": [{"x": None}]},
        {"text": "b", "number": 2.5, "empty": "b", "object": {"y": "b"}, "list": [0.5], "objects": [{"x": {"z": 1}}]},
    ]
    for row in rows:
        write(tmp_path / f"{row['text']}.parquet", [row])
    found = list(reading.open_splits(str(tmp_path), None, streaming)["train"])
    objects = [{name: value for name, value in row["object"].items() if value is not None} for row in found]
    assert [row | {"object": value} for row, value in zip(found, objects, strict=True)] == rows
    assert all(isinstance(value, float) for row in found for value in (row["number"], *row["list"])) or streaming
    write(tmp_path / "c.parquet", [{"text": "c", "number": "3"}])
    assert "number" in error_of(reading.open_splits, str(tmp_path), None, streaming)


def test_absolute_names(tmp_path, monkeypatch):
    """Of what a run records: it is read in another working directory too."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(tmp_path / name, texts(2))
    named = {"a.jsonl": "/a.jsonl", ".": "", "*.jsonl": "/*.jsonl"}
    assert {name: reading.absolute_name(name) for name in named} == {name: f"{tmp_path}{end}" for name, end in named.items()}
    assert reading.absolute_name("trl-lib/Capybara") == "trl-lib/Capybara"


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_rows_are_never_trained_on(tmp_path, streaming):
    """Nor are equal rows. At most a tenth is held out, and every process holds out the same rows."""
    write_rows(tmp_path / "d/train.jsonl", [*texts(50), *texts(50)])
    train, test = load_rows(data_settings(tmp_path / "d", ("text",), dataset_streaming=streaming))
    assert 5 <= len(test) <= 10 and not {row["text"] for row in train} & set(test["text"])
    assert {row["text"] for row in train} | set(test["text"]) == {row["text"] for row in texts(50)}
    assert load_rows(data_settings(tmp_path / "d", ("text",), dataset_streaming=streaming))[1][:] == test[:]


@pytest.mark.parametrize("streaming", [False, True])
def test_keep_drops_rows(tmp_path, streaming):
    """Before rows are counted or held out."""
    write_rows(tmp_path / "d/train.jsonl", texts(40))
    data = data_settings(tmp_path / "d", ("text",), dataset_streaming=streaming, max_samples=10)
    train, test = load_rows(data, keep=lambda row: row["id"] % 2 == 0)
    numbers = [int(row["text"].split()[1]) for row in (*train, *test)]
    assert len(list(train)) == 10 and len(test) == 2 and all(number % 2 == 0 for number in numbers)


def test_split_for_evaluation_is_used(tmp_path, monkeypatch):
    write_rows(tmp_path / "d/train.jsonl", texts(20))
    write_rows(tmp_path / "d/test.jsonl", [{"text": ""}] * 3 + texts(20, start=100))
    monkeypatch.setattr(loading, "MOST_SKIPPED", 3)
    train, test = load_rows(data_settings(tmp_path / "d", ("text",), max_eval_samples=5, max_samples=7))
    assert test["text"] == [f"text {index}" for index in range(100, 105)] and len(train) == 7


def test_samples_of_a_stream_are_kept_for_several_epochs(tmp_path, capsys):
    """The same rows for every process, no longer a stream."""
    path = write_rows(tmp_path / "rows.jsonl", texts(400))
    settings = {"dataset_streaming": True, "max_samples": 30, "max_eval_samples": 4}
    stream, _ = load_rows(data_settings(path, ("text",), **settings))
    train, test = load_rows(data_settings(path, ("text",), max_steps=-1, **settings))
    assert isinstance(stream, datasets.IterableDataset) and isinstance(train, datasets.Dataset)
    assert train["text"] == [row["text"] for row in stream] and len(set(train["text"])) == 30 and len(test) == 4
    assert "30 rows of the stream are kept in memory" in capsys.readouterr().out


def test_rows_of_a_trainer_that_reads_them_in_order(tmp_path):
    """KTO's, which would train on all good rows first if the file has them first. The same order for every process and start."""
    path = write_rows(tmp_path / "rows.jsonl", texts(40))
    data = settings_of_data(
        ScriptArguments(dataset_name=str(path)), KTOConfig(str(tmp_path), use_cpu=True, bf16=False), ("text",)
    )
    rows = load_rows(data)[0]["text"]
    assert rows != sorted(rows, key=lambda text: int(text.split()[1])) and len(set(rows)) == 36
    assert rows == load_rows(data)[0]["text"] != load_rows(replace(data, seed=data.seed + 1))[0]["text"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("format", ["messages", "prompt_completion"])
def test_bad_answers_of_kto_are_refused(tmp_path, error_of, format, streaming):
    """Unless the recipe leaves them out, or all are good, or the column is another one."""
    rows = [{"prompt": f"Why {row}?", "completion": "So.", "label": row % 3 > 0} for row in range(30)]

    def arguments(rows):
        return data_settings(write_rows(tmp_path / "rows.jsonl", rows), (format,), dataset_streaming=streaming)

    assert "`label` is false" in error_of(load_rows, arguments(rows))
    train, test = load_rows(arguments(rows), keep=lambda row: row["label"])
    assert len(list(train)) + len(test) == 20
    for label in (True, 0, "bad"):
        train, test = load_rows(arguments([row | {"label": label} for row in rows]))
        assert len(list(train)) + len(test) == 30


def test_stream_is_shuffled_and_resumes_exactly(tmp_path):
    """Rows come from several files in turn and through a buffer; evaluation rows come from the end of the last file."""
    for file in range(6):
        rows = datasets.Dataset.from_list(texts(100, start=100 * file))
        (tmp_path / "d").mkdir(exist_ok=True)
        rows.to_parquet(str(tmp_path / f"d/{file}.parquet"), batch_size=50)

    def load_with_seed(seed):
        return load_rows(data_settings(tmp_path / "d", ("text",), dataset_streaming=True, max_eval_samples=20, seed=seed))

    train, test = load_with_seed(0)
    assert test["text"] == [f"text {index}" for index in range(550, 570)]
    order = [int(row["text"].split()[1]) for row in train]
    assert sorted(order) == [*range(550), *range(570, 600)]
    assert len({number // 100 for number in order[:20]}) >= 3 and order != sorted(order)
    assert [row["text"] for row in load_with_seed(1)[0]] != [f"text {number}" for number in order]
    rows = iter(train)
    for _ in range(123):
        next(rows)
    again, _ = load_with_seed(0)
    again.load_state_dict(train.state_dict())
    assert [row["text"] for row in again] == [f"text {number}" for number in order[123:]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["columns instruction, input, output", "--dataset_text_field"]),
        ({"formats": ("messages", "prompt_completion")}, ["columns text, id", "`messages`"]),
        ({"dataset_train_split": "trian"}, ["--dataset_train_split trian", "has the splits train"]),
        ({"dataset_test_split": "tset", "given": ["dataset_test_split"]}, ["--dataset_test_split tset", "has the splits train"]),
        ({"dataset_test_split": "train"}, ["--dataset_test_split train"]),
        ({"dataset_config": "fr"}, ["fr"]),
        ({"dataset_train_split": "train[:5%]"}, ["--dataset_train_split train[:5%]"]),
    ],
)
def test_error_names_dataset_and_problem(tmp_path, error_of, settings, words):
    write_rows(tmp_path / "d/train.jsonl", texts(1) if "formats" in settings else [TASK] * 20)
    (tmp_path / "d/README.md").write_text("---\nconfigs:\n- {config_name: de, data_files: train.jsonl}\n---\n")
    message = error_of(check, tmp_path / "d", **{"formats": ("text",)} | settings)
    assert all(word in message for word in (str(tmp_path / "d"), *words))


def test_unknown_format_of_a_recipe(error_of):
    message = error_of(data_settings, "rows.jsonl", ("text", "preferences"))
    assert "dataset_formats" in message and "'preferences'" in message


def test_which_files_and_splits_are_read_is_printed(tmp_path, capsys):
    """Files of another format or compression are named, because they are not read."""
    for name, count in (("a", 30), ("b", 12), ("my_test", 5)):
        write_rows(tmp_path / f"{name}.jsonl", texts(count))
    data = data_settings(tmp_path, ("text",))
    load_rows(data)
    assert "ignoring" not in capsys.readouterr().out
    for name in ("c.jsonl.bz2", "d.csv"):
        (tmp_path / name).write_bytes(b"BZh9")
    load_rows(data)
    printed = capsys.readouterr().out
    assert "ignoring c.jsonl.bz2, d.csv: " in printed
    assert "42 of 42 rows are trained on; split test is for evaluation" in printed


def test_column_map(tmp_path, error_of):
    path = write_rows(tmp_path / "rows.jsonl", [{"question": f"Why {row}?", "answer": "So.", "id": row} for row in range(20)])
    mapping = '{"question": "prompt", "answer": "completion"}'
    assert "--column_map" in error_of(check, path, ("messages",))
    train, _ = load_rows(data_settings(path, ("messages",), column_map=mapping))
    assert train[0]["messages"][1] == {"role": "assistant", "content": "So."}
    for mapping, words in (('{"no": "prompt"}', "but no no (--col"), ('{"question": "promt"}', "columns answer, id, promt")):
        assert words in error_of(check, path, ("messages",), column_map=mapping)


@pytest.mark.parametrize("streaming", [False, True])
def test_nulls_and_keys_of_other_rows(tmp_path, streaming):
    """Tools that have other keys do not get those of the others as null."""
    turns = [QUESTION, {"role": "assistant", "content": "So."}]
    rows = [{"messages": turns, "tools": [{"name": f"f{row}", f"key{row}": None}]} for row in range(20)]
    train, test = load_rows(data_settings(write_rows(tmp_path / "rows.jsonl", rows), ("messages",), dataset_streaming=streaming))
    assert all(len(row["tools"][0]["function"]) == 2 for row in (*train, *test))


def test_keep_sees_rows_with_a_text_only(tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": None if row % 2 else "a" * row} for row in range(40)])
    data = data_settings(path, ("text",), output_dir=str(tmp_path / "run"))
    train, test = load_rows(data, keep=lambda row: len(row["text"]) > 20)
    assert len(train) + len(test) == 9
    assert "21 without a text in the column text (the first is row 1), 10 left out by the recipe" in capsys.readouterr().out


def test_folder_with_configs(tmp_path, error_of):
    """As README.md says; a folder of the same name with other rows is another dataset."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        folder = tmp_path / place / "d"
        write_rows(folder / "rows.jsonl", [{"text": f"{place} {row}"} for row in range(20)])
        write_rows(folder / "held [1].jsonl", [{"text": "held"}])
        files = "[{split: train, path: rows.jsonl}, {split: test, path: 'held*'}]"
        configs = f"- {{config_name: de, data_files: {files}}}\n- {{config_name: en, data_files: rows.jsonl}}"
        (folder / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
        train, test = load_rows(data_settings(folder, ("text",), dataset_config="de"))
        assert set(train["text"]) == {f"{place} {row}" for row in range(20)} and test["text"] == ["held"]
    assert "'de', 'en'" in error_of(check, folder, ("text",))


@pytest.mark.parametrize(
    "configs",
    [
        *("[a, b]", "[{data_files: 5}]", "[{config_name: a, data_files: nothing.jsonl}]"),
        *("[{config_name: a, data_files: /etc/*.txt}]", "[{config_name: a, data_files: ../*.jsonl}]"),
        "[{config_name: a, data_dir: ../other}]",
    ],
)
def test_configs_of_a_readme_that_are_wrong(tmp_path, error_of, configs):
    """Or name files outside of the folder."""
    for name in ("data/a.jsonl", "out.jsonl", "other/b.jsonl"):
        write_rows(tmp_path / name, texts(1))
    (tmp_path / "data/README.md").write_text(f"---\nlicense: mit\nconfigs: {configs}\n---\n")
    assert str(tmp_path / "data") in error_of(reading.open_splits, str(tmp_path / "data"), None, False)


@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "stream"])
def test_urls_of_images_are_not_requested(tmp_path, streaming):
    """A recipe for texts needs no images; the files may be of somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
        features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image(), "images": [datasets.Image()]})
        row = {"text": "a text", "image": {"path": url, "bytes": None}, "images": [{"path": url, "bytes": None}]}
        table = pyarrow.Table.from_pylist([row | {"text": f"text {index}"} for index in range(30)], schema=features.arrow_schema)
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        train, _ = load_rows(data_settings(tmp_path / "rows.parquet", ("text",), dataset_streaming=streaming, max_eval_samples=2))
        assert next(iter(train))["text"].startswith("text ")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
