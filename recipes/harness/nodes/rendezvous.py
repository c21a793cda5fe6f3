"""Where the processes of a run on one node meet, so that other machines cannot connect: for torch's elastic agent."""

import socket

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ONE_NODE = "one_node"  # the `rdzv_backend`


class OneNode(RendezvousHandler):
    """The rendezvous of a run on one node: it waits for no other."""

    use_agent_store = True

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens a store of their own for the processes: those that crashed have left their keys in an old one."""
        self.of_processes = open_local_store()
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", self.of_processes.port))

    def get_backend(self) -> str:
        return ONE_NODE

    def get_run_id(self) -> str:
        return "run"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def make_one_node(parameters: RendezvousParameters) -> OneNode:
    return OneNode()


def open_local_store() -> TCPStore:
    """A TCPStore at which the processes of this machine meet.

    Other machines cannot connect to it: it would listen at all addresses of this one without a socket of its own. torch unpickles
    what processes send each other through it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


rendezvous_handler_registry.register(ONE_NODE, make_one_node)
