"""Processes that simulate, forked by a server of multiprocessing, which imports the libraries once."""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from harness.launched import exit_with_parent
from harness.messages import exit_on_user_error


def start_server() -> str:
    """How processes are started. Set what the libraries read when they are imported before.

    A simulation forks, and a child waits for threads that it does not have: huggingface_hub tells the Hub about every trainer
    from one, and OpenMP would start some for a large tensor.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(["planner.simulation"])
    return "forkserver"


class Process:
    """A process that runs a function once."""

    def __init__(self, method: str, function: Callable, *args: Any) -> None:
        """Starts it, with this process's environment variables."""
        context = multiprocessing.get_context(method)
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_send_result, args=(sender, dict(os.environ), function, args))
        self.process.start()
        sender.close()

    def wait(self) -> tuple[int, Any]:
        """The exit code, -N for signal N, and the function's result, None if there is none."""
        result = None
        with contextlib.suppress(EOFError):  # it exited without a result
            result = self.receiver.recv()
        self.process.join()
        return self.process.exitcode, result


def call(method: str, function: Callable, *args: Any) -> tuple[int, Any]:
    """Runs `function` in a process of its own; returns what `Process.wait` does. If this process is stopped, so is that one."""
    process = Process(method, function, *args)
    try:
        return process.wait()
    finally:
        process.process.kill()


def _send_result(sender: Connection, variables: dict[str, str], function: Callable, args: tuple) -> None:
    """What a `Process` does."""
    exit_with_parent(os.getppid())
    os.environ.update(variables)
    with exit_on_user_error():
        sender.send(function(*args))


def explain_exit(exit_code: int) -> int:
    """The exit code for the shell, after a message if the process was killed."""
    if exit_code < 0:
        print(f"error: a simulation was ended by signal {-exit_code}; if that is 9, memory was full", file=sys.stderr)
    return exit_code if exit_code >= 0 else 128 - exit_code
