"""Which nodes a run has, from the variables of SLURM or of the user; on SLURM, srun starts the launcher on each."""

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from types import FrameType

from harness.launched import OUT_OF_TIME, last_signal, record_signal, set_signal_handler
from harness.messages import UserError
from harness.nodes.variables import integer_from_environment

DEFAULT_PORT = 29400


@dataclass
class Nodes:
    """The machines of a run, as seen from one of them. The defaults are one machine."""

    count: int = 1
    rank: int = 0  # of this machine; 0 is the head
    head: str = ""  # name or address at which the others reach machine 0
    port: int = DEFAULT_PORT  # of the head, where the nodes meet
    another: str = ""  # name or address of another machine, "" if it is not known
    processes: int = 0  # on each machine; 0: as many as the config says
    is_allocation: bool = False  # a SLURM allocation in which `srun` has not started this process


def nodes_from_environment() -> Nodes:
    """Reads the environment. Raises UserError for what contradicts: nodes would wait for others that never come."""
    if "SLURM_JOB_ID" in os.environ:
        nodes = _slurm_nodes()
    else:
        rank = integer_from_environment("NODE_RANK", 0, least=0)
        nodes = Nodes(integer_from_environment("NNODES", 1), rank, os.environ.get("MASTER_ADDR", ""))
        if nodes.count > 1 and not (nodes.head and "NODE_RANK" in os.environ):
            raise UserError(
                "several machines need NNODES and MASTER_ADDR (the name of the first one), the same on all, and NODE_RANK, 0 on "
                "the first, 1 on the next"
            )
    if nodes.rank >= nodes.count:
        raise UserError(f"node rank {nodes.rank} of {nodes.count} nodes: ranks go from 0 to {nodes.count - 1}")
    nodes.processes = integer_from_environment("NPROC_PER_NODE", 0) or nodes.processes
    nodes.port = integer_from_environment("MASTER_PORT", nodes.port)
    if nodes.rank:
        nodes.another = nodes.head
    # The login host of a SLURM cluster may not know the names of its nodes.
    if nodes.count > 1 and (not nodes.is_allocation or "SLURMD_NODENAME" in os.environ):
        try:
            socket.getaddrinfo(nodes.head, nodes.port)
        except OSError as error:
            raise UserError(
                f"MASTER_ADDR: the head node {nodes.head} does not resolve ({error.strerror}): give its name or address, "
                "without a port"
            ) from error
    return nodes


def _slurm_nodes() -> Nodes:
    """The nodes of a SLURM step (`srun` started this process) or of an allocation (a batch script, a shell in `salloc`)."""
    is_step = "SLURM_STEP_ID" in os.environ
    scope = "SLURM_STEP" if is_step else "SLURM_JOB"
    nodes = Nodes(integer_from_environment(f"{scope}_NUM_NODES", 1), head=os.environ.get("MASTER_ADDR", ""))
    nodes.is_allocation = not is_step
    nodes.port = 10_000 + integer_from_environment("SLURM_JOB_ID") % 20_000  # below the ports the system gives to clients
    nodes.processes = integer_from_environment("SLURM_GPUS_ON_NODE", 0, least=0)
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE" if is_step else "SLURM_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks) and (is_step or "SLURM_NTASKS" in os.environ):
        raise UserError(
            f"SLURM has {tasks} tasks per node, expected one: launch.sh starts one process per GPU itself. Use "
            "--ntasks-per-node=1"
        )
    if is_step:
        nodes.rank = integer_from_environment("SLURM_NODEID", least=0)
    if nodes.count > 1 and not nodes.head:
        command = ["scontrol", "show", "hostnames", os.environ[f"{scope}_NODELIST"]]
        names = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        nodes.head = names[0]
        nodes.another = names[1]
    return nodes


def run_with_srun(nodes: Nodes, arguments: list[str]) -> int:
    """Starts the launcher once on every node of a SLURM allocation; returns the highest exit code of all nodes.

    A job that ran out of time, and has a checkpoint, goes back to the queue.
    """
    command = ["srun", f"--nodes={nodes.count}", f"--ntasks={nodes.count}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    cpus = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    if cpus:
        command.append(f"--cpus-per-task={min(cpus)}")  # the one task gets all the CPUs that the job has on a node
    started: list[subprocess.Popen] = []

    def forward(number: int, frame: FrameType | None) -> None:
        record_signal(number)
        for srun in started:
            srun.send_signal(number)  # srun sends it on to the nodes

    set_signal_handler(forward)
    started.append(subprocess.Popen([*command, sys.executable, "-m", "harness.start.launch", *arguments]))
    if last_signal():  # it came before srun was started
        forward(last_signal(), None)
    code = started[0].wait()
    job = os.environ["SLURM_JOB_ID"]
    if code == 128 + signal.SIGUSR1:
        print("error: out of time before the first checkpoint: give the job more --time", file=sys.stderr)
    if code == OUT_OF_TIME:
        print(f"Job {job} goes back to the queue and will resume from its newest checkpoint.", flush=True)
        if subprocess.run(["scontrol", "requeue", job]).returncode:
            print(f"error: job {job} cannot be requeued: submit the same command again", file=sys.stderr)
    return code
