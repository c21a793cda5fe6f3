"""Where the processes of a run meet, for torch's elastic agent; those of a single node where other machines cannot connect."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

from harness.messages import plural
from harness.nodes.meeting import Meeting

from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LAST_CALL = 5  # seconds for more nodes to join a round that has enough


class OneNode(StaticTCPRendezvous):
    """The rendezvous of a run on one node: it waits for no other."""

    def __init__(self, is_distributed: bool = True) -> None:
        """`is_distributed`: the processes use torch.distributed."""
        super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id="run", timeout=0)
        self.is_distributed = is_distributed
        self.of_processes: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens a store of their own for the processes: those that crashed have left their keys in an old one."""
        self.of_processes = open_local_store() if self.is_distributed else None
        port = self.of_processes.port if self.of_processes else 0
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, port))


class ChangingNodes(DynamicRendezvousHandler):
    """torch's c10d rendezvous at the store of a `Meeting`: again and again, whenever processes are started again.

    The processes of every round meet at a store of their own, which the head opens: torch keeps that of the first round, and its
    agents then wait for keys that are never written (torch 2.13).
    """

    use_agent_store = True
    meeting: Meeting
    usable: list[int]  # numbers of nodes that can train; of other numbers, the nodes with the highest ranks wait
    in_round: frozenset[int] = frozenset()  # ranks of the nodes whose processes train
    of_processes: TCPStore | None = None
    next_look = 0.0

    def next_rendezvous(self) -> RendezvousInfo:
        """Which nodes train, and where their processes meet. Exits if the other nodes do not come.

        A node that is not needed waits here until other nodes come, or are lost, or the run has ended.
        """
        while True:
            found = self._next_round()
            if self.meeting.nodes.rank in self.in_round:
                return found
            number = plural(len(self.in_round), "node")
            print(f"Node {self.meeting.nodes.rank} waits: the run can use {number} at the moment.", flush=True)
            while not self.num_nodes_waiting():
                with self._errors():
                    if self.is_closed():
                        sys.exit(self.meeting.wait_for_end())
                time.sleep(1)

    def _next_round(self) -> RendezvousInfo:
        self.meeting.publish("waits", True)
        with self._errors():
            found = super().next_rendezvous()
        self.meeting.publish("waits", False)
        nodes = self.meeting.nodes
        if found.rank == 0:
            self.of_processes = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            found.store.set("port", str(self.of_processes.port))
        found.store.set(f"node/{found.rank}", str(nodes.rank))
        keys = ["port", *(f"node/{rank}" for rank in range(found.world_size))]
        deadline = time.monotonic() + self.meeting.silence
        while not self.meeting.ask(lambda: found.store.check(keys)):
            if time.monotonic() > deadline:
                return self._next_round()  # a node of this round was lost
            time.sleep(0.1)
        port, *ranks = (int(found.store.get(key)) for key in keys)
        count = max(number for number in self.usable if number <= found.world_size)
        before, self.in_round = self.in_round, frozenset(ranks[:count])
        if before and before != self.in_round and nodes.rank == 0:
            print(f"The run continues with {plural(count, 'node')} of {nodes.count}.", flush=True)
        address = nodes.head if nodes.rank else "127.0.0.1"
        return RendezvousInfo(found.store, found.rank, count, RendezvousStoreInfo(address, port))

    def num_nodes_waiting(self) -> int:
        """How many nodes have come or are lost since the last round: then the processes start again."""
        if time.monotonic() < self.next_look:
            return 0
        self.next_look = time.monotonic() + 1
        with self._errors():
            return super().num_nodes_waiting() + self.has_lost_node()

    def has_lost_node(self) -> bool:
        """Whether one of the nodes whose processes train is lost."""
        return not self.meeting.lost.isdisjoint(self.in_round)

    def has_node_that_waits(self) -> bool:
        """Whether the processes of one of these nodes have ended, and it waits for the next round."""
        return any(self.meeting.read("waits", rank) for rank in self.in_round)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Exits with one message if torch's rendezvous fails in this block."""
        try:
            yield
        except RendezvousClosedError:
            if self.meeting.wait_for_end() == 0:
                print(f"The run has ended without node {self.meeting.nodes.rank}.", flush=True)
                sys.exit()
            self.meeting.fail("another node has ended the run: see its output")
        except RendezvousTimeoutError:
            self.meeting.fail(f"waited {self.meeting.patience} s (NODE_WAIT) for the other nodes")
        except (RendezvousError, DistError):
            self.meeting.fail(f"{self.meeting.name(0)} has exited, or the network to it is down: see its output")


def make_rendezvous(meeting: Meeting, usable: list[int]) -> ChangingNodes:
    """`usable`: see `ChangingNodes`."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    store, nodes = meeting.connect(), meeting.nodes
    # A node that was lost stays in its round until its last heartbeat is older than `silence`.
    patience = timedelta(seconds=meeting.silence + LAST_CALL + meeting.patience)
    rendezvous = ChangingNodes.from_backend(
        run_id="run",
        store=store,
        backend=C10dRendezvousBackend(store, "run"),
        min_nodes=nodes.min_count or nodes.count,
        max_nodes=nodes.count,
        local_addr=f"{nodes.rank:04d}",  # the ranks are in the order of the addresses, and the head has rank 0
        timeout=RendezvousTimeout(join=patience, last_call=timedelta(seconds=LAST_CALL)),
        keep_alive_interval=max(1, meeting.silence // 3),
        keep_alive_max_attempt=3,
    )
    rendezvous.meeting, rendezvous.usable = meeting, usable
    return rendezvous


def open_local_store() -> TCPStore:
    """A TCPStore at which the processes of this machine meet.

    Other machines cannot connect to it: it would listen at all addresses of this one without a socket of its own. torch unpickles
    what processes send each other through it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
