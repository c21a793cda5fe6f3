"""Where the processes of a run meet, for torch's elastic agent; those of a single node where other machines cannot connect."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

from harness.messages import plural
from harness.nodes.meeting import Meeting

from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

LAST_CALL = 5  # seconds for more nodes to join a round that has enough


class OneNode(RendezvousHandler):
    """The rendezvous of a run on one node: it waits for no other."""

    use_agent_store = True  # the processes connect to the store of the launcher, which outlives them

    def __init__(self, is_distributed: bool = True) -> None:
        """`is_distributed`: the processes use torch.distributed."""
        self.is_distributed = is_distributed
        self.of_processes: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens a store of their own for the processes: those that crashed have left their keys in an old one."""
        self.of_processes = open_local_store() if self.is_distributed else None
        port = self.of_processes.port if self.of_processes else 0
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def get_backend(self) -> str:
        return "one node"

    def get_run_id(self) -> str:
        return "one node"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other node asks."""

    def shutdown(self) -> bool:
        return True


class ChangingNodes(RendezvousHandler):
    """torch's c10d rendezvous at the store of a `Meeting`: again and again, whenever processes are started again.

    The processes of every round meet at a store of their own, which the head opens: torch keeps that of the first round, and its
    agents then wait for keys that are never written (torch 2.13).
    """

    use_agent_store = True

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.nodes = meeting, meeting.nodes
        self.in_round: set[int] = set()  # ranks of the nodes whose processes train
        self.of_processes: TCPStore | None = None
        self._next_look = 0.0
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        store = meeting.connect()
        seconds = timedelta(seconds=meeting.patience)
        self.inner = DynamicRendezvousHandler.from_backend(
            run_id="run",
            store=store,
            backend=C10dRendezvousBackend(store, "run"),
            min_nodes=self.nodes.min_count or self.nodes.count,
            max_nodes=self.nodes.count,
            local_addr=f"{self.nodes.rank:04d}",  # the ranks are in the order of the addresses, and the head has rank 0
            timeout=RendezvousTimeout(join=seconds, last_call=timedelta(seconds=LAST_CALL)),
            keep_alive_interval=max(1, meeting.silence // 3),
            keep_alive_max_attempt=3,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Which nodes train, and where their processes meet. Exits if the other nodes do not come."""
        with self._errors():
            found = self.inner.next_rendezvous()
        if found.rank == 0:
            self.of_processes = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            found.store.set("port", str(self.of_processes.port))
        found.store.set(f"node/{found.rank}", str(self.nodes.rank))
        keys = ["port", *(f"node/{rank}" for rank in range(found.world_size))]
        while not self.meeting.ask(lambda: found.store.check(keys)):
            time.sleep(0.1)
        port, *ranks = (int(found.store.get(key)) for key in keys)
        before, self.in_round = self.in_round, set(ranks)
        if before and before != self.in_round and self.nodes.rank == 0:
            print(f"The run goes on with {plural(found.world_size, 'node')} of {self.nodes.count}.", flush=True)
        address = self.nodes.head if self.nodes.rank else "127.0.0.1"
        return RendezvousInfo(found.store, found.rank, found.world_size, RendezvousStoreInfo(address, port))

    def num_nodes_waiting(self) -> int:
        """How many nodes have come or are lost since the last round: then the processes start again."""
        if time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + 1
        with self._errors():
            return self.inner.num_nodes_waiting() + len(self.meeting.lost & self.in_round)

    def has_lost_nodes(self) -> bool:
        """Whether one of the nodes whose processes train is lost."""
        return bool(self.meeting.lost & self.in_round)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Exits with one message if torch's rendezvous fails in this block."""
        try:
            yield
        except RendezvousClosedError:
            self.meeting.fail("another node has ended the run: see its output")
        except RendezvousTimeoutError:
            self.meeting.fail(f"waited {self.meeting.patience} s (NODE_WAIT) for the other nodes")
        except (RendezvousError, DistError):
            self.meeting.fail(f"{self.meeting.name(0)} has exited, or the network to it is down: see its output")

    def get_backend(self) -> str:
        return self.inner.get_backend()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def shutdown(self) -> bool:
        return self.inner.shutdown()


def open_local_store() -> TCPStore:
    """A TCPStore at which the processes of this machine meet.

    Other machines cannot connect to it: it would listen at all addresses of this one without a socket of its own. torch unpickles
    what processes send each other through it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
