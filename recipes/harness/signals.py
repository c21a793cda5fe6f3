"""Signals: which ones stop a run, the last one that came, and what ends a process with its parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
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


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent is killed, so that it does not keep GPUs and the output directory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent was killed before the call above
            os._exit(128 + signal.SIGKILL)
