"""Values that processes tell each other."""

import json
import subprocess
import sys

from harness import exchange

import pytest
from conftest import ROOT, free_port

VALUES = [3, 0.1, float("inf"), "é\ud800", None, True, {"a": [1.5, {}]}, ["x" * 1000, ""], []]
EXCHANGE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2)
from accelerate import PartialState
PartialState(cpu=True)
from harness import exchange
values = json.loads(sys.argv[4])
own = values if dist.get_rank() else values[:2]
print(json.dumps([exchange.gather_values(own), exchange.value_of_first(own)]))
"""


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_one_process(value):
    assert exchange.value_of_first(value) == value and exchange.gather_values(value) == [value]


def test_two_processes():
    """The values have different lengths."""
    arguments = [sys.executable, "-c", EXCHANGE, str(ROOT / "recipes"), str(free_port())]
    processes = [
        subprocess.Popen([*arguments, str(rank), json.dumps(VALUES)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert json.loads(output.splitlines()[-1]) == [[VALUES[:2], VALUES], VALUES[:2]]


def test_nothing_is_unpickled():
    """In the exchanges of this project; torch's own, of sharded checkpoints, are on a trusted network."""
    sources = [path.read_text() for path in (ROOT / "recipes/harness").rglob("*.py") if path.name != "exchange.py"]
    names = ("gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list")
    assert not [name for name in names for source in sources if name in source]
