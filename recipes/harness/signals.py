"""Signals: which ones stop a run, the last one that came, and what ends a process with its parent."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

NODE_JOINS = signal.SIGUSR2  # sent by the launcher to its processes
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, NODE_JOINS)
OUT_OF_TIME = 75  # exit code after SIGUSR1 when there is a checkpoint: start the run again (EX_TEMPFAIL)

Handler = Callable[[int, FrameType | None], None] | signal.Handlers

_last_signal = 0  # a signal reaches the whole process, so its number is kept per process


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


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Signals that come within this block are handled after it. Processes that it starts have them blocked.

    To block them would not be enough: a thread of torch can receive them, and then the handler runs in the main thread.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, *SIGNALS)
    before, mask = {number: signal.getsignal(number) for number in numbers}, signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in came:
            before[number](number, None)


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent is killed, so that it does not keep GPUs and the output directory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent was killed before the call above
            os._exit(128 + signal.SIGKILL)
