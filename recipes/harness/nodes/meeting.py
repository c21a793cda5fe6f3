"""How the launchers of several nodes meet, check in turn, watch each other, and end together.

torch's rendezvous (`ChangingNodes`) decides which of the nodes train. A `Meeting` does what that does not:

- Before it, the nodes wait for each other with messages that say for whom, compare their commands and files, check the run one
  after the other, and find out whether they share a folder.
- While they train, it notices a lost node. torch's agents only look for new ones: processes that wait for a lost one would do so
  up to half an hour. The keep-alive of the rendezvous, by the clocks of different nodes, only tells who is in the next round.
- At the end, the head, whose store all use, waits for the other nodes, and a node that fails ends those that cannot notice it.

The nodes exchange values through torch's TCPStore on the head node. The store's own waiting functions (`wait`, `get` of a
missing key, the barriers of torch.distributed.elastic) are not used: over a dead connection they outlast every timeout, and
block signal handlers meanwhile (torch 2.13).
"""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from harness.messages import UserError
from harness.nodes.cluster import Nodes
from harness.nodes.hardware import is_on_local_disk
from harness.nodes.network import first_line, own_address, time_limit
from harness.nodes.variables import seconds_of_silence, seconds_to_wait

T = TypeVar("T")
MESSAGE_INTERVAL = 30  # seconds between two messages about a missing node
STOPPED = 128 + signal.SIGTERM  # exit code of a node that was told to stop
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
        self.lost: set[int] = set()  # ranks of known nodes that send no heartbeats; the run continues without them
        self.joins = False  # the run has begun without this node
        self.is_training = False
        self._seen_by_all: Path | None = None  # a file in the output directory
        self.exit_code: int | None = None  # of this node, once it has ended
        self.has_ended = threading.Event()
        self._waiting_since: float | None = None
        self._next_message = 5.0
        self._store = self._open_store("127.0.0.1" if nodes.rank == 0 else nodes.head, nodes.port)
        self._find_nodes({"NNODES": f"{nodes.min_count}:{nodes.count}" if nodes.min_count else nodes.count} | facts)
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        codes = {type(None): 0, SystemExit: getattr(error, "code", 0), UserError: 2}
        self.end(codes.get(type(error), 1))

    def check_in_turn(self, check: Callable[[], T]) -> T:
        """Runs `check` on one node after the other, because they can share a folder. Returns this node's result."""
        earlier = [rank for rank in self.known if rank < self.nodes.rank]
        if earlier:
            self._wait_for("checked", max(earlier))
        result = check()
        self._exchange("checked", True)
        return result

    def all_see(self, folder: Path, patience: float | None = None) -> bool:
        """Whether all nodes see the same `folder`. Network file systems can show a new file late. Collective."""
        if patience is None:
            patience = 2 if is_on_local_disk(folder) else 90
        file, path = tempfile.mkstemp(dir=folder, prefix=".seen-by-all-nodes-")
        os.close(file)  # a bucket that is mounted shows a file to other nodes when it is closed
        own = Path(path)
        of_head, deadline = folder / self._exchange("token", own.name)[0], time.monotonic() + patience
        while not (sees := of_head.exists()) and time.monotonic() < deadline:
            time.sleep(0.5)
            os.scandir(folder).close()
        all_see = all(self._exchange("sees", sees))
        if self.nodes.min_count:
            self._seen_by_all = own  # a node that comes back looks for the file of the head
        else:
            own.unlink()
        return all_see

    def another_address(self) -> str:
        """An address of another node, "" if there is none."""
        others = [node["address"] for rank, node in self.known.items() if rank != self.nodes.rank]
        return self.nodes.head if self.nodes.rank else (others or [""])[0]

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
            if self._seen_by_all:
                self._seen_by_all.unlink(missing_ok=True)
            self.has_ended.set()
            if self.is_training:
                self.watcher.join(LEAVE_TIMEOUT + 5 if code else self.patience)  # a node that fails ends the others
            else:
                self.watcher.join(5)

    def wait_for_end(self) -> int:
        """The exit code of the head, once it has ended."""
        while (code := self.read("exit_code", 0)) is None:
            time.sleep(0.5)
        return code

    def publish(self, key: str, value: Any) -> None:
        self.ask(lambda: self._store.set(f"{key}/{self.nodes.rank}", json.dumps(value)))

    def read(self, key: str, rank: int) -> Any:
        """What node `rank` has published under `key`; None if it has not."""
        name = f"{key}/{rank}"
        return self.ask(lambda: json.loads(self._store.get(name)) if self._store.check([name]) else None)

    def connect(self) -> Any:
        """Another connection to the store: while one waits, the others do not."""
        from torch.distributed import TCPStore

        host = self.nodes.head if self.nodes.rank else "127.0.0.1"
        timeout = timedelta(seconds=self.silence)
        return self.ask(lambda: TCPStore(host, self.nodes.port, is_master=False, wait_for_workers=False, timeout=timeout))

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
        has_begun = bool(self.read("heartbeat", 0))  # the head sends heartbeats once the nodes have met
        self.joins = has_begun and nodes.min_count > 0
        # Sets the value unless there is one, and returns the value that is there.
        registered = self.ask(lambda: json.loads(self._store.compare_set(f"node/{rank}", "", json.dumps(own))))
        if registered != own:
            was_killed = registered["host"] == own["host"] and not Path(f"/proc/{registered['pid']}").exists()
            if not was_killed and (not nodes.min_count or self._is_alive(rank)):
                exit_with(f"{registered['host']} is node {rank} already: give each machine its own NODE_RANK")
            if has_begun and not nodes.min_count:
                exit_with(f"node {rank} was started again while the others run: stop all nodes, then start all again")
        self.publish("exit_code", None)  # an earlier start of this node may have published one
        self.publish("node", own)
        while (missing := self._look_for_nodes(facts)) and not self.joins:
            what = f"NODE_RANK {', '.join(map(str, missing))} (of {nodes.count} nodes, counted from 0)"
            if nodes.min_count and self._has_waited() and len(self.known) >= nodes.min_count:
                break
            if nodes.min_count and self.read("heartbeat", 0):
                break
            self._wait_or_exit(what)
        if rank > 0:
            print(f"Node {rank} has joined; {self.name(0)} prints the messages of all {nodes.count} nodes.", flush=True)
        elif missing:
            print(f"Starting without {what}. They can join later.", flush=True)

    def _look_for_nodes(self, facts: dict[str, Any]) -> list[int]:
        """Updates `known`; returns the ranks that are not known. Exits if a node was started with other facts."""
        found = {other: self.read("node", other) for other in range(self.nodes.count)}
        self.known = {other: node for other, node in found.items() if node}
        for other, node in self.known.items():
            for fact, value in facts.items():
                if node["facts"].get(fact) != value:
                    theirs = node["facts"].get(fact)
                    if self.nodes.rank == 0:
                        time.sleep(2)  # until the others have seen it too: the store ends with this process
                    exit_with(f"{self.name(other)} was started with another {fact} than this node: {theirs}, here {value}")
        return [rank for rank in range(self.nodes.count) if rank not in self.known]

    def _is_alive(self, rank: int) -> bool:
        """Whether a node sends heartbeats."""
        before = self.read("heartbeat", rank)
        time.sleep(3)
        return self.read("heartbeat", rank) != before

    def _has_waited(self) -> bool:
        return self._waiting_since is not None and time.monotonic() - self._waiting_since > self.patience

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
        """Every node's value, by rank, but not of lost nodes. Collective."""
        self.publish(key, value)
        values = [self._wait_for(key, rank) for rank in sorted(self.known)]
        return [value for value in values if value is not None]

    def _wait_for(self, key: str, rank: int) -> Any:
        """Waits for the value of a node, however long that takes; None if it is lost, unless `_watch` ends this process."""
        while rank not in self.lost:
            # The exit code is read first: it is the last thing that a node publishes.
            code, value = self.read("exit_code", rank), self.read(key, rank)
            if value is not None:
                return value
            if self._leaves(rank, code):
                self._lose(rank)
                break
            if code:
                print(f"error: {self.name(rank)} did not pass its checks: see its output", file=sys.stderr)
            if code is not None:
                sys.exit(code)
            time.sleep(0.2)
        return None

    def _watch(self) -> None:
        """The thread: publishes heartbeats and this node's exit code, and ends this node when another is lost or has failed."""
        last_heard = {}  # rank: heartbeat, and when it came

        def seconds_silent(rank: int) -> float:
            heartbeat, now = self.read("heartbeat", rank), time.monotonic()
            if rank not in last_heard or heartbeat != last_heard[rank][0]:
                last_heard[rank] = heartbeat, now
            return now - last_heard[rank][1]

        while self.exit_code is None:
            self.publish("heartbeat", time.monotonic())
            for rank in self._others():
                code, silent = self.read("exit_code", rank), seconds_silent(rank)
                if self._leaves(rank, code) or (code is None and silent > self.silence):
                    self._lose(rank)
                elif code and self.is_training and silent > LEAVE_TIMEOUT:
                    self.fail(f"{self.name(rank)} ended with exit code {code}: see its output")
                elif rank in self.lost and silent < 2:
                    self.lost.remove(rank)
            self.has_ended.wait(1)
        fails_to_join = self.joins and not self.is_training  # the others have not waited for it
        self.publish("exit_code", STOPPED if fails_to_join else self.exit_code)
        while self.nodes.rank == 0 and any(
            self.read("exit_code", rank) is None and seconds_silent(rank) < self.silence for rank in self._others()
        ):
            time.sleep(1)

    def _others(self) -> list[int]:
        """The ranks of the other nodes, also of those that have come later."""
        if self.nodes.min_count and self.is_training:
            for rank in range(self.nodes.count):
                if node := self.read("node", rank):
                    self.known[rank] = node
        return [rank for rank in self.known if rank != self.nodes.rank]

    def _leaves(self, rank: int, code: int | None) -> bool:
        """Whether a node with this exit code was stopped, and the others continue."""
        return code == STOPPED and self.nodes.min_count > 0 and rank > 0

    def _lose(self, rank: int) -> None:
        """The run continues without this node if their number can change; it ends without the head."""
        if not self.nodes.min_count or rank == 0:
            self._exit_for_silence(rank)
        if rank not in self.lost:
            self.lost.add(rank)
            if self.nodes.rank == 0:
                print(f"Lost {self.name(rank)}: it was stopped, or nothing was heard from it for {self.silence} s.", flush=True)

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer of the store; the store's silence ends this node."""
        try:
            with time_limit(self.silence, self._exit_for_silence, 0):
                return question()
        except RuntimeError:  # torch's DistNetworkError and DistStoreError are subclasses
            self.fail(f"{self.name(0)} has exited, or the network to it is down: see its output")

    def _exit_for_silence(self, rank: int) -> None:
        self.fail(f"nothing was heard from {self.name(rank)} for {self.silence} s: it or the network is down")

    def fail(self, message: str) -> NoReturn:
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
