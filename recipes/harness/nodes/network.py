"""The network between the processes of a run: the check at its start, lost connections, addresses and interfaces."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from harness import contexts
from harness.messages import die
from harness.signals import last_signal

# Exit codes of a process that lost the others, and of one that could not reach them at the start.
LOST, UNREACHABLE = 3, 4
CAUSES = (
    "Usual causes, and the variable to set: GPUs that cannot reach each other directly (consumer cards, an IOMMU): "
    "NCCL_P2P_DISABLE=1; the wrong interface: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, one of `ip -br addr`; no working "
    "InfiniBand: NCCL_IB_DISABLE=1; a firewall: allow TCP on all ports between the nodes. NCCL_DEBUG=INFO prints more"
)
# gloo raises RuntimeError with the place in its source: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection …
FROM_GLOO = re.compile(r"\[[^\]]*gloo[^\]]*:\d+\]")


def check_all_reduce(device: Any, seconds: float = 120) -> None:
    """All processes all-reduce some numbers within `seconds`. Exits with the usual causes if that fails. Collective.

    The sum is checked too: behind an IOMMU, GPUs can reach each other and read the wrong bytes.
    """
    import torch
    import torch.distributed as dist

    with time_limit(seconds, exit_with_causes, f"no answer within {seconds:.0f} s"):
        numbers = torch.full((65_536,), dist.get_rank() + 1.0, device=device)
        try:
            dist.all_reduce(numbers)
            expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
            wrong = int((numbers != expected).sum())
        except RuntimeError as error:
            exit_with_causes(error)
        if wrong:
            exit_with_causes(f"{wrong} of {len(numbers)} sums were wrong")


def wait_for_first_process() -> None:
    """Waits until the first process calls this too, however long it checks a run and quantizes its model. Collective."""
    import torch.distributed as dist

    try:
        store, rank, _ = next(dist.rendezvous("env://"))
        if rank == 0:
            store.set("first process is ready", "")
        while not store.check(["first process is ready"]):
            time.sleep(0.5)
    except RuntimeError as error:
        exit_with_causes(error)


@contextlib.contextmanager
def time_limit(seconds: float, stop: Callable[[Any], None], argument: Any) -> Iterator[None]:
    """Calls `stop(argument)` from a thread if the block takes longer: torch can hang where its own timeouts do not apply."""
    timer = threading.Timer(seconds, stop, [argument])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def exit_with_causes(reason: Exception | str) -> NoReturn:
    """Exits because processes that have just started cannot communicate."""
    context, message = contexts.current(), f"the processes cannot communicate: {first_line(reason)}. {CAUSES}"
    if _can_start_again() and context and context.min_nodes:  # a node may be lost
        _exit(message, LOST, is_error=False)
    _exit(message, UNREACHABLE)


def exit_if_connection_lost(error: Exception, step: int | None = None, resume: str = "") -> None:
    """Exits with one message if `error` is a lost connection to another process; returns if it is something else.

    `step`: None before the training. `resume`: what to do then.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and FROM_GLOO.search(str(error))):
        place = "" if step is None else f" at step {step}"
        lost = f"the connection to another process was lost{place} ({first_line(error)})"
        if _can_start_again():
            _exit(lost, LOST, is_error=False)
        _exit(f"{lost}. {resume}".strip(), LOST)


def _can_start_again() -> bool:
    """Whether the launcher may start the processes again. If it does not, it prints the error."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _exit(message: str, code: int, is_error: bool = True) -> NoReturn:
    """Exits without waiting for the others, which cannot be reached. The first process of each node prints the message."""
    time.sleep(1)  # if another process of this node has failed, the launcher sees it first, and sends a signal
    if last_signal():  # the launcher says why the other process exited
        os._exit(code)
    die(message, code, is_error=is_error)


def first_line(error: Exception | str) -> str:
    """The first sentence of an error, without the place in gloo's source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).strip().split("\n")[0]).split(". ")[0][:200]


def own_address(host: str) -> str:
    """This machine's address on the route to `host`, "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket sends nothing when it connects
        except OSError:
            return ""
        return probe.getsockname()[0]


def interface_to(host: str) -> str | None:
    """The name of the network interface on the route to `host`, None if that is the loopback interface or not known."""
    own = own_address(host)
    return None if own.startswith("127.") else interface_of(own)


def interface_of(own: str) -> str | None:
    """The name of the network interface that has this address, None if it is not known."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if own in {address.address for address in addresses}:
            return name
    return None
