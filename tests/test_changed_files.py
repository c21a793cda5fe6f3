"""Local files that were changed after a run began."""

import os

from harness.folder import (
    COMPLETION_MARKER,
    DATA_FILES,
    changed_files,
    check_data_files,
    compute_checksums,
    record_data_files,
    warning_of_change,
)

import pytest
from conftest import read


@pytest.fixture
def run(tmp_path):
    """A run with a checkpoint, and its dataset of two files."""
    for name in ("run/checkpoint-1", "data"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/checkpoint-1" / COMPLETION_MARKER).touch()
    for name in ("a", "b"):
        (tmp_path / f"data/{name}.jsonl").write_text("x" * 9)
    files = [tmp_path / f"data/{name}.jsonl" for name in ("a", "b")]
    record_data_files(tmp_path / "run", files)
    return tmp_path / "run", files, tmp_path / "data/a.jsonl"


def write_again(file, text):
    file.write_text(text)
    os.utime(file, ns=(1, 1))


def test_change_in_the_middle(run, error_of):
    output_dir, files, file = run
    compute_checksums(output_dir).join()
    write_again(file, "xxxxyxxxx")
    message = error_of(check_data_files, output_dir, files)
    assert f"{file} has changed since the run in {output_dir} began" in message


def test_change_that_keeps_the_time(run, capsys):
    """The next start does not read the files; it compares them while it trains."""
    output_dir, files, file = run
    compute_checksums(output_dir).join()
    before = file.stat()
    file.write_text("xxxxyxxxx")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        check_data_files(output_dir, files)
        record_data_files(output_dir, files)
        compute_checksums(output_dir).join()
        printed = capsys.readouterr().out
        assert printed == f"{warning_of_change(str(file), output_dir)}\n" and "same size and modification time" in printed
        assert changed_files(output_dir) == [str(file)]
    (output_dir / "checkpoint-1" / COMPLETION_MARKER).unlink()  # a run from the beginning reads one version
    record_data_files(output_dir, files)
    compute_checksums(output_dir).join()
    assert not changed_files(output_dir) and not capsys.readouterr().out


def test_file_that_was_copied(run, capsys):
    """Another modification time and the same content."""
    output_dir, files, file = run
    compute_checksums(output_dir).join()
    before = read(output_dir, DATA_FILES)["files"][str(file)]
    write_again(file, "x" * 9)
    check_data_files(output_dir, files)
    record_data_files(output_dir, files)
    assert read(output_dir, DATA_FILES)["files"][str(file)] == [9, 1, before[2]] and before[2] and not capsys.readouterr().out


def test_file_whose_checksum_is_not_known(run, capsys):
    output_dir, files, file = run
    write_again(file, "xxxxyxxxx")
    check_data_files(output_dir, files)
    assert f"warning: {file} may have changed since the run" in capsys.readouterr().out


def test_run_without_a_checkpoint_accepts_other_files(run):
    output_dir, files, file = run
    (output_dir / "checkpoint-1" / COMPLETION_MARKER).unlink()
    write_again(file, "other")
    check_data_files(output_dir, files)
