"""What ends a process: errors of the user, and signals; and what only one of several processes prints."""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

DEBUG_VARIABLE = "HARNESS_DEBUG"  # set by launch.sh --debug: errors show their traceback
NODE_VARIABLE = "HARNESS_NODE"  # number of this node, set in the launchers of all nodes but the first
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
OUT_OF_TIME = 75  # exit code after SIGUSR1 when there is a checkpoint: start the run again (EX_TEMPFAIL)

Handler = Callable[[int, FrameType | None], None] | signal.Handlers

_last_signal = 0  # a signal reaches the whole process, so its number is kept per process


class UserError(Exception):
    """Something the user can mend. `exit_on_user_error` turns it into one message and exit code 2."""


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Ends the process with one message and exit code 2 when a `UserError` is raised.

    If all processes fail alike, only the first one prints it. Ctrl-C ends the process with exit code 130 and without a traceback.
    """
    try:
        yield
    except UserError as error:
        place = f"node {os.environ[NODE_VARIABLE]}: " if os.environ.get(NODE_VARIABLE) else ""
        if not is_first_process():
            time.sleep(3)  # if the first process fails too, it prints the message, and the launcher stops this one
            place = f"process {os.environ['RANK']}: "
        if is_first_process() or not last_signal():
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            print(f"error: {place}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def die(message: str, code: int, is_of_one_process: bool = False) -> NoReturn:
    """Prints an error and ends this process at once: the others may never reach the end of a collective.

    If the processes of a node fail alike, the first one prints the message, and the launcher stops the others.
    """
    prints = is_of_one_process or os.environ.get("LOCAL_RANK", "0") == "0"
    if not prints:
        time.sleep(3)
    if prints or not last_signal():
        print(f"\nerror: {message}", file=sys.stderr, flush=True)
    os._exit(code)


def last_line(error: Exception) -> str:
    """The last line of an error's text: what libraries write before it is where it happened."""
    return (str(error).strip().splitlines() or [""])[-1][:300]


def is_first_process() -> bool:
    """Whether this is the process with rank 0, or none of several."""
    return os.environ.get("RANK", "0") == "0"


def print_once(message: str) -> None:
    """Prints in the process with rank 0, before there are ranks in the launcher of the first node."""
    if not is_first_process() or ("RANK" not in os.environ and NODE_VARIABLE in os.environ):
        return
    try:
        print(message, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of the pipe has exited; the run continues without it


def plural(count: int, word: str) -> str:
    """ "1 GPU", "2 GPUs"."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def readable_size(size: float) -> str:
    """Bytes in words, with MB of 1e6 and GB of 1e9 bytes."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def last_signal() -> int:
    """The number of the last signal that was recorded, 0 if there was none."""
    return _last_signal


def record_signal(number: int, frame: FrameType | None = None) -> None:
    """A signal handler that only records the signal. `run/stopping.py` stops all processes after the same step."""
    global _last_signal
    _last_signal = number


def set_signal_handler(handler: Handler) -> None:
    """Sets the handler of all of SIGNALS."""
    for number in SIGNALS:
        signal.signal(number, handler)


def set_interrupt_handler(handler: Handler) -> None:
    """Sets the handler of Ctrl-C, unless it is ignored, as a shell does for jobs in the background."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def exit_at_once() -> Iterator[None]:
    """Within this block a signal ends the process without raising: an import can swallow what a handler raises."""

    def stop(number: int, frame: FrameType | None) -> None:
        if number in SIGNALS:
            os.write(2, f"Stopped by {signal.Signals(number).name} before the training began.\n".encode())
        os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent is killed, so that it does not keep GPUs and the output directory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent was killed before the call above
            os._exit(128 + signal.SIGKILL)
