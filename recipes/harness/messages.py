"""What a person reads: errors of the user, and what only one of several processes prints."""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

from harness.launched import has_ended, last_signal, record_end

DEBUG_VARIABLE = "HARNESS_DEBUG"  # set by launch.sh --debug: errors show their traceback

LONGEST_MESSAGE = 3000  # letters of an error: it can have what is in a file
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class UserError(Exception):
    """Something the user can mend. `exit_on_user_error` turns it into one message and exit code 2."""


class DamagedFile(UserError):
    """A JSON file of a run that cannot be read."""


class HubLost(Exception):
    """The Hub stayed unreachable for too long."""


class SkippedRow(ValueError):
    """A row that cannot be trained on. Its message continues "3 rows …"."""


class RefusedRow(ValueError):
    """A row that ends the run. Its message follows the place of the row."""


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Ends the process with one message and exit code 2 when a `UserError` is raised.

    If all processes fail alike, only the first one prints it. Ctrl-C ends the process with exit code 130 and without a traceback.
    """
    try:
        yield
    except UserError as error:
        is_first = is_first_process()
        if not is_first:
            wait_for_end(3)  # if the first process fails too, it prints the message
        if is_first or not (last_signal() or has_ended()):
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            text = str(error).rpartition(f"{UserError.__module__}.UserError: ")[2]  # one of a loader's worker has its traceback
            message = printable(" ".join(text.split()))
            shown = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} …"
            place = "" if is_first else f"process {os.environ['RANK']}: "
            print(f"error: {place}{shown}", file=sys.stderr, flush=True)
        record_end(2)
        sys.exit(2)
    except KeyboardInterrupt:
        record_end(130)
        sys.exit(130)


@contextlib.contextmanager
def one_message() -> Iterator[None]:
    """Makes other errors a UserError with their last line: in a command, that of a library says what is wrong."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{kind_and_line(error)} (--debug shows the traceback)") from error


def die(message: str, code: int, is_of_one_process: bool = False, is_error: bool = True, is_final: bool = True) -> NoReturn:
    """Prints an error and ends this process at once: the others may never reach the end of a collective.

    If the processes of a node fail alike, the first one prints the message, and the launcher stops the others. `is_error`: False
    if the run continues. `is_final`: the run is not started again.
    """
    prints = is_of_one_process or os.environ.get("LOCAL_RANK", "0") == "0"
    if not prints:
        wait_for_end(3)
    if prints or not (last_signal() or has_ended()):
        print(f"\n{'error' if is_error else 'warning'}: {message}", file=sys.stderr, flush=True)
    if is_final:
        record_end(code)
    os._exit(code)


def wait_for_end(seconds: float) -> None:
    """Waits until a process of this node has recorded the end of the run, or has sent this one a signal."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (has_ended() or last_signal()):
        time.sleep(0.05)


def last_line(error: Exception | str) -> str:
    """The last line of an error's text: what libraries write before it is where it happened."""
    return (str(error).strip().splitlines() or [""])[-1][:300]


def kind_and_line(error: Exception) -> str:
    """ "ValueError: " and the last line of its text."""
    return f"{type(error).__name__}: {last_line(error)}"


def is_first_process() -> bool:
    """Whether this is the process with rank 0, or none of several."""
    return os.environ.get("RANK", "0") == "0"


def printable(text: str) -> str:
    """`text` without what changes a terminal or hides text in it: names, rows and answers of a model can contain that."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_once(message: str) -> None:
    """Prints in the process with rank 0."""
    if not is_first_process():
        return
    try:
        print(printable(message), flush=True)
    except OSError:  # the reader of the pipe has exited, or the disk is full; the run continues without it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def plural(count: int, word: str) -> str:
    """ "1 GPU", "2 GPUs", "2 processes"."""
    ending = "es" if word.endswith("s") else "s"
    return f"{count:,} {word}{'' if count == 1 else ending}"


def readable_size(size: float) -> str:
    """Bytes in words, with MB of 1e6 and GB of 1e9 bytes."""
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB"
