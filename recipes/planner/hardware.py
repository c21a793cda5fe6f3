"""What this machine has: its GPUs, from nvidia-smi, and its host memory. Without torch."""

import math
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from harness.nodes.variables import integer_from_environment


class Gpu(NamedTuple):
    memory: float  # bytes
    name: str
    capability: float  # compute capability
    index: int  # of nvidia-smi


def find_gpus() -> list[Gpu]:
    """Every GPU that a run may use, from nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    selection = [f"--id={visible}"] if visible else []
    listed = ask_nvidia_smi("--query-gpu=name,memory.total,compute_cap,index", "--format=csv,noheader,nounits", *selection)
    gpus = []
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.rsplit(",", 3)]
        if len(cells) == 4 and cells[1].isdecimal():  # a GPU without memory of its own has no number
            gpus.append(Gpu(float(cells[1]) * 2**20, cells[0], float(cells[2]), int(cells[3])))
    return gpus[: integer_from_environment("NPROC_PER_NODE", len(gpus))]


def ask_nvidia_smi(*options: str) -> str:
    """What nvidia-smi prints, "" if it is not there or fails."""
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def host_memory() -> float:
    """Bytes of host memory, or those that a container or a SLURM job may use."""
    import psutil

    return min(psutil.virtual_memory().total, memory_limit())


def memory_limit(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """The smallest memory limit of this process's control groups, in bytes; infinity without one. Source: cgroups(7)."""
    limits = [math.inf]
    for line in process.read_text("utf-8").splitlines() if process.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):  # "": version 2, with all controllers
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        own = top / group.lstrip("/")
        for folder in (own, *own.parents):
            text = (folder / name).read_text("utf-8").strip() if (folder / name).is_file() else ""
            limits.append(int(text) if text.isdecimal() else math.inf)
    return min(limits)
