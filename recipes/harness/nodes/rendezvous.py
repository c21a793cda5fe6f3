"""Where the processes of a run meet, for torch's elastic agent; those of a single node where other machines cannot connect."""

import socket

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class FixedNodes(RendezvousHandler):
    """The rendezvous of nodes that are known: this one alone, or those of a `Meeting`."""

    use_agent_store = True  # the processes connect to the store of the launcher, which outlives them

    def __init__(self, rank: int = 0, count: int = 1, address: str = "127.0.0.1", port: int | None = None) -> None:
        """`address`, `port`: of the store at which the processes of all nodes meet; port None: this node opens one."""
        self.rank, self.count, self.address, self.port = rank, count, address, port
        self.store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        port = self.port
        if port is None:
            self.store = open_local_store()
            port = self.store.port
        # The agents exchange nothing, see TORCH_ELASTIC_WORKER_IDENTICAL.
        return RendezvousInfo(HashStore(), self.rank, self.count, RendezvousStoreInfo(self.address, port))

    def get_backend(self) -> str:
        return "fixed"

    def get_run_id(self) -> str:
        return "fixed"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other node asks."""

    def shutdown(self) -> bool:
        return True


def open_local_store() -> TCPStore:
    """A TCPStore at which the processes of this machine meet.

    Other machines cannot connect to it: it would listen at all addresses of this one without a socket of its own. torch unpickles
    what processes send each other through it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
