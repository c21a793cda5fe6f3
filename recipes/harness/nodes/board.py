"""The launchers of several nodes find each other, find that they were started alike, and from then on have one board for all.

It is torch's TCPStore on the head. The store's own waiting (`wait`, a `get` of what is not there yet, the barriers of
torch.distributed.elastic.utils.store) does not do here: over a dead line it outlasts every timeout it is given, and no signal
is handled meanwhile (torch 2.13).
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

from harness.nodes.machines import Nodes, number
from harness.nodes.network import address, first_line, limit

WAIT = number("NODE_WAIT", 600)  # seconds a node that comes late is waited for
NOTICE = 30  # seconds between two lines about who is missing
SILENCE = number("NODE_SILENCE", 60)  # seconds after which a node that says nothing counts as lost


class Board:
    """A value, of JSON's types, for each word and the rank of the node that tells it. The head's silence ends this node."""

    def __init__(self, nodes: Nodes, facts: dict):
        """Waits until all nodes are here.

        `facts`, by the name of what they are, must be the same on all. Ends the process with one line when a node does not
        come in time, came with other facts, or with a rank that is taken.
        """
        self.rank = nodes.rank
        self.here = {}  # rank: what is known of that node
        self.code = None  # this node's exit code, once it has ended and needs no answers
        self._began, self._notice = None, 5
        self._store = self._open(nodes.head if nodes.rank else "127.0.0.1", nodes.port)
        self._find(nodes, {"NNODES": nodes.count} | facts)

    def _open(self, host: str, port: int):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the lines below say it
        from torch.distributed import TCPStore

        wrong = f"port {port} of this machine is taken: by another NODE_RANK 0? Else set another MASTER_PORT, on all nodes"
        if self.rank:
            wrong = f"what answers at {host}:{port} is not node 0 of this run"
        while self.rank:
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), timeout=5).close()
                break
            self._wait(f"node 0: nobody answers at {host}:{port} (MASTER_ADDR, MASTER_PORT; a firewall?)")
        try:
            with limit(SILENCE, end, wrong):
                # Several tenants: what else in this process needs a store can have it on the same port.
                return TCPStore(host, port, is_master=self.rank == 0, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            end(f"{wrong} ({first_line(error)})")

    def _find(self, nodes: Nodes, facts: dict):
        own = {"host": socket.gethostname(), "pid": os.getpid(), "address": address(nodes.head), "facts": facts}
        there = self._ask(lambda: json.loads(self._store.compare_set(f"node/{self.rank}", "", json.dumps(own))))
        is_dead = there["host"] == own["host"] and not Path(f"/proc/{there['pid']}").exists()
        if there != own and (not is_dead or self.told("beat", 0)):  # node 0 beats when all have met
            end(f"{there['host']} is node {self.rank} already: give each machine a NODE_RANK of its own")
        self.tell("node", own)
        while len(self.here) < nodes.count:
            self.here = {rank: there for rank in range(nodes.count) if (there := self.told("node", rank))}
            for rank, there in self.here.items():
                for fact, value in facts.items():
                    if (other := there["facts"].get(fact)) != value:
                        end(f"{self.name(rank)} was started with {fact} {other}, this node with {fact} {value}")
            if missing := ", ".join(str(rank) for rank in range(nodes.count) if rank not in self.here):
                self._wait(f"node {missing} of {nodes.count} (NODE_RANK counts from 0)")
        if self.rank:
            print(f"Node {self.rank} of {nodes.count} is here; {self.name(0)} speaks for all.", flush=True)

    def _wait(self, whom: str):
        self._began = self._began or time.monotonic()  # not before there is somebody to wait for: importing torch takes long
        seconds = time.monotonic() - self._began
        waited = f"{seconds:.0f} of {WAIT} s (NODE_WAIT)"
        if seconds > WAIT:
            end(f"waited {waited} in vain for {whom}")
        if seconds > self._notice:
            self._notice = seconds + NOTICE
            print(f"Waiting for {whom}, {waited} so far.", flush=True)
        time.sleep(0.5)

    def tell(self, word: str, value):
        self._ask(lambda: self._store.set(f"{word}/{self.rank}", json.dumps(value)))

    def told(self, word: str, rank: int):
        """None as long as that node has not."""
        key = f"{word}/{rank}"
        return self._ask(lambda: json.loads(self._store.get(key)) if self._store.check([key]) else None)

    def _ask(self, question):
        try:
            with limit(SILENCE, self.silent, 0):
                return question()
        except RuntimeError:  # of which torch's DistNetworkError and DistStoreError are kinds
            self.fail(f"{self.name(0)} is gone, or the network between: see what it printed")

    def name(self, rank: int) -> str:
        return f"node {rank} ({self.here[rank]['host']})" if rank in self.here else f"node {rank}"

    def silent(self, rank: int):
        self.fail(f"nothing heard of {self.name(rank)} for {SILENCE} s: it or the network is down")

    def fail(self, message: str):
        """Ends the process with a line, from any thread; only the thread when this node has ended."""
        if self.code is None:
            end(f"{message}. The same command goes on from the newest checkpoint, if there is one")
        sys.exit()


def end(message: str):
    """Ends the process with a line, from any thread; on Linux, what it has started dies with it."""
    print(f"\nerror: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(1)
