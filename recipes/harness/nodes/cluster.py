"""Which nodes a run has, from the variables of SLURM, of SkyPilot or of the user; on SLURM, srun starts the launcher on each."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from types import FrameType

from harness.messages import UserError
from harness.nodes.variables import integer_from_environment
from harness.signals import OUT_OF_TIME, last_signal, record_signal, set_signal_handler

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
    """Reads the environment. Raises UserError if a variable is missing, wrong, or contradicts another."""
    if ":" in os.environ.get("NNODES", ""):
        raise UserError(f"NNODES is {os.environ['NNODES']}, expected one number: a run has a fixed number of nodes")
    if "SLURM_JOB_ID" in os.environ:
        nodes = _slurm_nodes()
    elif "SKYPILOT_NODE_RANK" in os.environ:
        addresses = os.environ.get("SKYPILOT_NODE_IPS", "").split()
        nodes = Nodes(len(addresses), integer_from_environment("SKYPILOT_NODE_RANK", least=0), (addresses or [""])[0])
        nodes.another = addresses[1] if nodes.count > 1 else ""
        nodes.processes = integer_from_environment("SKYPILOT_NUM_GPUS_PER_NODE", 0, least=0)
    else:
        missing = [name for name in ("NNODES", "NODE_RANK", "MASTER_ADDR") if not os.environ.get(name)]
        nodes = Nodes(
            count=integer_from_environment("NNODES", 1),
            rank=integer_from_environment("NODE_RANK", 0, least=0),
            head=os.environ.get("MASTER_ADDR", ""),
        )
        if missing and (nodes.count > 1 or "NODE_RANK" not in missing):
            raise UserError(
                f"{' and '.join(missing)} missing: several machines need NNODES and MASTER_ADDR (the name of the first one), the "
                "same on all, and NODE_RANK, 0 on the first, 1 on the next"
            )
    if nodes.rank not in range(nodes.count):
        raise UserError(f"node rank {nodes.rank} of {nodes.count} nodes: ranks go from 0 to {nodes.count - 1}")
    nodes.processes = integer_from_environment("NPROC_PER_NODE", 0) or nodes.processes
    if nodes.rank:
        nodes.another = nodes.head
    nodes.port = integer_from_environment("MASTER_PORT", nodes.port)
    if nodes.port > 65_535:
        raise UserError(f"MASTER_PORT is {nodes.port}, expected 1 to 65535")
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
    nodes = Nodes(count=integer_from_environment(f"{scope}_NUM_NODES", 1), is_allocation=not is_step)
    nodes.port = 10_000 + integer_from_environment("SLURM_JOB_ID") % 20_000  # below the ports the system gives to clients
    nodes.processes = integer_from_environment("SLURM_GPUS_ON_NODE", 0, least=0)
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE" if is_step else "SLURM_TASKS_PER_NODE", "1")
    if not is_step and not shutil.which("srun"):
        raise UserError("this is a SLURM allocation, but srun is not in PATH: load SLURM's module, or add its folder to PATH")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks) and (is_step or "SLURM_NTASKS" in os.environ):
        raise UserError(
            f"SLURM has {tasks} tasks per node, expected one: launch.sh starts one process per GPU itself. Use "
            "--ntasks-per-node=1"
        )
    if not is_step:
        job = os.environ["SLURM_JOB_ID"]
        _, reason = _run_scontrol("show", "job", job)
        if reason:
            raise UserError(f"SLURM_JOB_ID is {job}, which SLURM does not know ({reason}): unset it outside of a job")
    if is_step:
        nodes.rank = integer_from_environment("SLURM_NODEID", least=0)
    nodes.head = os.environ.get("MASTER_ADDR", "")
    if nodes.count > 1 and not nodes.head:
        node_list = os.environ.get(f"{scope}_NODELIST", "")
        names, reason = _run_scontrol("show", "hostnames", node_list)
        if reason or not names:
            raise UserError(f"cannot read the names of the nodes {node_list} ({reason}): set MASTER_ADDR to the first one's name")
        nodes.head, nodes.another = names[0], names[1]
    return nodes


def _run_scontrol(*arguments: str) -> tuple[list[str], str]:
    """The words that scontrol prints, and the reason if it fails."""
    try:
        process = subprocess.run(["scontrol", *arguments], capture_output=True, text=True)
    except OSError:
        return [], "scontrol is not in PATH"
    reason = " ".join(process.stderr.split()[:40]) or f"exit code {process.returncode}"
    return process.stdout.split(), reason if process.returncode else ""


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
