"""What this node has: physical cores; and which file systems are its own."""

import os
from pathlib import Path

LOCAL_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}  # file systems


def physical_cores() -> int:
    """Physical cores that this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable)


def is_on_local_disk(folder: Path) -> bool:
    """Whether a folder is on a file system that belongs to this machine alone. False if that is unknown."""
    import psutil

    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    return next((mounts[parent] in LOCAL_DISKS for parent in (place, *place.parents) if parent in mounts), False)
