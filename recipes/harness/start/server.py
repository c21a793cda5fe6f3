"""The server that all processes of a machine are forked from, once the libraries are imported.

It is multiprocessing's forkserver, which torch's launcher takes as its start method. The launcher forks it as soon as it has
imported the libraries, before anything has begun a thread or touched a GPU: a fork copies locks but not the threads that
hold them, and CUDA does not survive one. (OpenBLAS and Arrow's allocator have threads; both look after a fork by
pthread_atfork.) The processes cannot be forked from the launcher itself, which then has threads of torch's store and of the
watch over other nodes. Where no server can be, on macOS for one, whose system libraries do not survive a fork, every process
starts anew and imports for itself: "spawn".
"""

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
from multiprocessing import connection, forkserver, resource_tracker
from socket import AF_UNIX, socket

from harness.nodes import signals

method = "spawn"  # how multiprocessing starts a process
environment = {}  # of the server, and so of what it forks
pid = 0  # of the server, in it and in what it forks
stdin = -1  # the launcher's, which multiprocessing closes in the server; whoever debugs a recipe wants it


def prepare():
    """Imports the libraries and forks the server, where that can be."""
    global method
    if sys.platform == "linux" and not hasattr(forkserver._forkserver, "_forkserver_authkey") and not import_libraries():
        # Whoever signals all processes of a job must not hit the server. What it forks unblocks them, and gets those that came.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
        with contextlib.suppress(OSError):
            _fork()
            method = "forkserver"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.SIGNALS)
    environment.update(os.environ)


class LaterBitsandbytes:
    """bitsandbytes asks every GPU for its capability while it is imported, so it is executed by whoever first uses it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "bitsandbytes":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def import_libraries() -> str:
    """Imports what every process of a run imports; returns why this one must not fork now, '' when it may."""
    gc.disable()  # thousands of modules make many objects and no garbage
    sys.meta_path.insert(0, LaterBitsandbytes)
    try:
        with signals.end_at_once():
            for library in ("torch", "datasets", "transformers.trainer", "trl.trainer.sft_trainer"):
                importlib.import_module(library)
    except Exception as error:  # a process that starts anew meets it again, and shows it whole
        return repr(error)
    finally:
        sys.meta_path.remove(LaterBitsandbytes)
        gc.enable()
        gc.freeze()  # or the first collection of every process would copy all pages
    return "a GPU was touched" * _has_touched_gpu() or "a thread was started" * (threading.active_count() > 1)


def _has_touched_gpu() -> bool:
    """Whether a fork of this process could use a GPU no more: only a fork knows."""
    pid = os.fork()
    if pid == 0:
        os._exit(sys.modules["torch"].cuda._is_in_bad_fork())
    return os.waitpid(pid, 0)[1] != 0


def _fork():
    """What `ForkServer.ensure_running` does, with a fork of this process in the place of a new Python."""
    global pid, stdin
    server, launcher = forkserver._forkserver, os.getpid()
    os.environ["PYTHONWARNINGS"], own = "ignore:resource_tracker", os.environ.get("PYTHONWARNINGS")
    resource_tracker.ensure_running()  # which would warn of what a killed launcher has left, and takes it away
    os.environ.pop("PYTHONWARNINGS") if own is None else os.environ.update(PYTHONWARNINGS=own)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)  # again: it has unblocked SIGTERM
    with socket(AF_UNIX) as listener:
        server._forkserver_address = connection.arbitrary_address("AF_UNIX")
        listener.bind(server._forkserver_address)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()
        server._forkserver_pid = os.fork()
        if server._forkserver_pid == 0:
            try:
                signals.die_with_parent(launcher)
                signals.handle(signal.SIG_DFL)  # the launcher's handlers are not for what the server forks
                os.close(server._forkserver_alive_fd)
                pid, server._forkserver_pid = os.getpid(), None  # a process may have a server of its own
                with contextlib.suppress(OSError):  # closed
                    stdin = os.dup(0)
                forkserver.main(listener.detach(), alive, None)
            finally:
                os._exit(0)
    os.close(alive)


def leave(code: int):
    """Ends the server, with what it may have forked, and this process."""
    if method == "forkserver":
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # its socket in /tmp may be gone after a long run
            forkserver._forkserver._stop()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)  # to take down all that was imported takes Python more than a second
