"""What launch.sh decided reaches every process; user errors become one message and an exit code."""

import os
import subprocess
import sys

from harness import launched, messages
from harness.messages import UserError, exit_on_user_error

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit


def fail():
    with exit_on_user_error():
        raise UserError("a  message\nof two lines")


@pytest.mark.parametrize(("rank", "process"), [(None, ""), ("0", ""), ("1", "process 1: ")])
def test_user_error(monkeypatch, capsys, rank, process):
    """It is printed in one line; all exit with code 2. Others than the first wait: if that fails too, the launcher stops them."""
    waited = []
    monkeypatch.setattr(messages, "wait_for_end", waited.append)
    if rank:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end:
        fail()
    assert end.value.code == 2 and capsys.readouterr().err == f"error: {process}a message of two lines\n"
    assert waited == [3] * (rank == "1")


def test_user_error_of_all_processes_is_printed_once(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(messages, "wait_for_end", lambda seconds: launched.record_signal(15))
    monkeypatch.setattr(launched, "_last_signal", 0)
    with pytest.raises(SystemExit):
        fail()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("words", [("--debug", "--report", "no-such-run"), ("--report", "no-such-run", "--debug")])
def test_debug_can_be_anywhere_in_a_command(launch, tmp_path, words):
    process = launch(*words, cwd=tmp_path)
    assert process.returncode == 2 and "Traceback" in process.stderr and process.stderr.splitlines()[-1].startswith("error: ")


def test_ctrl_c_ends_without_a_traceback(capsys):
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise KeyboardInterrupt
    assert end.value.code == 130 and capsys.readouterr() == ("", "")


def test_print_once_without_a_reader():
    """A run continues when its output goes to a program that exits, such as `head`."""
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'recipes')!r}); from harness.messages import print_once\n"
    script += "print_once('a message'); print_once('another message')"
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run([sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert process.returncode == 0 and not process.stderr, process.stderr


def test_control_characters_are_not_printed(capsys, monkeypatch):
    """They change the colour, the title or the text of a terminal; rows, names and answers of a server can have them."""
    monkeypatch.delenv("RANK", raising=False)
    messages.print_once("a\x1b[31mb\x00\x9b\u202e\tc\nd")
    assert capsys.readouterr().out == "a\\x1b[31mb\\x00\\x9b\\u202e\tc\nd\n"
    with pytest.raises(SystemExit), messages.exit_on_user_error():
        raise messages.UserError("\x1b]0;title\x07" + "x" * 10_000)
    printed = capsys.readouterr().err
    assert printed.startswith("error: \\x1b]0;title\\x07xxx") and printed.endswith("x …\n") and len(printed) < 3100
