"""The network between the processes that train: tried before the model loads, explained when it breaks."""

import contextlib
import os
import re
import socket
import sys
import threading
import time

from harness.nodes import signals

LOST = 3  # exit code of a process that lost the others
CAUSES = (
    "Usual causes, and what to set: GPUs that cannot reach each other directly (consumer cards, an IOMMU): NCCL_P2P_DISABLE=1; "
    "the wrong interface: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, one of `ip -br addr`; no working InfiniBand: "
    "NCCL_IB_DISABLE=1; a firewall: allow TCP on all ports among the nodes. NCCL_DEBUG=INFO says more"
)
# What gloo and NCCL say when another process or the line to it is gone.
BROKEN = ("closed by peer", "reset by peer", "Broken pipe", "imed out", "Timeout", "NCCL", "gloo", "No route to host")


def meet(device, seconds: float = 120):
    """All processes add up numbers, within `seconds`; ends this one with the usual causes when that fails. Collective.

    The sum is checked: through an IOMMU, GPUs may reach each other and read the wrong bytes.
    """
    import torch
    import torch.distributed as dist

    with limit(seconds, give_up, f"no answer within {seconds:.0f} s"):
        numbers = torch.full((65_536,), dist.get_rank() + 1.0, device=device)
        try:
            dist.all_reduce(numbers)
            expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
            wrong = int((numbers != expected).sum())
        except RuntimeError as error:
            give_up(error)
        if wrong:
            give_up(f"{wrong} of {len(numbers)} sums were wrong")


@contextlib.contextmanager
def limit(seconds: float, end, reason):
    """Calls `end(reason)` when the block takes longer: from a thread, for torch can hang where no timeout of its own reaches."""
    watch = threading.Timer(seconds, end, [reason])
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()


def give_up(reason: Exception | str):
    """Ends the process with the usual causes of what went wrong between processes that have just started."""
    _end(f"the processes cannot work together: {first_line(reason)}. {CAUSES}")


def explain(error: Exception, step: int, kept):
    """Ends the process with one line when `error` is a lost connection; returns when it is something else."""
    import torch.distributed as dist

    lost = isinstance(error, dist.DistError) or any(word in str(error) for word in BROKEN)
    if lost and dist.is_initialized() and dist.get_world_size() > 1:
        going_on = f"The same command goes on from {kept}." if kept else "No checkpoint was written yet."
        _end(f"another process or the network was lost at step {step} ({first_line(error)}). {going_on}")


def _end(message: str):
    if os.environ.get("LOCAL_RANK", "0") == "0" and not signals.received:  # then the launcher says why the other one went
        print(f"\nerror: {message}", file=sys.stderr, flush=True)
    elif os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # for the one that speaks to be the first to go; if it is the one that is lost, the launcher speaks
    os._exit(LOST)  # without waiting for the others, who cannot be reached


def first_line(error: Exception | str) -> str:
    """What an error says, without the place in gloo's source before it and the guesses after it."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).strip().split("\n")[0]).split(". ")[0][:200]


def address(host: str) -> str:
    """This machine's own address on the way to `host`, '' when there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of a datagram socket: sends nothing
        except OSError:
            return ""
        return probe.getsockname()[0]


def interface(host: str) -> str | None:
    """Name of the network interface on the way to `host`, None when that is this machine itself."""
    import psutil

    own = address(host)
    named = (name for name, addresses in psutil.net_if_addrs().items() if own in {a.address for a in addresses})
    return None if own.startswith("127.") else next(named, None)
