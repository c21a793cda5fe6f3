"""How the launchers of several nodes start together, check in turn, and end together.

They exchange values through torch's TCPStore on the head node. The store's own waiting functions (`wait`, `get` of a
missing key, the barriers of torch.distributed.elastic) are not used: over a dead connection they outlast every timeout, and
block signal handlers meanwhile (torch 2.13).
"""

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from harness.messages import UserError
from harness.nodes.cluster import Nodes
from harness.nodes.hardware import is_on_local_disk
from harness.nodes.network import first_line, own_address, time_limit
from harness.nodes.variables import seconds_of_silence, seconds_to_wait

T = TypeVar("T")
MESSAGE_INTERVAL = 30  # seconds between two messages about a missing node
LEAVE_TIMEOUT = 30  # seconds a node's processes have to exit by themselves after another node has failed


class Meeting(contextlib.AbstractContextManager):
    """This node among the others, from before the checks until all nodes have ended.

    Every node publishes values under a key; `read` returns the value of one node. A thread publishes a heartbeat every second.
    """

    def __init__(self, nodes: Nodes, facts: dict[str, Any]) -> None:
        """Waits until all nodes are here. `facts` must be the same on all nodes; a difference ends this process."""
        self.nodes = nodes
        self.silence, self.patience = seconds_of_silence(), seconds_to_wait()
        self.known: dict[int, dict] = {}  # rank: host, address and facts of that node
        self.is_training = False
        self.exit_code: int | None = None  # of this node, once it has ended
        self.has_ended = threading.Event()
        self._waiting_since: float | None = None
        self._next_message = 5.0
        self._store = self._open_store("127.0.0.1" if nodes.rank == 0 else nodes.head, nodes.port)
        self._find_nodes({"NNODES": nodes.count} | facts)
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        codes = {type(None): 0, SystemExit: getattr(error, "code", 0), UserError: 2}
        self.end(codes.get(type(error), 1))

    def check_in_turn(self, check: Callable[[], T]) -> T:
        """Runs `check` on one node after the other, because they can share a folder. Returns this node's result."""
        if self.nodes.rank > 0:
            self._wait_for("checked", self.nodes.rank - 1)
        result = check()
        self._exchange("checked", True)
        return result

    def all_see(self, folder: Path, patience: float | None = None) -> bool:
        """Whether all nodes see the same `folder`. Network file systems can show a new file late. Collective."""
        if patience is None:
            patience = 2 if is_on_local_disk(folder) else 90
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-nodes-") as own:
            of_head, deadline = folder / self._exchange("token", Path(own.name).name)[0], time.monotonic() + patience
            while not (sees := of_head.exists()) and time.monotonic() < deadline:
                time.sleep(0.5)
                os.scandir(folder).close()
            return all(self._exchange("sees", sees))

    def another_address(self) -> str:
        """An address of another node."""
        return self.nodes.head if self.nodes.rank else self.known[1]["address"]

    def run(self, train: Callable[[], int]) -> int:
        """Runs `train`, this node's part of the training; returns its exit code, 0 to 255."""
        self.is_training = True
        code = train()
        self.end(code)
        return code

    def end(self, code: int | None) -> None:
        """Tells the others how this node ended. The head waits until all have ended, because the store ends with it."""
        if self.exit_code is None:
            self.exit_code = code or 0
            self.has_ended.set()
            if self.is_training:
                self.watcher.join(LEAVE_TIMEOUT + 5 if code else self.patience)  # a node that fails ends the others
            else:
                self.watcher.join(5)

    def publish(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(f"{key}/{self.nodes.rank}", json.dumps(value)))

    def read(self, key: str, rank: int) -> Any:
        """What node `rank` has published under `key`; None if it has not."""
        name = f"{key}/{rank}"
        return self._ask(lambda: json.loads(self._store.get(name)) if self._store.check([name]) else None)

    def name(self, rank: int) -> str:
        return f"node {rank} ({self.known[rank]['host']})" if rank in self.known else f"node {rank}"

    def _open_store(self, host: str, port: int) -> Any:
        """The store in which the nodes meet: node 0 opens it, the others wait for it. Exits if something else answers there.

        Whether it is the store of this run is found out by `_find_nodes`.
        """
        from harness.compat.torch import hide_store_warnings

        from torch.distributed import TCPStore

        hide_store_warnings()  # the messages here replace them
        if self.nodes.rank == 0:
            problem = (
                f"port {port} of this machine is in use, perhaps by another NODE_RANK 0: set another MASTER_PORT on all nodes"
            )
        else:
            problem = f"the process that answers at {host}:{port} is not node 0 of this run"
            while not _accepts_connections(host, port):
                self._wait_or_exit(f"node 0: nothing answers at {host}:{port} (MASTER_ADDR, MASTER_PORT; a firewall?)")
        try:
            with time_limit(self.silence, exit_with, problem):
                return TCPStore(host, port, is_master=self.nodes.rank == 0, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            exit_with(f"{problem} ({first_line(error)})")

    def _find_nodes(self, facts: dict[str, Any]) -> None:
        """Registers this node, waits for all others, and exits if a rank is taken or a node was started with other facts."""
        rank, nodes = self.nodes.rank, self.nodes
        own = {"host": socket.gethostname(), "pid": os.getpid(), "address": own_address(nodes.head), "facts": facts}
        # Sets the value unless there is one, and returns the value that is there.
        registered = self._ask(lambda: json.loads(self._store.compare_set(f"node/{rank}", "", json.dumps(own))))
        if registered != own:
            was_killed = registered["host"] == own["host"] and not Path(f"/proc/{registered['pid']}").exists()
            if not was_killed:
                exit_with(f"{registered['host']} is node {rank} already: give each machine its own NODE_RANK")
            if self.read("heartbeat", 0):  # the head has a heartbeat once all nodes have met
                exit_with(f"node {rank} was started again while the others run: stop all nodes, then start all again")
        self.publish("node", own)
        while len(self.known) < nodes.count:
            found = {other: self.read("node", other) for other in range(nodes.count)}
            self.known = {other: node for other, node in found.items() if node}
            for other, node in self.known.items():
                for fact, value in facts.items():
                    if node["facts"].get(fact) != value:
                        theirs = node["facts"].get(fact)
                        if rank == 0:
                            time.sleep(2)  # until the others have seen it too: the store ends with this process
                        exit_with(f"{self.name(other)} was started with another {fact} than this node: {theirs}, here {value}")
            if missing := ", ".join(str(other) for other in range(nodes.count) if other not in self.known):
                self._wait_or_exit(f"NODE_RANK {missing} (of {nodes.count} nodes, counted from 0)")
        if rank > 0:
            print(f"Node {rank} has joined; {self.name(0)} prints the messages of all {nodes.count} nodes.", flush=True)

    def _wait_or_exit(self, what: str) -> None:
        """Waits half a second; prints what is waited for now and then, and exits after `patience` seconds."""
        if self._waiting_since is None:  # importing torch takes long; that time does not count
            self._waiting_since = time.monotonic()
        seconds = time.monotonic() - self._waiting_since
        waited = f"{seconds:.0f} of {self.patience} s (NODE_WAIT)"
        if seconds > self.patience:
            exit_with(f"waited {waited} for {what}")
        if seconds > self._next_message:
            self._next_message = seconds + MESSAGE_INTERVAL
            print(f"Waiting for {what}, {waited} so far.", flush=True)
        time.sleep(0.5)

    def _exchange(self, key: str, value: Any) -> list:
        """Every node's value, by rank. Collective."""
        self.publish(key, value)
        return [self._wait_for(key, rank) for rank in range(self.nodes.count)]

    def _wait_for(self, key: str, rank: int) -> Any:
        """Waits for the value of a node, however long that takes; `_watch` ends this process if that node is lost."""
        while True:
            # The exit code is read first: it is the last thing that a node publishes.
            code, value = self.read("exit_code", rank), self.read(key, rank)
            if value is not None:
                return value
            if code:
                print(f"error: {self.name(rank)} did not pass its checks: see its output", file=sys.stderr)
            if code is not None:
                sys.exit(code)
            time.sleep(0.2)

    def _watch(self) -> None:
        """The thread: publishes heartbeats and this node's exit code, and ends this node when another is lost or has failed."""
        now = time.monotonic()
        last_heard = {rank: (None, now) for rank in self.known if rank != self.nodes.rank}  # heartbeat, and when it came

        def seconds_silent(rank: int) -> float:
            heartbeat, now = self.read("heartbeat", rank), time.monotonic()
            if heartbeat != last_heard[rank][0]:
                last_heard[rank] = heartbeat, now
            return now - last_heard[rank][1]

        while self.exit_code is None:
            self.publish("heartbeat", time.monotonic())
            for rank in last_heard:
                code, silent = self.read("exit_code", rank), seconds_silent(rank)
                if code is None and silent > self.silence:
                    self._exit_for_silence(rank)
                elif code and self.is_training and silent > LEAVE_TIMEOUT:
                    self._fail(f"{self.name(rank)} ended with exit code {code}: see its output")
            self.has_ended.wait(1)
        self.publish("exit_code", self.exit_code)
        while self.nodes.rank == 0 and any(
            self.read("exit_code", rank) is None and seconds_silent(rank) < self.silence for rank in last_heard
        ):
            time.sleep(1)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The answer of the store; the store's silence ends this node."""
        try:
            with time_limit(self.silence, self._exit_for_silence, 0):
                return question()
        except RuntimeError:  # torch's DistNetworkError and DistStoreError are subclasses
            self._fail(f"{self.name(0)} has exited, or the network to it is down: see its output")

    def _exit_for_silence(self, rank: int) -> None:
        self._fail(f"nothing was heard from {self.name(rank)} for {self.silence} s: it or the network is down")

    def _fail(self, message: str) -> NoReturn:
        """Ends the process with a message, from any thread; only the thread if this node has ended."""
        if self.exit_code is None:
            exit_with(f"{message}. The same command resumes from the newest checkpoint, if there is one")
        sys.exit()


def _accepts_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def exit_with(message: str) -> NoReturn:
    """Ends the process with a message, from any thread; on Linux the processes it has started are killed with it."""
    print(f"\nerror: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(1)
