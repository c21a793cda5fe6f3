"""Starts a run on this machine: `python RECIPE` once for each of its GPUs, and passes signals on to these processes.

    python -m harness.start.launch [--tiny] RECIPE CONFIG [--max_restarts N] [--flag value …]

It imports neither transformers nor TRL, and does not read the recipe. Several processes are started, and after a crash started
again, by torch's elastic agent. One process without torch.distributed is a child of this one.
"""

import signal

from harness.launched import SIGNALS, last_signal, record_signal, set_interrupt_handler, set_signal_handler

if __name__ == "__main__":
    set_interrupt_handler(signal.SIG_DFL)  # while modules are imported: they can swallow a KeyboardInterrupt

import argparse
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from harness import configs
from harness.configs import AccelerateConfig
from harness.launched import EXIT_CODE, STARTED, STOPPED, Launched, read_number, write_number
from harness.messages import DEBUG_VARIABLE, UserError, exit_on_user_error, last_line, one_message, plural
from harness.nodes.cluster import Nodes, nodes_from_environment, run_with_srun
from harness.nodes.hardware import physical_cores
from harness.nodes.network import LOST, UNREACHABLE, interface_to, own_address
from harness.nodes.variables import integer_from_environment, seconds_to_wait
from harness.run.failures import HOST_ADVICE
from harness.runs import rehearsal_hint
from harness.start.environment import set_environment

import psutil

KILLED = (
    f": it was killed, usually by the kernel because the host's memory was full (`dmesg` shows it): {HOST_ADVICE}. The same "
    "command resumes from the last checkpoint"
)


def main(words: list[str]) -> int:
    """Trains on this node. In a SLURM allocation, it starts itself on every node with srun instead.

    `words`: [--tiny] RECIPE CONFIG, then the flags of the recipe. Returns the exit code.
    """
    tiny = words[:1] == ["--tiny"]
    recipe, config_path, *arguments = words[tiny:]
    config = configs.read(config_path)
    nodes = nodes_from_environment()
    per_node = count_processes(recipe, config, nodes, tiny)
    if nodes.is_allocation:
        return run_with_srun(nodes, words)
    max_restarts, arguments = take_max_restarts(arguments)
    set_environment(tiny, config.gpu_ids)
    set_environment_of_processes(recipe, config, nodes, per_node, tiny)
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    try:
        os.environ.update(Launched(config_path, tiny, nodes.count, os.getpid(), str(folder)).variables())
        forward_signals(folder)
        command = [sys.executable, recipe, *arguments]
        if config.distributed_type == "NO":
            code = run_one_process(command, max_restarts, folder)
            rank = None
        else:
            code, rank = run_processes(command, nodes, per_node, max_restarts)
        set_signal_handler(signal.SIG_IGN)  # the run has ended
        set_interrupt_handler(signal.SIG_IGN)
        recorded = read_number(folder / EXIT_CODE)
        if recorded is None:
            return explain_exit(code, rank)
        return recorded
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def count_processes(recipe: str, config: AccelerateConfig, nodes: Nodes, tiny: bool) -> int:
    """How many processes run on each node. Raises UserError if these are not the machines for the config."""
    if config.distributed_type == "NO":
        if nodes.count > 1 or integer_from_environment("NPROC_PER_NODE", 1) > 1:  # each would train a run of its own
            raise UserError(f"{config.name} trains on one GPU of one machine: use a config for several GPUs")
        return 1
    machines = config.num_machines
    if tiny and nodes.count == 1:  # a rehearsal runs all processes on this machine
        machines = 1
    gpus = nodes.processes or config.num_processes // machines  # per machine
    fits = nodes.count > 1 or machines == 1
    if config.is_hybrid:
        has_whole_nodes = nodes.count == 1 or config.shards % gpus == 0 or gpus % config.shards == 0  # or a replica has nodes
        fits = fits and nodes.count * gpus == config.replicas * config.shards and has_whole_nodes
    if not fits:
        raise UserError(
            f"{config.name} is for {plural(config.num_processes, 'GPU')} of {config.num_machines} machines, this is "
            f"{plural(nodes.count, 'machine')} with {plural(gpus, 'GPU')} each: start it on each with NNODES="
            f"{config.num_machines} NODE_RANK=… MASTER_ADDR=…, or with sbatch --nodes {config.num_machines} (NPROC_PER_NODE: "
            f"GPUs of each). {rehearsal_hint(recipe, config)}"
        )
    return gpus


