"""Local files: what tells that they have changed, and which are not read."""

from harness import local_files
from harness.data import DataArguments

import pytest


def opened(path) -> DataArguments:
    data = DataArguments(dataset_name=str(path))
    data.named = str(path)
    return data


@pytest.mark.parametrize("place", ["rows.jsonl", "."])
def test_what_tells_that_local_data_changed(tmp_path, monkeypatch, place):
    monkeypatch.setattr(local_files, "ENDS", 8)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(bytes(range(64)))
    before = local_files.digest(opened(tmp_path / place))
    file.touch()
    assert local_files.digest(opened(tmp_path / place)) == before and local_files.digest(opened("someone/rows")) == ""
    for changed in (b"\0" + file.read_bytes()[:-1], file.read_bytes()[:-1], file.read_bytes()[:-1] + b"\0"):
        file.write_bytes(changed)
        assert local_files.digest(opened(tmp_path / place)) != before


def test_a_folder_of_two_formats(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    local_files.name_those_passed_over(opened(tmp_path))
    local_files.name_those_passed_over(opened(tmp_path / "a.jsonl"))
    assert not capsys.readouterr().out
    (tmp_path / "b.csv").write_text("text\nb\n")
    local_files.name_those_passed_over(opened(tmp_path))
    assert ".jsonl files are read, none that end in .csv." in capsys.readouterr().out
