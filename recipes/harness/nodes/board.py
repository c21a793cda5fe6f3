"""Notes that the launchers of all nodes write and read: torch's TCPStore on the head, whose silence ends this node."""

import datetime
import json
import os
import sys
import threading

from harness.nodes.machines import number

SILENCE = number("NODE_SILENCE", 60)  # seconds after which a node that says nothing counts as lost
GOING_ON = "The same command goes on from the newest checkpoint, if there is one"


class Board:
    """A key is written once, by the node whose rank is in it: "name/rank". Values are JSON."""

    def __init__(self, host: str, port: int, is_head: bool):
        """Opens the store on the head, or connects to it. Raises RuntimeError when that fails."""
        from torch.distributed import TCPStore

        timeout = datetime.timedelta(seconds=SILENCE)
        self._store = TCPStore("127.0.0.1" if is_head else host, port, None, is_head, timeout, wait_for_workers=False)
        self.head = "node 0"  # what to call it
        self.is_closed = False  # this node has ended and needs no answers

    def set(self, key: str, value):
        self._ask(lambda: self._store.set(key, json.dumps(value)))

    def has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def get(self, key: str):
        return json.loads(self._ask(lambda: self._store.get(key)))

    def count(self, key: str, more: int) -> int:
        return self._ask(lambda: self._store.add(key, more))

    def _ask(self, question):
        # Over a dead line a question to the head is never answered, whatever the store's timeout.
        unanswered = threading.Timer(SILENCE, self.silent, [self.head])
        unanswered.daemon = True
        unanswered.start()
        try:
            return question()
        except RuntimeError:  # of which torch's DistNetworkError and DistStoreError are kinds
            self.fail(f"{self.head} is gone, or the network between: see what it printed. {GOING_ON}")
        finally:
            unanswered.cancel()

    def silent(self, name: str):
        self.fail(f"nothing heard of {name} for {SILENCE} s: it or the network is down. {GOING_ON}")

    def fail(self, message: str):
        """Ends this process with a line, from any thread; on Linux, what it has started dies with it."""
        if not self.is_closed:
            print(f"\nerror: {' '.join(message.split())}", file=sys.stderr, flush=True)
            os._exit(1)
        sys.exit()
