"""Starts the launcher once on every node of a SLURM allocation, and gives a job that ran out of time back to the queue."""

import os
import re
import signal
import subprocess
import sys

from harness.nodes import Nodes

OUT_OF_TIME = 128 + signal.SIGUSR1  # how the launcher ends after the warning that `#SBATCH --signal` asks for


def run(nodes: Nodes, arguments: list[str]) -> int:
    """Runs `python -m harness.launch` with `arguments` through srun; returns its exit code."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # SLURM tells the steps too; this process waits for them
    command = ["srun", f"--nodes={nodes.count}", f"--ntasks={nodes.count}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    cpus = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    if cpus:
        command.append(f"--cpus-per-task={min(cpus)}")  # one task a node: it gets what the job has there
    code = subprocess.run([*command, sys.executable, "-m", "harness.launch", *arguments]).returncode
    if code == OUT_OF_TIME:
        job = os.environ["SLURM_JOB_ID"]
        print(f"Job {job} goes back to the queue and will continue from its newest checkpoint.", flush=True)
        if subprocess.run(["scontrol", "requeue", job]).returncode:
            print(f"error: job {job} cannot be requeued: submit the same command again", file=sys.stderr)
    return code
