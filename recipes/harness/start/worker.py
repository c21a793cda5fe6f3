"""What every process that is not a launcher does first and last."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from harness.nodes import signals
from harness.nodes.signals import OUT_OF_TIME, SIGNALS
from harness.patience import Lost
from harness.start import memory, server


def answer(sender, environment: dict, function, arguments):
    """`begin`, with its answer sent through a pipe."""
    sender.send(begin(environment, function, arguments))


def begin(environment: dict, function, arguments):
    """Runs `function`, with what its launcher has set in `environment` since the server was forked; returns its answer."""
    signals.die_with_parent(server.pid or multiprocessing.parent_process().pid)
    multiprocessing.set_start_method(None, force=True)  # what this process starts, it starts as any other would
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if server.stdin >= 0:
        os.dup2(server.stdin, 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for as long as the process lives)
    if server.pid and "OMP_NUM_THREADS" in environment:  # which has been read already
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        return function(*arguments)
    except SystemExit as end:
        if end.code:
            raise
        return None  # to torch's launcher, which waits for an answer
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for number in (signal.SIGINT, *SIGNALS):  # there is nothing more to stop
            signal.signal(number, signal.SIG_IGN)
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def recipe(path: str, flags: list[str]):
    """What `python RECIPE` does."""
    sys.argv = [path, *flags]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except Lost as lost:
        print(f"error: {lost}. The same command goes on later", file=sys.stderr, flush=True)
        sys.exit(OUT_OF_TIME)
    except Exception as error:
        memory.explain(error)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(3)  # where all fail alike, the first one speaks, and the launcher stops the others
            if signals.received:
                sys.exit(1)
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
