"""A recipe in this process: how its failures are reported, and running one for a command that needs its trainer."""

import atexit
import functools
import multiprocessing
import multiprocessing.util  # its exit handler is registered before ours, so it runs after it
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType

from harness import runs
from harness.hub import HubLost
from harness.launched import end_of_imports, has_ended, record_end
from harness.messages import UserError, exit_on_user_error, is_first_process
from harness.run.failures import exit_for_known_failure, raise_if_of_library
from harness.run.trainer import RunTrainer
from harness.runs import StartedRecipe
from harness.signals import OUT_OF_TIME, last_signal, set_interrupt_handler, set_signal_handler

DAEMON_TIMEOUT = 2  # seconds for the daemons of a process to exit when it exits


def report_failures_of(recipe: StartedRecipe) -> None:
    """Makes this process end with one message, and the right exit code, when the recipe that runs in it fails."""
    sys.excepthook = functools.partial(_end_process, recipe)


def begin_process() -> None:
    """What a process that trains does when its imports are done."""
    end_of_imports()
    atexit.register(_prepare_exit)


def _end_process(recipe: StartedRecipe, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` of a recipe. It exits itself: Python would exit with code 1."""
    code = 1
    try:
        with exit_on_user_error():
            report_failure(recipe, error)
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def report_failure(recipe: StartedRecipe, error: BaseException) -> None:
    """Exits with a message about an error of a recipe, or raises UserError."""
    if isinstance(error, UserError | KeyboardInterrupt):
        raise error
    if isinstance(error, HubLost):
        print(f"error: {error}. The same command resumes later", file=sys.stderr, flush=True)
        record_end(OUT_OF_TIME)
        sys.exit(OUT_OF_TIME)
    path = recipe.run.recipe
    if isinstance(error, Exception):
        exit_for_known_failure(error)
        trainer = recipe.trainer
        has_begun = isinstance(trainer, RunTrainer) and not trainer.is_first_step
        # In the first step, these are about columns that the model needs and the rows do not have.
        is_of_rows = isinstance(error, ValueError | TypeError | LookupError | AttributeError)
        if not has_begun or (is_of_rows and trainer.state.global_step == 0):
            raise_if_of_library(error, path)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # if all processes fail alike, the first one prints its traceback, and the launcher stops the others
        if last_signal():
            sys.exit(1)
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != path:  # from the recipe's own lines on
        trace = trace.tb_next
    sys.__excepthook__(type(error), error.with_traceback(trace), trace)
    sys.exit(1)


def run_recipe(recipe: StartedRecipe, flags: list[str]) -> None:
    """Does what `python RECIPE flags` does, until `recipe` needs no more of it. Known failures are one message."""
    path = recipe.run.recipe
    sys.argv = [path, *flags]
    sys.path.insert(0, str(Path(path).parent))
    try:
        with runs.running(recipe):
            runpy.run_path(path, run_name="__main__")
    except Exception as error:
        report_failure(recipe, error)


def build_trainer(recipe: StartedRecipe, flags: list[str]) -> None:
    """Runs a recipe until it calls `train` with its trainer."""
    run_recipe(recipe, flags)
    if recipe.trainer is None:
        raise UserError(without_train(recipe))


def without_train(recipe: StartedRecipe) -> str:
    return f"{Path(recipe.run.recipe).name} ended without calling train(): its last line must be train(trainer), from `harness`"


def report_missing_train(recipe: StartedRecipe) -> None:
    """Runs at the exit of a process of the launcher: `trainer.train()` neither resumes nor saves the model."""
    if recipe.trainer is None and is_first_process() and not has_ended():
        print(f"error: {without_train(recipe)}", file=sys.stderr, flush=True)
        record_end(2)


def _prepare_exit() -> None:
    """Runs before the exit handler of multiprocessing, which waits for daemons, such as workers that ignore SIGTERM.

    They have some time, because a Pool ends its workers itself.
    """
    set_signal_handler(signal.SIG_IGN)  # the run has ended: a signal would only interrupt the exit handlers
    set_interrupt_handler(signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise when a worker is killed
    if any(child.daemon for child in multiprocessing.active_children()):
        signal.signal(signal.SIGALRM, _kill_daemons)  # no timer: Python 3.12 starts no thread while it exits
        signal.alarm(DAEMON_TIMEOUT)


def _kill_daemons(number: int, frame: FrameType | None) -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
