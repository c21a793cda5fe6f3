"""The store at which the processes of one machine meet."""

import sys
from pathlib import Path

from harness.nodes.rendezvous import open_local_store

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
def test_store_listens_on_this_machine_only():
    from torch.distributed import TCPStore

    store = open_local_store()
    store.set("key", "value")
    assert TCPStore(store.host, store.port, is_master=False).get("key") == b"value"
    sockets = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [words[1] for words in sockets if words[1].endswith(f":{store.port:04X}") and words[3] == "0A"]
    assert listening == [f"0100007F:{store.port:04X}"]
