"""The launchers of several nodes find each other, and find that they were started alike."""

import os
import socket
import sys
import time
from pathlib import Path

from harness.nodes import network
from harness.nodes.board import Board
from harness.nodes.machines import Nodes, number

WAIT = number("NODE_WAIT", 600)  # seconds a node that comes late is waited for
NOTICE = 30  # seconds between two lines about who is missing
OWN = "give each machine a NODE_RANK of its own"


def gather(nodes: Nodes, facts: dict) -> Board:
    """Waits until all nodes are here; "node/R" on the board then says who node R is.

    `facts`, by the name of what they are, must be the same on all nodes. Ends the process with one line when a node does
    not come in time, came with other facts, or with a rank that is taken.
    """
    patience = _Patience()
    board = _open(nodes, patience)
    own = {"host": socket.gethostname(), "pid": os.getpid(), "address": network.address(nodes.head)}
    own["facts"] = {"NNODES": nodes.count} | facts
    if board.has(f"node/{nodes.rank}"):
        there = board.get(f"node/{nodes.rank}")
        is_dead = there["host"] == own["host"] and not Path(f"/proc/{there['pid']}").exists()
        if not is_dead or board.has("met/0"):
            board.fail(f"{there['host']} is node {nodes.rank} already: {OWN}")
    board.set(f"node/{nodes.rank}", own)
    while missing := [rank for rank in range(nodes.count) if not board.has(f"node/{rank}")]:
        _compare(board, nodes, own)
        patience.wait(f"node {', '.join(map(str, missing))} of {nodes.count} (NODE_RANK counts from 0)")
    _compare(board, nodes, own)
    board.set(f"met/{nodes.rank}", True)
    board.head = name(board, 0)
    if nodes.rank:
        print(f"Node {nodes.rank} of {nodes.count} is here; {board.head} speaks for all.", flush=True)
    return board


def name(board: Board, rank: int) -> str:
    """What to call a node in messages."""
    return f"node {rank} ({board.get(f'node/{rank}')['host']})"


def _open(nodes: Nodes, patience: "_Patience") -> Board:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the lines below say it
    if nodes.rank == 0:
        try:
            return Board(nodes.head, nodes.port, True)
        except RuntimeError:
            _end(
                f"port {nodes.port} of this machine is taken: by another NODE_RANK 0? Else set another MASTER_PORT, on all nodes"
            )
    where = f"{nodes.head}:{nodes.port}"
    while True:
        try:
            socket.create_connection((nodes.head, nodes.port), timeout=5).close()
            break
        except OSError:
            patience.wait(f"node 0: nobody answers at {where} (MASTER_ADDR, MASTER_PORT; a firewall?)")
    try:
        return Board(nodes.head, nodes.port, False)
    except RuntimeError as error:
        _end(f"what answers at {where} is not node 0 of this run ({network.first_line(error)})")


def _compare(board: Board, nodes: Nodes, own: dict):
    """Compares this node with those that have come."""
    for rank in (rank for rank in range(nodes.count) if board.has(f"node/{rank}")):
        there = board.get(f"node/{rank}")
        for fact, value in own["facts"].items():
            if there["facts"][fact] != value:
                other = name(board, rank)
                board.fail(f"{other} was started with {fact} {there['facts'][fact]}, this node with {fact} {value}")
        if rank == nodes.rank and there != own:
            board.fail(f"{there['host']} says it is node {rank} too: {OWN}")


class _Patience:
    """Says now and then who is waited for, and ends the process when it has been too long."""

    def __init__(self):
        self.began = time.monotonic()
        self.notice = self.began + 5

    def wait(self, whom: str):
        now = time.monotonic()
        waited = f"{now - self.began:.0f} of {WAIT} s (NODE_WAIT)"
        if now - self.began > WAIT:
            _end(f"waited {waited} in vain for {whom}")
        if now > self.notice:
            self.notice = now + NOTICE
            print(f"Waiting for {whom}, {waited} so far.", flush=True)
        time.sleep(0.5)


def _end(message: str):
    print(f"\nerror: {message}", file=sys.stderr, flush=True)
    sys.exit(1)
