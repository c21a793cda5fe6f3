"""The network between the processes of a run: the check at its start, lost connections, addresses and interfaces."""

import contextlib
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from harness.launched import end_run, last_signal
from harness.messages import UserError, die, is_first_process, last_line

T = TypeVar("T")
# Exit codes of a process that lost the others, and of one that could not reach them at the start.
LOST = 3
UNREACHABLE = 4
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


def values_of_nodes(find: Callable[[], Any]) -> list[Any]:
    """What `find` returns in the first process of each node, by the rank of the node. Collective.

    The first process of the run waits for the nodes; the others return []. `find` returns what JSON can have.
    """
    if not is_of_several():
        return [find()]
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return []
    store = _store_of_run()
    store.set(f"node/{os.environ.get('GROUP_RANK', '0')}", json.dumps(find()))
    if not is_first_process():
        return []
    keys = [f"node/{node}" for node in range(int(os.environ.get("GROUP_WORLD_SIZE", "1")))]
    while not store.check(keys):
        time.sleep(0.1)
    return [json.loads(store.get(key)) for key in keys]


def answer_of_first(question: str, find: Callable[[], T], first_of_node: bool = False) -> T:
    """What `find` returns in the first process, on all processes. They wait for it without a time limit.

    If it raises UserError or exits, the others exit with the same code, without a message. `find` returns what JSON can have.
    `question`: a name that no other question of the run has. `first_of_node`: the first process of each node, for those of the
    node.
    """
    if not is_of_several():
        return find()
    node = os.environ.get("GROUP_RANK", "0") if first_of_node else "all"
    is_first = os.environ["LOCAL_RANK" if first_of_node else "RANK"] == "0"
    readers = int(os.environ["LOCAL_WORLD_SIZE" if first_of_node else "WORLD_SIZE"]) - 1
    store = _store_of_run()
    answer = f"answer/{question}/{node}"
    read = f"read/{question}/{node}"
    if is_first:
        content: dict[str, Any] = {"exit_code": None}  # of other exceptions, whose code only this process knows
        try:
            content = {"value": find()}
        except UserError:
            content = {"exit_code": 2}
            raise
        except SystemExit as end:
            content = {"exit_code": end.code or 0}
            raise
        finally:
            store.set(answer, json.dumps(content))
            if "exit_code" in content:
                _wait_until(lambda: store.add(read, 0) >= readers, seconds=30)  # the store may end with this process
        return content["value"]
    try:
        _wait_until(lambda: store.check([answer]))
        content = json.loads(store.get(answer))
        store.add(read, 1)
    except RuntimeError as error:
        exit_with_causes(error)
    if "exit_code" in content:
        is_of_other_node = node == "all" and os.environ.get("GROUP_RANK", "0") != "0"
        end_run(content["exit_code"], is_of_other_node)  # which this process only records if it is known
    return content["value"]


def is_of_several() -> bool:
    """Whether this process is one of several of a run. They need not be connected yet."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _store_of_run() -> Any:
    import torch.distributed as dist

    try:
        return next(dist.rendezvous("env://"))[0]
    except RuntimeError as error:
        exit_with_causes(error)


def _wait_until(is_done: Callable[[], bool], seconds: float = math.inf) -> None:
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.1)


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
    _exit(f"the processes cannot communicate: {last_line(reason)}. {CAUSES}", UNREACHABLE)


def exit_if_connection_lost(error: Exception, step: int | None = None, resume: str = "") -> None:
    """Exits with one message if `error` is a lost connection to another process; returns if it is something else.

    `step`: None before the training. `resume`: what to do then.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and FROM_GLOO.search(str(error))):
        place = "" if step is None else f" at step {step}"
        lost = f"the connection to another process was lost{place} ({last_line(error)})"
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
            _exit(lost, LOST, is_error=False)
        _exit(f"{lost}. {resume}".strip(), LOST)


def _exit(message: str, code: int, is_error: bool = True) -> NoReturn:
    """Exits without waiting for the others, which cannot be reached. The first process of each node prints the message."""
    time.sleep(1)  # if another process of this node has failed, the launcher sees it first, and sends a signal
    if last_signal():  # the launcher says why the other process exited
        os._exit(code)
    die(message, code, is_error=is_error, is_final=code != LOST)


def own_address(host: str) -> str:
    """This machine's address on the route to `host`, "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket sends nothing when it connects
        except OSError:
            return ""
        return probe.getsockname()[0]


def interface_to(host: str) -> str | None:
    """The name of the network interface on the route to `host`, None if it is not known."""
    import psutil

    own = own_address(host)
    for name, addresses in psutil.net_if_addrs().items():
        if own in {address.address for address in addresses}:
            return name
    return None