def take_max_restarts(arguments: list[str]) -> tuple[int, list[str]]:
    """The value of --max_restarts, 0 without the flag, and the other flags: the recipe does not have this one."""
    parser = argparse.ArgumentParser("launch.sh", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.add_argument("--max_restarts", "--max-restarts", type=int, default=0)
    found, rest = parser.parse_known_args(arguments)
    return found.max_restarts, rest


def set_environment_of_processes(recipe: str, config: AccelerateConfig, nodes: Nodes, per_node: int, tiny: bool) -> None:
    """Sets what the processes inherit."""
    # Modules next to the recipe. Python would add their folder itself, but for PYTHONSAFEPATH.
    paths = [str(Path(recipe).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # accelerate sets one thread per process. An optimizer on the CPU (offload) needs every core, a rehearsal only one.
    threads = 1 if tiny else max(1, physical_cores() // per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    reached = "127.0.0.1" if nodes.count == 1 else nodes.another
    if reached and (interface := interface_to(reached)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo takes the one that the machine's name resolves to
        if nodes.count == 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # NCCL would listen at that of another interface
    if config.distributed_type == "NO":
        # With several visible GPUs, transformers would wrap the model in nn.DataParallel.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def forward_signals(folder: Path) -> None:
    """Passes signals on to the processes as they are, so that a checkpoint is not cut off. `folder`: of `Launched`."""

    passing_on: set[int] = set()

    def forward(number: int, frame: FrameType | None) -> None:
        if number in passing_on:  # it came again meanwhile
            return
        passing_on.add(number)
        record_signal(number)
        write_number(folder / STOPPED, number)  # ends processes that are being started
        children = psutil.Process().children()
        if number == signal.SIGINT:
            time.sleep(0.5)  # Ctrl-C reaches a single process too, and that prints where it stopped
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)
        if not children and not (folder / STARTED).exists():  # a node that waits for the others
            print(f"Stopped by {signal.Signals(number).name} before the training began.", file=sys.stderr, flush=True)
            os._exit(128 + number)
        passing_on.discard(number)

    set_signal_handler(forward)
    set_interrupt_handler(forward)


def run_one_process(command: list[str], max_restarts: int, folder: Path) -> int:
    """Runs a process, again after a crash; returns its exit code, -N for signal N."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(max_restarts)  # as torch's agent does
    for restarts in range(max_restarts + 1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        code = subprocess.Popen(command).wait()
        if code == 0 or read_number(folder / EXIT_CODE) is not None or last_signal():
            break
    return code


def run_processes(command: list[str], nodes: Nodes, per_node: int, max_restarts: int) -> tuple[int, int]:
    """Runs the processes of this node; returns exit code and rank of the first one that failed, or zeros."""
    from harness.nodes.rendezvous import ONE_NODE

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not os.environ.get(DEBUG_VARIABLE):
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the messages here replace them
    config = LaunchConfig(
        nodes.count,
        nodes.count,
        per_node,
        run_id="run",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",  # the others are passed on; torch would kill the processes 30 s later
        rdzv_backend=ONE_NODE if nodes.count == 1 else "c10d",
    )
    if nodes.count > 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # processes that start again need a store of their own
        config.rdzv_endpoint = f"{nodes.head}:{nodes.port}"
        config.rdzv_configs |= {"is_host": nodes.rank == 0, "join_timeout": seconds_to_wait()}
        own = own_address(nodes.head)
        config.local_addr = nodes.head if own.startswith("127.") else own  # the name of the head can be that of its loopback
        print(f"Node {nodes.rank} of {nodes.count} meets the others at {config.rdzv_endpoint}.", flush=True)
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return failure.exitcode, rank
    except RendezvousTimeoutError as error:
        raise UserError(
            f"waited {seconds_to_wait()} s (NODE_WAIT) for {plural(nodes.count - 1, 'other node')}: start all nodes with the "
            "same NNODES, MASTER_ADDR and MASTER_PORT"
        ) from error
    except (RendezvousError, DistError) as error:
        print(f"error: {nodes.head}:{nodes.port} cannot be reached: {last_line(error)}", file=sys.stderr)
        return UNREACHABLE, 0
    return 0, 0


def explain_exit(exit_code: int, rank: int | None) -> int:
    """The exit code for the shell, after a message: the process could not print one itself.

    `exit_code`: of the first process that failed, -N for signal N. `rank`: None for a single process.
    """
    code = exit_code if exit_code >= 0 else 128 - exit_code
    if last_signal() and exit_code in (LOST, -signal.SIGKILL):  # another process was stopped before it could record the signal
        code = exit_code = 128 + last_signal()
    if code - 128 in SIGNALS:  # training has a handler, with which the process exits by itself
        print(f"Stopped by {signal.Signals(code - 128).name}.", file=sys.stderr)
    elif exit_code < 0 or (rank is not None and code not in (0, 128 + signal.SIGINT, LOST, UNREACHABLE)):
        print(f"error: process {rank or 0} failed first (exit code {code}){KILLED if code == 137 else ''}", file=sys.stderr)
    return code


if __name__ == "__main__":
    with exit_on_user_error(), one_message():
        sys.exit(main(sys.argv[1:]))
