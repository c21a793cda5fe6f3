"""The processes of one machine: forked from a launcher that has imported the libraries, then started and watched together.

Importing torch, transformers and TRL takes 10 to 14 seconds of CPU time, so the launcher does it once. It forks its processes
before it starts a thread and before anything uses a GPU: a fork copies locks but not the threads that hold them, and CUDA does
not survive it. Where forking is not possible, on macOS for example, every process starts a new Python ("spawn").
"""

import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from harness import contexts
from harness.compat.guards import run_exit_handlers
from harness.contexts import BuildingContext, Context
from harness.folder import NOT_WRITABLE
from harness.hub import HubLost
from harness.messages import UserError, exit_on_user_error
from harness.nodes.network import LOST
from harness.run.failures import HOST_ADVICE, OUT_OF_MEMORY, exit_for_known_failure
from harness.signals import OUT_OF_TIME, SIGNALS, exit_at_once, exit_with_parent, last_signal, record_signal, set_signal_handler

DAEMON_TIMEOUT = 2  # seconds for the daemons of a process to exit when it exits
LEAVE_TIMEOUT = 30  # seconds for the other processes to exit after one has failed
# PyTorch's FlashAttention looks through all loaded modules when it is imported, which takes a second after the others.
LIBRARIES = ("torch", "torch.nn.attention.varlen", "datasets", "transformers.trainer", "trl.trainer.sft_trainer")
# Exit codes of a process that has printed why it ends; 130 is Ctrl-C.
EXPLAINED = {0, 2, 130, LOST, OUT_OF_MEMORY, NOT_WRITABLE, OUT_OF_TIME, *(128 + number for number in SIGNALS)}
KILLED = f": it was killed, usually by the kernel because the host's memory was full (`dmesg` shows it): {HOST_ADVICE}"


class LoaderWithoutCompiler(importlib.machinery.SourceFileLoader):
    """Imports a module in which `torch.compile` does nothing."""

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module while TORCHDYNAMO_DISABLE is set, which `torch.compile` looks at when it is called."""
        before = os.environ.get("TORCHDYNAMO_DISABLE")
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        try:
            super().exec_module(module)
        finally:
            del os.environ["TORCHDYNAMO_DISABLE"]
            if before is not None:
                os.environ["TORCHDYNAMO_DISABLE"] = before


class DelayBitsandbytes:
    """An import hook that runs bitsandbytes when it is first used, without PyTorch's compiler.

    Its import asks every GPU for its compute capability. It also compiles functions for devices other than GPUs and CPUs, for
    which it imports the compiler: more than two seconds of CPU time in every process.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != "bitsandbytes":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec:
            spec.loader = importlib.util.LazyLoader(LoaderWithoutCompiler(name, spec.origin))
        return spec


def import_libraries() -> bool:
    """Imports what every process of a run needs; returns whether this process can be forked afterwards."""
    gc.disable()  # modules make many objects and no garbage
    sys.meta_path.insert(0, DelayBitsandbytes)
    try:
        with exit_at_once():
            for library in LIBRARIES:
                importlib.import_module(library)
            prepare_loading()
    except Exception:  # a process that starts a new Python meets the same error and shows it
        return False
    finally:
        sys.meta_path.remove(DelayBitsandbytes)
        gc.enable()
        gc.freeze()  # without it the first garbage collection of every process would copy all memory pages
    from harness.compat.torch import can_use_gpu_after_fork

    return sys.platform == "linux" and threading.active_count() == 1 and can_use_gpu_after_fork()


def prepare_loading() -> None:
    """Makes transformers' table of renamed weights, which every process would make when it loads its model: 0.2 s."""
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


class Worker:
    """A process that waits for a function, runs it once, and returns its result."""

    def __init__(self, can_fork: bool) -> None:
        context = multiprocessing.get_context("fork" if can_fork else "spawn")
        self.connection, theirs = context.Pipe()
        stdin = None
        if can_fork:
            with contextlib.suppress(OSError):  # stdin is closed
                stdin = os.dup(0)
        # Until the process has started its function, a signal to it waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.process = context.Process(target=_work, args=(theirs, os.getpid(), stdin))
        self.process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        theirs.close()
        if stdin is not None:
            os.close(stdin)
        self.result: Any = None
        self.is_idle = True

    def start(self, function: Callable, *args: Any, environment: dict[str, str] | None = None) -> None:
        """Runs `function` in the process, with this process's environment variables and those of `environment`."""
        self.is_idle = False
        self.connection.send((pickle.dumps((function, args)), {**os.environ, **(environment or {})}))

    def dismiss(self) -> None:
        """Ends the process if it was not started."""
        if self.is_idle:
            with contextlib.suppress(OSError):  # it has exited
                self.connection.send(None)

    def receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # it exited without a result
            if self.connection.poll():
                self.result = self.connection.recv()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.is_alive():
                os.kill(self.process.pid, number)


