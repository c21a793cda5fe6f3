"""Starts the launcher once on every node of a SLURM allocation, and gives a job that ran out of time back to the queue."""

import os
import re
import signal
import subprocess
import sys

from harness.nodes import signals
from harness.nodes.machines import Nodes


def run(nodes: Nodes, arguments: list[str]) -> int:
    """Runs `python -m harness.start.launch` with `arguments` through srun; returns its exit code."""
    command = ["srun", f"--nodes={nodes.count}", f"--ntasks={nodes.count}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    cpus = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    if cpus:
        command.append(f"--cpus-per-task={min(cpus)}")  # one task a node: it gets what the job has there
    started = []

    def pass_on(number, frame):
        signals.received = number
        for srun in started:
            srun.send_signal(number)  # which passes it on to the nodes

    signals.handle(pass_on)
    started.append(subprocess.Popen([*command, sys.executable, "-m", "harness.start.launch", *arguments]))
    if signals.received:
        pass_on(signals.received, None)
    code = started[0].wait()
    job = os.environ["SLURM_JOB_ID"]
    if code == 128 + signal.SIGUSR1:
        print("error: out of time before there was a checkpoint to go on from: give the job more --time", file=sys.stderr)
    if code == signals.OUT_OF_TIME:
        print(f"Job {job} goes back to the queue and will continue from its newest checkpoint.", flush=True)
        if subprocess.run(["scontrol", "requeue", job]).returncode:
            print(f"error: job {job} cannot be requeued: submit the same command again", file=sys.stderr)
    return code
