"""The launchers of several nodes check in turn, watch over each other, and end together."""

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness.nodes.board import SILENCE, Board
from harness.nodes.machines import Nodes

LEAVE = 30  # seconds a node's processes have to end by themselves when another node has failed


class Meeting(contextlib.AbstractContextManager):
    """This node among the others, from before the checks until all have ended."""

    def __init__(self, nodes: Nodes, facts: dict):
        """See `Board`."""
        self.nodes, self.board = nodes, Board(nodes, facts)
        self.is_training, self.is_over = False, threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def __exit__(self, kind, error, trace):
        self.end(error.code if isinstance(error, SystemExit) else int(error is not None))

    def in_turn(self, check):
        """Runs `check` on one node after the other, for they may share a folder. Returns what it returns here."""
        if self.nodes.rank:
            self._read("checked", self.nodes.rank - 1)
        checked = check()
        self._exchange("checked", True)
        return checked

    def share(self, folder: Path, patience: float = 90) -> bool:
        """Whether all nodes see the first one's `folder`, which network file systems show late. Collective."""
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-nodes-") as own:
            token, deadline = folder / self._exchange("token", Path(own.name).name)[0], time.monotonic() + patience
            while not (seen := token.exists()) and time.monotonic() < deadline:
                time.sleep(0.5)
                os.scandir(folder).close()
            return all(self._exchange("sees", seen))

    def port(self) -> int:
        """A port of the head for torchrun. Collective."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return self._exchange("port", probe.getsockname()[1])[0]

    def peer(self) -> str:
        """An address of another node."""
        return self.nodes.head if self.nodes.rank else self.board.here[1]["address"]

    def run(self, train) -> int:
        """Runs `train`, this node's part of the training, in this thread; returns its exit code, 0 to 255."""
        self.is_training = True
        self.end(code := train())
        return code

    def end(self, code: int | None):
        """Has the others told how this node ended. The first one stays until all have, for the board goes with it."""
        if self.board.code is None:
            self.board.code = code or 0
            self.is_over.set()
            self.watcher.join(LEAVE + 5 if self.is_training else 5)  # before training the others end at once

    def _exchange(self, word: str, value) -> list:
        """The value of every node, by rank. Collective."""
        self.board.tell(word, value)
        return [self._read(word, rank) for rank in range(self.nodes.count)]

    def _read(self, word: str, rank: int):
        """Waits until node `rank` has told it, however long that takes; `_watch` ends this when that node is lost."""
        while True:
            code, value = self.board.told("ended", rank), self.board.told(word, rank)  # in this order: its end is its last word
            if value is not None:
                return value
            if code:
                print(f"error: {self.board.name(rank)} did not pass its checks: see what it printed", file=sys.stderr)
            if code is not None:
                sys.exit(code)
            time.sleep(0.2)

    def _watch(self):
        """Beats, listens to the others' beats, and ends this node when another is lost or has failed; at last tells its end."""
        board, now = self.board, time.monotonic()
        heard = {rank: (None, now) for rank in board.here if rank != board.rank}  # the last beat, and when it came
        while board.code is None:
            board.tell("beat", time.monotonic())
            for rank, (last, when) in heard.items():
                code, beat, now = board.told("ended", rank), board.told("beat", rank), time.monotonic()
                if beat != last:
                    heard[rank] = beat, now
                elif code is None and now - when > SILENCE:
                    board.silent(rank)
                elif code and self.is_training and now - when > LEAVE:
                    board.fail(f"{board.name(rank)} ended with exit code {code}: see what it printed")
            self.is_over.wait(1)
        board.tell("ended", board.code)
        while board.rank == 0 and None in [board.told("ended", rank) for rank in heard]:
            time.sleep(1)
