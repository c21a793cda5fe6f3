"""The processes of one machine, one alone or those that train together, watched by torch's elastic launcher."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from multiprocessing import connection

from harness.folder import UNWRITABLE
from harness.nodes import signals
from harness.nodes.network import LOST
from harness.nodes.signals import OUT_OF_TIME, SIGNALS
from harness.start import memory, server, worker

KILLED = (
    ": it was killed, most often by the kernel because the host's memory was full (`dmesg` says so). Ask for more memory "
    "(SLURM: --mem), leave fewer programs beside it, or take a config without fsdp_offload_params"
)


def call(function, *arguments):
    """Runs `function` in a process of its own; returns its exit code (-N: signal N ended it) and what the function returned."""
    context = multiprocessing.get_context(server.method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=worker.answer, args=(sender, _changes(), function, arguments))
    signals.handle(pass_on)
    process.start()
    sender.close()
    answers = []
    while process.is_alive() or not answers:
        try:
            if not answers and connection.wait([receiver, process.sentinel]):
                answers = [receiver.recv()]  # before it ends: a process waits until a large answer is read
            process.join()
        except EOFError:
            answers = [None]
        except KeyboardInterrupt:  # Ctrl-C reaches the process too, which says where it stopped; `kill -INT` does not
            with contextlib.suppress(KeyboardInterrupt, ProcessLookupError):
                process.join(1)
                if process.is_alive():
                    os.kill(process.pid, signal.SIGINT)
    return process.exitcode, answers[0]


def run(path: str, flags: list[str], accelerate: list[str] | None) -> int:
    """Runs a recipe in one process, or in those that `accelerate launch` would start with these arguments, until it ends.

    Returns the exit code, after a line about a process that could not say itself how it ended.
    """
    if accelerate is None:
        code, _ = call(worker.recipe, path, flags)
        return ended(code)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        _elastic(accelerate, path, flags)
    except (KeyboardInterrupt, SignalException) as stopped:
        number = getattr(stopped, "sigval", signal.SIGINT)
        if number != signal.SIGINT:  # Ctrl-C reaches the processes too, and the first of them says where it stopped
            name = signal.Signals(number).name
            print(f"Stopped by {name}. The same command goes on from the newest checkpoint.", file=sys.stderr)
        return 128 + number
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == LOST and failure.local_rank and not signals.received:
            going_on = "The same command goes on from the newest checkpoint"
            print(f"\nerror: process {rank} lost the first one, which hangs or was killed. {going_on}", file=sys.stderr)
        return ended(failure.exitcode, rank)
    return 0


def ended(exit_code: int, rank: int | None = None) -> int:
    """`exit_code` as a shell counts it, after a line about a process that could not say itself how it ended."""
    code = exit_code if exit_code >= 0 else 128 - exit_code
    speaking = {0, 2, LOST, UNWRITABLE, OUT_OF_TIME, memory.EXIT_CODE, *(128 + number for number in SIGNALS)}
    has_said_why = code in speaking or (rank is None and exit_code > 0)
    if signals.received and exit_code == LOST:  # another process was stopped before it could listen
        print(f"Stopped by {signal.Signals(signals.received).name}.", file=sys.stderr)
        return 128 + signals.received
    if -exit_code in SIGNALS:
        print(f"Stopped by {signal.Signals(-exit_code).name} before the training began.", file=sys.stderr)
    elif not has_said_why:
        reason = KILLED if code == 137 else "; see what it printed above"
        print(f"error: process {rank or 0} failed first (exit code {code}){reason}", file=sys.stderr)
    return code


def stop(number, frame):
    """A signal handler of a launcher that trains nothing yet."""
    sys.exit(ended(-number))


def pass_on(number, frame):
    """A signal handler: the processes leave by themselves, after a checkpoint, or finish when they have trained all."""
    if number in SIGNALS:
        signals.received = number
    children = multiprocessing.active_children()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signals.received)
    if not children:  # yet, or any more
        signal.signal(signal.SIGALRM, pass_on)
        signal.setitimer(signal.ITIMER_REAL, 0.2)


def _elastic(accelerate: list[str], path: str, flags: list[str]):
    """`accelerate launch`, except for where the processes come from. Raises ChildFailedError when one fails."""
    from accelerate.commands import launch
    from accelerate.utils.environment import check_cuda_p2p_ib_support
    from torch.distributed import run as torchrun

    # How each process ended is said in one line.
    for talker in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(talker).setLevel(logging.CRITICAL)
    arguments, *_ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([*accelerate, "--log_dir", os.devnull, path])
    )
    os.environ.update(launch.prepare_multi_gpu_env(arguments))
    if not check_cuda_p2p_ib_support():
        for kind in ("P2P", "IB"):
            os.environ.setdefault(f"NCCL_{kind}_DISABLE", "1")
    config, *_ = torchrun.config_from_args(launch._filter_args(arguments, torchrun.get_args_parser(), [path]))
    config.start_method = server.method
    # torchrun would kill the processes 30 s after a SIGTERM; they leave by themselves once their checkpoint is written.
    config.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    signals.handle(pass_on)
    _count_whoever_leaves()
    torchrun.elastic_launch(config, worker.begin)(_changes(), worker.recipe, [path, flags])


def _count_whoever_leaves():
    """torch's launcher waits for an answer from every process, and `os._exit(0)` gives none."""
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    poll = MultiprocessContext._poll

    def poll_and_count(context):
        left = [rank for rank, process in enumerate(context._pc.processes) if process.exitcode == 0]
        result = poll(context)
        for rank in left:
            context._return_values.setdefault(rank, None)
        return result

    MultiprocessContext._poll = poll_and_count


def _changes() -> dict[str, str]:
    """What this process has set in its environment since the server took a copy of it."""
    return {name: value for name, value in os.environ.items() if server.environment.get(name) != value}