def _work(connection: Connection, launcher: int, stdin: int | None) -> None:
    """The process of a Worker: waits for a function, its arguments and environment variables, runs it, and sends its result."""
    exit_with_parent(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message = None
    with contextlib.suppress(EOFError):  # the launcher has exited
        message = connection.recv()
    if message is None:  # this process is not needed
        os._exit(0)
    call, environment = message
    _restore_defaults(environment, stdin)
    try:
        with exit_on_user_error():
            function, args = pickle.loads(call)  # not before: it can import libraries, which read the environment
            connection.send(function(*args))
    finally:
        for number in (signal.SIGINT, *SIGNALS):  # the function has ended: a signal would only interrupt the exit handlers
            signal.signal(number, signal.SIG_IGN)
        # The exit handler of multiprocessing waits for daemons, such as a DataLoader's worker that reads and ignores SIGTERM. It
        # has some time, because a Pool ends its workers itself. torch's handler of SIGCHLD would raise when a worker is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        timer = threading.Timer(DAEMON_TIMEOUT, _kill_daemons)
        timer.daemon = True
        timer.start()
        run_exit_handlers()


def _kill_daemons() -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _restore_defaults(environment: dict[str, str], stdin: int | None) -> None:
    """Makes this process what a newly started Python would be: its environment, threads, standard input and signals."""
    multiprocessing.set_start_method(None, force=True)  # processes that the recipe starts use Python's default again
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:  # torch has read the variable when it was imported
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
    if stdin is not None:  # multiprocessing has closed it; a debugger in a recipe needs it
        os.dup2(stdin, 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process lives)
    set_signal_handler(signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked since Worker started this process


def wait_for(workers: list[Worker]) -> tuple[int, int]:
    """Waits until all have exited; returns the exit code and the index of the first one that failed, (0, 0) if none has.

    Signals are passed on to the workers, also one that was recorded before. When a worker fails, the others get SIGTERM, and
    after LEAVE_TIMEOUT SIGKILL.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        if number in SIGNALS:
            record_signal(number)
        for worker in workers:
            worker.send_signal(last_signal())

    set_signal_handler(forward)
    if last_signal():
        forward(last_signal(), None)
    failure, deadline, was_killed, was_interrupted = (0, 0), None, False, False
    # A worker that dies after this line is in `running`, so that `wait` returns at once; one that died before has an exit code.
    while running := [worker for worker in workers if worker.process.is_alive()]:
        failed = [index for index, worker in enumerate(workers) if worker.process.exitcode not in (None, 0)]
        if failed and deadline is None:
            failure = workers[failed[0]].process.exitcode, failed[0]
            deadline = time.monotonic() + LEAVE_TIMEOUT
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
        elif deadline is not None and time.monotonic() >= deadline and not was_killed:
            was_killed = True
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
        timeout = None if deadline is None or was_killed else max(0.0, deadline - time.monotonic())
        try:
            wait([end for worker in running for end in (worker.connection, worker.process.sentinel)], timeout)
            for worker in running:
                worker.receive()
        except KeyboardInterrupt:
            # Ctrl-C reaches the processes too, and the first of them prints where it stopped; `kill -INT` does not.
            was_interrupted = True
            _interrupt(workers)
    for index, worker in enumerate(workers):
        worker.process.join()
        worker.receive()
        if failure[0] == 0 and worker.process.exitcode:
            failure = worker.process.exitcode, index
    return (130, 0) if was_interrupted and not failure[0] else failure


def _interrupt(workers: list[Worker]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        wait([worker.process.sentinel for worker in workers], 1)
        for worker in workers:
            worker.send_signal(signal.SIGINT)


@contextlib.contextmanager
def idle_workers(count: int, can_fork: bool) -> Iterator[list[Worker]]:
    """Workers that can be started within the block."""
    workers = [Worker(can_fork) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.dismiss()


def call(can_fork: bool, function: Callable, *args: Any) -> tuple[int, Any]:
    """Runs `function` in a process of its own; returns the exit code (-N for signal N) and the function's result.

    A signal meanwhile goes to that process, and then to the handler that was set before the call.
    """
    worker = Worker(can_fork)
    worker.start(function, *args)
    with restored_signal_handlers():
        code, _ = wait_for([worker])
    return code, worker.result


@contextlib.contextmanager
def restored_signal_handlers() -> Iterator[None]:
    """Restores the handlers after the block, in which `wait_for` sets its own, and gives them a signal that came in the block."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if last_signal():
        os.kill(os.getpid(), last_signal())


def train_in_one_process(worker: Worker, context: Context, flags: list[str]) -> int:
    """Runs a recipe in a process without torch.distributed; returns the exit code for the shell."""
    worker.start(run_recipe, context, flags)
    code, _ = wait_for([worker])
    return explain_exit(code)


def train_in_processes(
    workers: list[Worker], context: Context, flags: list[str], environment: dict[str, str], node: int = 0
) -> int:
    """Runs a recipe in the processes of this node; returns the exit code for the shell.

    `environment` is what `accelerate launch` sets, with MASTER_ADDR and MASTER_PORT of the store in the first launcher.
    """
    for local_rank, worker in enumerate(workers):
        ranks = {
            "RANK": node * len(workers) + local_rank,
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": node,
            "WORLD_SIZE": context.processes,
            "LOCAL_WORLD_SIZE": len(workers),
        }
        own = environment | {name: str(value) for name, value in ranks.items()}
        worker.start(run_recipe, context, flags, environment=own)
    code, local_rank = wait_for(workers)
    if code == LOST and local_rank and not last_signal():
        # The process that prints the message for its node is the one that was lost.
        print(
            f"\nerror: process {local_rank} lost the connection to the first one, which hangs or was killed. The same command "
            "resumes from the newest checkpoint",
            file=sys.stderr,
        )
    return explain_exit(code, node * len(workers) + local_rank)


def explain_exit(exit_code: int, rank: int | None = None) -> int:
    """The exit code for the shell, after a message if the process could not print one itself.

    `exit_code`: that of multiprocessing, -N for signal N. `rank`: of a process that trains, None for another one.
    """
    code = exit_code if exit_code >= 0 else 128 - exit_code
    if last_signal() and exit_code == LOST:  # another process was stopped before it could record the signal
        print(f"Stopped by {signal.Signals(last_signal()).name}.", file=sys.stderr)
        return 128 + last_signal()
    if -exit_code in SIGNALS:  # training has a handler, with which the process exits by itself
        print(f"Stopped by {signal.Signals(-exit_code).name} before the training began.", file=sys.stderr)
    elif code not in EXPLAINED and (rank is not None or exit_code < 0):
        reason = KILLED if code == 137 else "; see its output above"
        print(f"error: process {rank or 0} failed first (exit code {code}){reason}", file=sys.stderr)
    return code


def exit_for_signal(number: int, frame: FrameType | None) -> None:
    """A signal handler of a launcher whose processes do not train yet."""
    sys.exit(explain_exit(-number))


def run_recipe(context: Context, flags: list[str]) -> None:
    """Does what `python RECIPE flags` does, as far as its context needs it. Known failures are one message."""
    path = context.recipe
    sys.argv = [path, *flags]
    sys.path.insert(0, str(Path(path).parent))
    try:
        with contexts.active(context):
            runpy.run_path(path, run_name="__main__")
    except UserError:
        raise
    except HubLost as error:
        print(f"error: {error}. The same command resumes later", file=sys.stderr, flush=True)
        sys.exit(OUT_OF_TIME)
    except Exception as error:
        exit_for_known_failure(error)
        if type(error).__module__.startswith("jinja2") and context.arguments:
            from harness.data.checking import find_refused_row

            if refused := find_refused_row(*context.arguments):
                raise refused from error
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(3)  # if all processes fail alike, the first one prints its traceback, and the launcher stops the others
            if last_signal():
                sys.exit(1)
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != path:  # from the recipe's own lines on
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def build_trainer(context: BuildingContext, flags: list[str]) -> Any:
    """Runs a recipe until it calls `train`; returns the trainer that it has built."""
    run_recipe(context, flags)
    if context.trainer is None:
        raise UserError(f"{Path(context.recipe).name} ended without calling train(): is it a recipe?")
    return context.trainer


def exit_quickly(code: int) -> None:
    """Ends a launcher: Python would need more than a second to take down all that was imported."""
    for number in (signal.SIGINT, *SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    # A signal can end the launcher before it watches its workers. The exit handler of multiprocessing would wait for them.
    for process in multiprocessing.active_children():
        process.kill()
    run_exit_handlers()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or its reader has exited
            stream.flush()
    os._exit(code)
