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
        nodes = Nodes(len(addresses), number("SKYPILOT_NODE_RANK", least=0), (addresses or [""])[0])
        nodes.processes = number("SKYPILOT_NUM_GPUS_PER_NODE", 0, least=0)
    else:
        absent = [name for name in ("NNODES", "NODE_RANK", "MASTER_ADDR") if not os.environ.get(name)]
        nodes = Nodes(number("NNODES", 1), number("NODE_RANK", 0, least=0), os.environ.get("MASTER_ADDR", ""))
        if absent and (nodes.count > 1 or "NODE_RANK" not in absent):
            fail(
                f"{' and '.join(absent)} missing: several machines need NNODES and MASTER_ADDR (the first one's name), the "
                "same on all, and NODE_RANK, 0 on the first, 1 on the next"
            )
    if nodes.rank not in range(nodes.count):
        fail(f"node rank {nodes.rank} of {nodes.count} nodes: ranks go from 0 to {nodes.count - 1}")
    nodes.processes = number("NPROC_PER_NODE", 0) or nodes.processes
    nodes.port = number("MASTER_PORT", nodes.port)
    if nodes.port > 65_535:
        fail(f"MASTER_PORT is {nodes.port}, expected 1 to 65535")
    if nodes.count > 1 and (not nodes.is_allocation or "SLURMD_NODENAME" in os.environ):  # a login host need not know it
        try:
            socket.getaddrinfo(nodes.head, nodes.port)
        except OSError as error:
            fail(
                f"the head node {nodes.head} does not resolve ({error.strerror}): set MASTER_ADDR to its name or address, "
                "without a port"
            )
    return nodes


def number(variable: str, default: int | None = None, least: int = 1) -> int:
    """A whole number from the environment; the default is not checked."""
    value = os.environ.get(variable)
    if value is None and default is not None:
        return default
    if not re.fullmatch(r"\d{1,9}", value or "") or int(value) < least:
        fail(f"{variable} is {value!r}, expected a whole number from {least}")
    return int(value)


def _slurm() -> Nodes:
    """A step (`srun` has started this process) or the allocation as a whole (a batch script, a shell in `salloc`)."""
    is_step = "SLURM_STEP_ID" in os.environ
    scope = "SLURM_STEP" if is_step else "SLURM_JOB"
    nodes = Nodes(count=number(f"{scope}_NUM_NODES", 1), is_allocation=not is_step)
    nodes.port = 10_000 + number("SLURM_JOB_ID") % 20_000  # below the range the system gives to clients
    nodes.processes = number("SLURM_GPUS_ON_NODE", 0, least=0)
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE" if is_step else "SLURM_TASKS_PER_NODE", "1")
    if not is_step and not shutil.which("srun"):
        fail("this is a SLURM allocation, but srun is not in PATH: load SLURM's module, or add its folder")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks) and (is_step or "SLURM_NTASKS" in os.environ):
        fail(f"SLURM has {tasks} tasks a node, launch.sh wants one and starts a process for each GPU itself: --ntasks-per-node=1")
    if not is_step:
        job = os.environ["SLURM_JOB_ID"]
        if reason := _scontrol("show", "job", job)[1]:
            fail(f"SLURM_JOB_ID says that this is job {job}, and SLURM does not ({reason}): outside of a job, unset it")
    if is_step:
        nodes.rank = number("SLURM_NODEID", least=0)
    nodes.head = os.environ.get("MASTER_ADDR", "")
    if nodes.count > 1 and not nodes.head:
        listed = os.environ.get(f"{scope}_NODELIST", "")
        names, reason = _scontrol("show", "hostnames", listed)
        if reason or not names:
            fail(f"the names of the nodes {listed} cannot be told ({reason}): set MASTER_ADDR to the first one's")
        nodes.head = names[0]
    return nodes


def _scontrol(*arguments: str) -> tuple[list[str], str]:
    """The words that scontrol answers, and why it does not."""
    try:
        process = subprocess.run(["scontrol", *arguments], capture_output=True, text=True)
    except OSError:
        return [], "scontrol is not in PATH"
    reason = " ".join(process.stderr.split()[:40]) or f"exit code {process.returncode}"
    return process.stdout.split(), reason if process.returncode else ""


def cores() -> int:
    """Physical cores this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(psutil.cpu_count(logical=False) or usable, usable)
