"""Values that processes tell each other."""

import json
import multiprocessing

from harness import exchange

import pytest
import torch.distributed as dist
from accelerate import PartialState
from conftest import ROOT
from runs import free_port

VALUES = [3, 0.1, float("inf"), "é\ud800", None, True, {"a": [1.5, {}]}, ["x" * 1000, ""], []]


def exchange_in_process(rank: int, port: int, results: multiprocessing.SimpleQueue) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    PartialState(cpu=True)
    own = VALUES if rank else VALUES[:2]
    results.put(json.dumps([exchange.gather_values(own), exchange.value_of_first(own)]))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_one_process(value):
    assert exchange.value_of_first(value) == value and exchange.gather_values(value) == [value]


def test_two_processes():
    """The values have different lengths."""
    context, port = multiprocessing.get_context("fork"), free_port()
    results = context.SimpleQueue()
    processes = [context.Process(target=exchange_in_process, args=(rank, port, results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
        assert json.loads(results.get()) == [[VALUES[:2], VALUES], VALUES[:2]]


def test_nothing_is_unpickled():
    """In the exchanges of this project; torch's own, of sharded checkpoints, are on a trusted network."""
    sources = [path.read_text() for path in (ROOT / "recipes/harness").rglob("*.py") if path.name != "exchange.py"]
    names = ("gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list")
    assert not [name for name in names for source in sources if name in source]
