"""The launchers of several nodes meet, check in turn, watch over each other and end together.

They share torch's TCPStore at the head's port as long as the run lasts. torchrun, which connects the processes that
train, gets a port of its own.
"""

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness import network, signals
from harness.nodes import Nodes, number

WAIT = number("NODE_WAIT", 600)  # seconds a node that comes late is waited for
SILENCE = number("NODE_SILENCE", 60)  # seconds after which a node that says nothing counts as lost
NOTICE = 30  # seconds between two lines about who is missing
LEAVE = 30  # seconds a node's processes have to end by themselves when another node has failed


class Meeting:
    """This node among the others, from before the checks until all have ended. A context manager."""

    def __init__(self, nodes: Nodes, facts: dict):
        """Waits until all nodes are here. `facts`, by the name of what they are, must be the same on all of them.

        Ends the process with one line when a node does not come in time, or came with other facts.
        """
        self.nodes, self.names, self.child, self.is_over = nodes, {}, None, False
        self.deadline, self.began = time.monotonic() + WAIT, time.monotonic()
        self.notice = self.began + 5
        self.store = self._open()
        own = {"host": socket.gethostname(), "pid": os.getpid(), "address": network.address(nodes.head)}
        own["facts"] = {"NNODES": nodes.count} | facts
        if self._has(f"node/{nodes.rank}"):
            self._refuse_second(self._get(f"node/{nodes.rank}"), own)
        self._set(f"node/{nodes.rank}", own)
        while missing := [rank for rank in range(nodes.count) if not self._has(f"node/{rank}")]:
            self._compare(own)
            self._wait_for(f"node {', '.join(map(str, missing))} of {nodes.count} (NODE_RANK counts from 0)")
        self._compare(own)
        self._set(f"met/{nodes.rank}", True)
        if nodes.rank:
            print(f"Node {nodes.rank} of {nodes.count} is here; {self.names[0]} speaks for all.", flush=True)
        threading.Thread(target=self._watch, daemon=True).start()

    def _compare(self, own: dict):
        """Compares this node with those that have come."""
        for rank in (rank for rank in range(self.nodes.count) if self._has(f"node/{rank}")):
            there = self._get(f"node/{rank}")
            self.names[rank] = f"node {rank} ({there['host']})"
            for name, fact in own["facts"].items():
                if there["facts"][name] != fact:
                    self._fail(f"{self.names[rank]} was started with {name} {there['facts'][name]}, this node with {name} {fact}")
            if rank == self.nodes.rank and there != own:
                self._fail(f"{there['host']} says it is node {rank} too: give each machine a NODE_RANK of its own")

    def _refuse_second(self, there: dict, own: dict):
        """Ends this process unless the one that came as this node before is dead, and nothing has begun."""
        gone = there["host"] == own["host"] and not Path(f"/proc/{there['pid']}").exists()
        if not gone or self._has("met/0"):
            self._fail(f"{there['host']} is node {self.nodes.rank} already: give each machine a NODE_RANK of its own")

    def _open(self):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the one line below says it
        from torch.distributed import DistNetworkError, TCPStore

        host, port, is_head = self.nodes.head, self.nodes.port, self.nodes.rank == 0
        while not is_head:
            try:
                socket.create_connection((host, port), timeout=5).close()
                break
            except OSError:
                self._wait_for(f"node 0: nobody answers at {host}:{port} (MASTER_ADDR, MASTER_PORT; a firewall?)")
        try:
            timeout = datetime.timedelta(seconds=SILENCE)
            return TCPStore("127.0.0.1" if is_head else host, port, None, is_head, timeout, wait_for_workers=False)
        except (DistNetworkError, RuntimeError) as error:
            if is_head:
                self._fail(
                    f"port {port} of this machine is taken: by another NODE_RANK 0? Else set another MASTER_PORT, on all nodes"
                )
            self._fail(f"what answers at {host}:{port} is not node 0 of this run ({network.first_line(error)})")

    def _wait_for(self, whom: str):
        now = time.monotonic()
        waited = f"{now - self.began:.0f} of {WAIT} s (NODE_WAIT)"
        if now > self.deadline:
            self._fail(f"waited {waited} in vain for {whom}")
        if now > self.notice:
            self.notice = now + NOTICE
            print(f"Waiting for {whom}, {waited} so far.", flush=True)
        time.sleep(0.5)

    # Keys are written once; values are JSON.
    def _set(self, key: str, value):
        self._ask(lambda: self.store.set(key, json.dumps(value)))

    def _has(self, key: str) -> bool:
        return self._ask(lambda: self.store.check([key]))

    def _get(self, key: str):
        return json.loads(self._ask(lambda: self.store.get(key)))

    def _ask(self, question):
        # Over a dead line a question to the head is never answered, whatever the store's timeout.
        unanswered = threading.Timer(SILENCE, self._silent, [0])
        unanswered.daemon = True
        unanswered.start()
        try:
            return question()
        except RuntimeError:  # of which torch's DistNetworkError and DistStoreError are kinds
            self._fail(f"{self.names.get(0, 'node 0')} is gone, or the network between: see what it printed. {GOING_ON}")
        finally:
            unanswered.cancel()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.end(error.code if isinstance(error, SystemExit) else int(error is not None))

    def in_turn(self, check):
        """Runs `check` on one node after the other, for they may share a folder. Returns what it returns here."""
        if self.nodes.rank:
            self._until(f"checked/{self.nodes.rank - 1}")
        checked = check()
        self._set(f"checked/{self.nodes.rank}", True)
        for rank in range(self.nodes.count):
            self._until(f"checked/{rank}")
        return checked

    def _until(self, key: str):
        """Waits for a key, however long its node takes; `_watch` ends this when that node is lost."""
        rank = int(key.split("/")[1])
        while not self._has(key):
            if self._has(f"ended/{rank}"):
                code = self._get(f"ended/{rank}")
                if code:
                    print(f"error: {self.names[rank]} did not pass its checks: see what it printed", file=sys.stderr)
                sys.exit(code)
            time.sleep(0.2)

    def share(self, folder: Path, patience: float = 90) -> bool:
        """Whether all nodes see the first one's `folder`, which network file systems show late. Collective."""
        token = folder / ".seen-by-all-nodes"
        if self.nodes.rank == 0:
            token.write_text(str(self.began))
            self._set("token/0", token.read_text())
        self._until("token/0")
        expected = self._get("token/0")
        deadline = time.monotonic() + patience
        while not (seen := token.is_file() and token.read_text() == expected) and time.monotonic() < deadline:
            time.sleep(0.5)
            os.scandir(folder).close()
        self._set(f"sees/{self.nodes.rank}", seen)
        for rank in range(self.nodes.count):
            self._until(f"sees/{rank}")
        if self.nodes.rank == 0:
            token.unlink()
        return all(self._get(f"sees/{rank}") for rank in range(self.nodes.count))

    def port(self) -> int:
        """A port of the head for torchrun. Collective."""
        if self.nodes.rank == 0:
            self._set("port/0", _free_port())
        self._until("port/0")
        return self._get("port/0")

    def peer(self) -> str:
        """An address of another node."""
        return self.nodes.head if self.nodes.rank else self._get("node/1")["address"]

    def run(self, command: list[str], environment: dict) -> int:
        """Runs this node's part of the training; returns its exit code, 128 + N when signal N killed it."""
        self.child = subprocess.Popen(command, env=environment)
        signals.handle(lambda number, frame: self.child.send_signal(number))
        while self.child.returncode is None:
            with contextlib.suppress(KeyboardInterrupt):  # the child has it too, and says where it stopped
                self.child.wait()
        code = self.child.returncode
        self.end(code if code >= 0 else 128 - code)
        return code if code >= 0 else 128 - code

    def end(self, code: int | None):
        """Tells the others how this node ended. The first one stays until all have ended, for its store goes with it."""
        if self.is_over:
            return
        self.is_over = True
        with contextlib.suppress(RuntimeError):  # the head may have left
            self.store.set(f"ended/{self.nodes.rank}", json.dumps(code or 0))
        patience = time.monotonic() + (LEAVE + 5 if self.child else 5)  # before training the others end at once
        with contextlib.suppress(RuntimeError):
            while self.nodes.rank == 0 and time.monotonic() < patience:
                time.sleep(1)  # after the last one has ended, too: it may still be asking
                if all(self.store.check([f"ended/{rank}"]) for rank in range(self.nodes.count)):
                    break

    def _watch(self):
        """Beats, listens to the others' beats, and ends this node when another is lost or has failed."""
        heard = {rank: (0, time.monotonic()) for rank in range(self.nodes.count) if rank != self.nodes.rank}
        failed = None
        while not self.is_over:
            self._ask(lambda: self.store.add(f"beat/{self.nodes.rank}", 1))
            for rank, (beats, when) in heard.items():
                now = time.monotonic()
                ended = self._get(f"ended/{rank}") if self._has(f"ended/{rank}") else None
                beats_now = self._ask(lambda rank=rank: self.store.add(f"beat/{rank}", 0))
                if beats_now != beats or ended is not None:
                    heard[rank] = (beats_now, now)
                elif now - when > SILENCE:
                    self._silent(rank)
                if ended and self.child:
                    failed = failed or now
                    if now - failed > LEAVE:
                        self._fail(f"{self.names[rank]} ended with exit code {ended}: see what it printed. {GOING_ON}")
            time.sleep(1)

    def _silent(self, rank: int):
        self._fail(
            f"nothing heard of {self.names.get(rank, f'node {rank}')} for {SILENCE} s: it or the network is down. {GOING_ON}"
        )

    def _fail(self, message: str):
        if self.is_over:  # the head has left after all had ended
            sys.exit()
        print(f"\nerror: {' '.join(message.split())}", file=sys.stderr, flush=True)
        if self.child and self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)  # its processes go with it
        os._exit(1)


GOING_ON = "The same command goes on from the newest checkpoint, if there is one"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
