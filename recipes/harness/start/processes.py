"""The processes of one machine. Those that train are started and watched by torch's elastic agent.

Importing torch, transformers and TRL takes seconds of CPU time, so the launcher does it once, and forks a server from which all
processes are forked. It does so before it starts a thread and before anything uses a GPU: a fork copies locks but not the threads
that hold them, and CUDA does not survive it. Where forking is not possible, on macOS for example, every process starts a new
Python ("spawn").
"""

import contextlib
import faulthandler
import gc
import importlib
import importlib.machinery
import importlib.util
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from harness import contexts
from harness.compat.guards import run_exit_handlers
from harness.compat.multiprocessing import start_fork_server
from harness.contexts import BuildingContext, Context
from harness.folder import NOT_WRITABLE, newest_complete_checkpoint
from harness.hub import HubLost
from harness.messages import DEBUG_VARIABLE, UserError, exit_on_user_error
from harness.nodes.network import LOST, UNREACHABLE
from harness.run.failures import HOST_ADVICE, OUT_OF_MEMORY, exit_for_known_failure, raise_if_of_library
from harness.signals import (
    NODE_JOINS,
    OUT_OF_TIME,
    SIGNALS,
    delayed_signals,
    exit_at_once,
    exit_with_parent,
    last_signal,
    record_signal,
    set_interrupt_handler,
    set_signal_handler,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

DAEMON_TIMEOUT = 2  # seconds for the daemons of a process to exit when it exits
# PyTorch's FlashAttention looks through all loaded modules when it is imported, which takes a second after the others.
LIBRARIES = ("torch", "torch.nn.attention.varlen", "datasets", "transformers.trainer", "trl.trainer.sft_trainer")
# Exit codes of a process that has printed why it ends; 130 is Ctrl-C.
EXPLAINED = {0, 2, 130, LOST, UNREACHABLE, OUT_OF_MEMORY, NOT_WRITABLE, OUT_OF_TIME, *(128 + number for number in SIGNALS)}
# Environment variables that the agent sets in each process.
OF_AGENT = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
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


def start_server() -> str:
    """Imports the libraries; returns how to start processes: "forkserver", or "spawn" where forking is not possible.

    Call it before this process starts a thread or uses a GPU.
    """
    if not import_libraries():
        return "spawn"
    start_fork_server()
    return "forkserver"


class Process:
    """A process that runs a function once."""

    def __init__(self, method: str, function: Callable, *args: Any, environment: dict[str, str] | None = None) -> None:
        """Starts it, with this process's environment variables and those of `environment`."""
        context = multiprocessing.get_context(method)
        self.receiver, sender = context.Pipe(duplex=False)
        variables = {**os.environ, **(environment or {})}
        self.process = context.Process(target=_send_result, args=(sender, variables, os.getpid(), function, args))
        with delayed_signals():
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


def _send_result(sender: Connection, variables: dict[str, str], launcher: int, function: Callable, args: tuple) -> None:
    """What a `Process` does."""
    with new_process(variables, launcher):
        sender.send(function(*args))


@contextlib.contextmanager
def new_process(variables: dict[str, str], launcher: int) -> Iterator[None]:
    """The block runs as in a newly started Python: environment variables, threads, standard input and signals."""
    exit_with_parent(os.getppid())
    if not multiprocessing.parent_process().is_alive():  # the launcher was killed before the line above
        os._exit(128 + signal.SIGKILL)
    multiprocessing.set_start_method(None, force=True)  # processes that the recipe starts use Python's default again
    os.environ.update(variables)
    if "torch" in sys.modules and "OMP_NUM_THREADS" in variables:  # torch has read the variable when it was imported
        sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"].split(",")[0]))
    with contextlib.suppress(OSError):  # it is closed, or this is not Linux
        # multiprocessing has closed it; a debugger in a recipe needs it. A named pipe without a writer would block.
        stdin = os.open(f"/proc/{launcher}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(stdin, True)
        os.dup2(stdin, 0)
        os.close(stdin)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process lives)
    set_signal_handler(signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with exit_on_user_error():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, *SIGNALS))
            yield
    finally:
        for number in (signal.SIGINT, *SIGNALS):  # the block has ended: a signal would only interrupt the exit handlers
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


