"""Changes to Python's multiprocessing."""

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from harness.compat.guards import changes
from harness.signals import SIGNALS, exit_with_parent


def _open_files() -> set[int]:
    """The file descriptors of this process."""
    files = list(Path("/proc/self/fd").iterdir())
    return {int(file.name) for file in files if file.exists()}  # not that of the folder itself


@contextlib.contextmanager
def _hidden_warnings() -> Iterator[None]:
    """A resource tracker that is started in this block says nothing of what a launcher leaves that exits in the middle."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker:UserWarning"]))
    try:
        yield
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


@changes(
    "multiprocessing.forkserver:ForkServer.ensure_running(self)",
    "multiprocessing.forkserver:main",
    "multiprocessing.util:spawnv_passfds(path, args, passfds)",
)
def start_fork_server() -> None:
    """Starts the server of the start method "forkserver" as a fork of this process, which has imported the libraries.

    multiprocessing starts it as a new Python, which would import them once more. The server has no threads and uses no GPU, so
    that its processes can. They start with SIGINT, SIGTERM and SIGUSR1 blocked. The server ends with this process.
    Upstream: no issue found.
    Checked with: Python 3.11, 3.12 and 3.13.
    Remove when: multiprocessing can fork its server.
    """
    launcher, spawn = os.getpid(), util.spawnv_passfds
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with _hidden_warnings():
        resource_tracker.ensure_running()  # a new Python, which ignores all but SIGUSR1
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *SIGNALS))
    files = _open_files()

    def fork(path: str, args: list[str], passfds: list[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            exit_with_parent(launcher)
            for descriptor in _open_files() - files - set(passfds):  # the launcher's end of the pipe whose end stops the server
                os.close(descriptor)
            exec(args[-1])  # of `python -c 'from multiprocessing.forkserver import main; main(…)'`
        finally:
            os._exit(1)

    forkserver.set_forkserver_preload([])
    util.spawnv_passfds = fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
