"""What this machine has: its GPUs, from nvidia-smi, and its host memory. Without torch."""

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


def host_memory(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of host memory, or those that a container or a SLURM job may use (cgroups(7), version 2)."""
    import psutil

    limits = [psutil.virtual_memory().total]
    group = Path("/proc/self/cgroup").read_text("utf-8").rpartition("::")[2].strip()
    own = root / group.lstrip("/")
    for file in (own / "memory.max", *(folder / "memory.max" for folder in own.parents)):
        if file.is_file() and (text := file.read_text("utf-8").strip()).isdecimal():
            limits.append(int(text))
    return min(limits)