def train(
    method: str,
    context: Context,
    flags: list[str],
    variables: dict[str, str],
    nodes: "RendezvousHandler",
    output_dir: Path,
    max_restarts: int = 0,
) -> int:
    """Runs a recipe in the processes of this node, with torch's elastic agent; returns the exit code for the shell.

    `variables`: environment variables of the processes besides this process's and those that the agent sets. `max_restarts`: how
    often the processes are started again after crashes without a new checkpoint in `output_dir`.
    """
    from harness.compat.elastic import make_agent

    from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState

    if not os.environ.get(DEBUG_VARIABLE):
        for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # of the agent: the messages here replace them
            logging.getLogger(name).setLevel(logging.CRITICAL)
    variables = {name: value for name, value in {**os.environ, **variables}.items() if name not in OF_AGENT}
    spec = WorkerSpec(
        role="",
        local_world_size=context.processes // context.nodes,
        rdzv_handler=nodes,
        entrypoint=train_in_process,
        args=(context, flags, variables, os.getpid()),
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )

    progress = newest_complete_checkpoint(output_dir)

    def restarts_left(code: int, rank: int, left: int) -> int:
        """How often the processes can start again when one has failed. `left`: without what this failure changes."""
        nonlocal progress
        before, progress = progress, newest_complete_checkpoint(output_dir)
        if context.min_nodes and code in (128 + signal.SIGTERM, 128 + NODE_JOINS) and not last_signal():
            return left + 1  # no crash: another node got a signal, and all processes have agreed on it. torch subtracts one
        if code in EXPLAINED - {LOST} or -code in SIGNALS or last_signal():
            return 0
        left = left if progress == before else max_restarts
        if left:
            if reason := reason_of_exit(code, rank):
                print(f"{reason[0].upper()}{reason[1:]}.", flush=True)
            times = f"{max_restarts - left + 1} of {max_restarts} times (--max_restarts)"
            print(f"Starting again from the newest checkpoint, {times}.", flush=True)
        return left

    agent = make_agent(spec, method, restarts_left)

    def forward(number: int, frame: FrameType | None) -> None:
        if agent.pids is None:
            is_first_start = agent.get_worker_group().state == WorkerState.INIT
            exit_for_signal(
                number, frame, "before the training began" if is_first_start else "before the processes started again"
            )
        if number in SIGNALS:
            record_signal(number)
        else:
            time.sleep(1)  # Ctrl-C reaches the processes too, and the first of them prints where it stopped
        agent.send_signal(number)

    set_signal_handler(forward)
    set_interrupt_handler(forward)
    stop_if_signaled()
    result = agent.run()
    if not context.min_nodes or not last_signal():  # else the other nodes go on
        nodes.shutdown()
    if result is None or not result.is_failed():  # None: the run has ended when a node joined
        return 0
    rank, failure = next(iter(result.failures.items()))
    # With restarts the processes print no error; and the one that prints it for its node may be the one that was lost.
    if failure.exitcode == LOST and (max_restarts or failure.local_rank) and not last_signal():
        print(
            f"\nerror: process {rank} lost the connection to another one, which hangs or was killed. The same command resumes "
            "from the newest checkpoint",
            file=sys.stderr,
        )
    return explain_exit(failure.exitcode, None if context.config.distributed_type == "NO" else rank)


def train_in_process(context: Context, flags: list[str], variables: dict[str, str], launcher: int) -> None:
    """What each process that the agent starts does. Ends the process, always."""
    if not os.environ.get(DEBUG_VARIABLE):
        faulthandler.disable()  # the agent's wrapper has enabled it
    if context.config.distributed_type == "NO":
        for name in OF_AGENT:
            os.environ.pop(name, None)
    else:
        context.most_processes = context.processes
        context.processes, context.nodes = int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
        if context.config.is_hybrid:
            variables["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = str(context.processes // context.config.shards)
    try:
        with new_process(variables, launcher):
            run_recipe(context, flags)
    except SystemExit as end:
        sys.exit(end.code or None)  # for the agent, code 0 is a result, after which it would not let the process end
    sys.exit()


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
    elif reason := reason_of_exit(exit_code, rank):
        print(f"error: {reason}", file=sys.stderr)
    return code


def reason_of_exit(exit_code: int, rank: int | None) -> str:
    """Why a process exited, "" if it has printed that itself."""
    code = exit_code if exit_code >= 0 else 128 - exit_code
    if code in EXPLAINED or (rank is None and exit_code >= 0):
        return ""
    return f"process {rank or 0} failed first (exit code {code}){KILLED if code == 137 else '; see its output above'}"


def exit_for_signal(number: int, frame: FrameType | None, moment: str = "before the training began") -> None:
    """A signal handler of a launcher whose processes do not train."""
    record_signal(number)
    if number in SIGNALS:
        print(f"Stopped by {signal.Signals(number).name} {moment}.", file=sys.stderr)
    sys.exit(128 + number)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of Ctrl-C for such a launcher."""
    record_signal(number)
    raise KeyboardInterrupt


def stop_if_signaled() -> None:
    """Stops for a signal that has come, if what its handler raised was lost: a destructor or an import can swallow it."""
    if last_signal() == signal.SIGINT:
        raise KeyboardInterrupt
    if last_signal():
        exit_for_signal(last_signal(), None)


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
        if context.arguments and is_about_a_conversation(error):
            from harness.data.checking import find_refused_row

            if refused := find_refused_row(*context.arguments):
                raise refused from error
        if not context.has_trained:
            raise_if_of_library(error, path)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(3)  # if all processes fail alike, the first one prints its traceback, and the launcher stops the others
            if last_signal():
                sys.exit(1)
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != path:  # from the recipe's own lines on
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def is_about_a_conversation(error: Exception) -> bool:
    """Whether a chat template has failed, with whatever error, or has marked no answer."""
    files = {Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_tb(error.__traceback__)}
    in_subprocess = "chat_template_utils.py" in str(error.__cause__)  # --dataset_num_proc
    is_of_template = "chat_template_utils.py" in files or in_subprocess or type(error).__module__.startswith("jinja2")
    return is_of_template or "has no assistant tokens" in str(error)


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
