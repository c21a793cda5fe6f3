"""Which machines a run has: from SLURM, from SkyPilot, or from NNODES, NODE_RANK and MASTER_ADDR."""

import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass

from harness.launched import fail

PORT = 29400


@dataclass
class Nodes:
    """The machines of a run, as seen from one of them. The defaults are one machine, alone."""

    count: int = 1
    rank: int = 0  # of this machine; 0 is the head
    head: str = "127.0.0.1"  # name or address at which the others find machine 0
    port: int = PORT  # of the head, where all meet
    processes: int = 0  # on each machine; 0: as many as the config says
    is_allocation: bool = False  # a SLURM allocation in which nothing was started yet


def from_environment() -> Nodes:
    """What the environment says. Ends the process with one line when it contradicts itself."""
    if "SLURM_JOB_ID" in os.environ:
        nodes = _slurm()
    elif "SKYPILOT_NODE_RANK" in os.environ:
        addresses = os.environ.get("SKYPILOT_NODE_IPS", "").split()
        nodes = Nodes(len(addresses), number("SKYPILOT_NODE_RANK"), (addresses or [""])[0])
        nodes.processes = number("SKYPILOT_NUM_GPUS_PER_NODE", 0)
    else:
        nodes = Nodes(number("NNODES", 1), number("NODE_RANK", 0), os.environ.get("MASTER_ADDR", ""))
        nodes.processes = number("NPROC_PER_NODE", 0)
        if nodes.count > 1 and ("NODE_RANK" not in os.environ or not nodes.head):
            fail(
                f"NNODES is {nodes.count}: also give NODE_RANK (0 on the first machine, 1 on the next) and MASTER_ADDR "
                "(the first machine's name), the same on all of them"
            )
    if nodes.count < 1 or nodes.rank not in range(nodes.count):
        fail(f"node rank {nodes.rank} of {nodes.count} nodes: ranks go from 0 to {nodes.count - 1}")
    nodes.port = number("MASTER_PORT", nodes.port)
    if nodes.count > 1:
        try:
            socket.getaddrinfo(nodes.head, nodes.port)
        except OSError as error:
            fail(f"the head node {nodes.head} does not resolve ({error.strerror}): set MASTER_ADDR to an address of it")
    return nodes


def number(variable: str, default: int | None = None) -> int:
    value = os.environ.get(variable) or default
    if not re.fullmatch(r"\d+", str(value)):
        fail(f"{variable} is {value!r}, expected a whole number")
    return int(value)


def _slurm() -> Nodes:
    """A step (`srun` has started this process) or the allocation as a whole (a batch script, a shell in `salloc`)."""
    is_step = "SLURM_STEP_ID" in os.environ
    scope = "SLURM_STEP" if is_step else "SLURM_JOB"
    nodes = Nodes(count=number(f"{scope}_NUM_NODES", 1), is_allocation=not is_step)
    nodes.port = 10_000 + number("SLURM_JOB_ID") % 20_000  # below the range the system gives to clients
    nodes.processes = number("SLURM_GPUS_ON_NODE", 0) or number("NPROC_PER_NODE", 0)
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE" if is_step else "SLURM_TASKS_PER_NODE", "1")
    if not is_step and not shutil.which("srun"):
        fail("this is a SLURM allocation, but srun is not in PATH: load SLURM's module, or add its folder")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks) and (is_step or "SLURM_NTASKS" in os.environ):
        fail(f"SLURM has {tasks} tasks a node, launch.sh wants one and starts a process for each GPU itself: --ntasks-per-node=1")
    if is_step:
        nodes.rank = number("SLURM_NODEID")
    nodes.head = os.environ.get("MASTER_ADDR", "")
    if nodes.count > 1 and not nodes.head:
        listed = os.environ.get(f"{scope}_NODELIST", "")
        names = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True)
        if names.returncode or not names.stdout.split():
            fail(f"scontrol cannot tell the names of {listed}: {names.stderr}")
        nodes.head = names.stdout.split()[0]
    return nodes
