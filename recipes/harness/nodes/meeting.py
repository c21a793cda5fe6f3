"""The launchers of several nodes check in turn, watch over each other, and end together."""

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from harness.nodes.board import GOING_ON, SILENCE
from harness.nodes.gather import gather, name
from harness.nodes.machines import Nodes

LEAVE = 30  # seconds a node's processes have to end by themselves when another node has failed


class Meeting:
    """This node among the others, from before the checks until all have ended. A context manager."""

    def __init__(self, nodes: Nodes, facts: dict):
        """See `gather`."""
        self.nodes, self.child, self.board = nodes, None, gather(nodes, facts)
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.end(error.code if isinstance(error, SystemExit) else int(error is not None))

    def in_turn(self, check):
        """Runs `check` on one node after the other, for they may share a folder. Returns what it returns here."""
        if self.nodes.rank:
            self._read(f"checked/{self.nodes.rank - 1}")
        checked = check()
        self.board.set(f"checked/{self.nodes.rank}", True)
        self._read_all("checked")
        return checked

    def _read(self, key: str):
        """Waits for a key, however long its node takes; `_watch` ends this when that node is lost."""
        rank = int(key.split("/")[1])
        while not self.board.has(key):
            if self.board.has(f"ended/{rank}"):
                code = self.board.get(f"ended/{rank}")
                if code:
                    print(f"error: {name(self.board, rank)} did not pass its checks: see what it printed", file=sys.stderr)
                sys.exit(code)
            time.sleep(0.2)
        return self.board.get(key)

    def _read_all(self, what: str) -> list:
        return [self._read(f"{what}/{rank}") for rank in range(self.nodes.count)]

    def share(self, folder: Path, patience: float = 90) -> bool:
        """Whether all nodes see the first one's `folder`, which network file systems show late. Collective."""
        token = folder / ".seen-by-all-nodes"
        if self.nodes.rank == 0:
            token.write_text(str(time.time()))
            self.board.set("token/0", token.read_text())
        expected, deadline = self._read("token/0"), time.monotonic() + patience
        while not (seen := token.is_file() and token.read_text() == expected) and time.monotonic() < deadline:
            time.sleep(0.5)
            os.scandir(folder).close()
        self.board.set(f"sees/{self.nodes.rank}", seen)
        everywhere = all(self._read_all("sees"))
        if self.nodes.rank == 0:
            token.unlink()
        return everywhere

    def port(self) -> int:
        """A port of the head for torchrun. Collective."""
        if self.nodes.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self.board.set("port/0", probe.getsockname()[1])
        return self._read("port/0")

    def peer(self) -> str:
        """An address of another node."""
        return self.nodes.head if self.nodes.rank else self.board.get("node/1")["address"]

    def run(self, train) -> int:
        """Runs this node's part of the training and tells the others how it ended; returns its exit code."""
        self.child = True
        code = train()
        self.end(code)
        return code

    def end(self, code: int | None):
        """Tells the others how this node ended. The first one stays until all have ended, for the board goes with it."""
        if self.board.is_closed:
            return
        self.board.is_closed = True
        patience = time.monotonic() + (LEAVE + 5 if self.child else 5)  # before training the others end at once
        with contextlib.suppress(SystemExit):  # the head may have left
            self.board.set(f"ended/{self.nodes.rank}", code or 0)
            while self.nodes.rank == 0 and time.monotonic() < patience:
                time.sleep(1)  # after the last one has ended, too: it may still be asking
                if all(self.board.has(f"ended/{rank}") for rank in range(self.nodes.count)):
                    break
        self.watcher.join(SILENCE)  # Python must not end while a thread is inside the store

    def _watch(self):
        """Beats, listens to the others' beats, and ends this node when another is lost or has failed."""
        board, failed = self.board, None
        heard = {rank: (0, time.monotonic()) for rank in range(self.nodes.count) if rank != self.nodes.rank}
        while not board.is_closed:
            board.count(f"beat/{self.nodes.rank}", 1)
            for rank, (beats, when) in heard.items():
                now = time.monotonic()
                ended = board.get(f"ended/{rank}") if board.has(f"ended/{rank}") else None
                beats_now = board.count(f"beat/{rank}", 0)
                if beats_now != beats or ended is not None:
                    heard[rank] = (beats_now, now)
                elif now - when > SILENCE:
                    board.silent(name(board, rank))
                if ended and self.child:
                    failed = failed or now
                    if now - failed > LEAVE:
                        board.fail(f"{name(board, rank)} ended with exit code {ended}: see what it printed. {GOING_ON}")
            time.sleep(1)
