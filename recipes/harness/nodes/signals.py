"""Signals on their way from whoever stops a run (SLURM, a cloud, `kill`) to the processes that train."""

import contextlib
import ctypes
import os
import signal
import sys

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
OUT_OF_TIME = 75  # exit code of a run that SIGUSR1 warned and that left with a checkpoint: start it again (EX_TEMPFAIL)

received = 0  # the number of the last signal that `listen` heard


def listen():
    """Notes a signal instead of dying of it; `preemption` stops all processes at one step."""

    def note(number, frame):
        global received
        received = number

    handle(note)


def handle(handler):
    for number in SIGNALS:
        signal.signal(number, handler)


def interrupt(handler):
    """What Ctrl-C does from here on: `signal.SIG_DFL` ends the process without a word, `default_int_handler` raises.

    Nothing where whoever started it wants it ignored, as a shell does for what runs in the background.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def end_at_once():
    """Within it a signal ends this process where it stands: what a handler raises, an import may swallow."""

    def end(number, frame):
        if number in SIGNALS:
            os.write(2, f"Stopped by {signal.Signals(number).name} before the training began.\n".encode())
        os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)}
    for number in (number for number, handler in before.items() if handler != signal.SIG_IGN):
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent(parent: int):
    """When the parent is killed outright, this process goes with it and does not keep GPUs and folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed before this process could say so
            os._exit(128 + signal.SIGKILL)
