"""PyTorch's elastic agent, which starts and watches the processes of a node: what it lacks, and private names of it."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from harness.compat.guards import changes
from harness.signals import NODE_JOINS, OUT_OF_TIME, delayed_signals, last_signal

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

EXIT_TIMEOUT = 30  # seconds for processes that may wait for others that have ended; torch's value
_AGENT = "torch.distributed.elastic.agent.server"


class Agent(LocalElasticAgent):
    """An agent whose processes end by themselves, and that passes signals on to them."""

    def __init__(self, spec: WorkerSpec, start_method: str, restarts_left: Callable[[int, int, int], int]) -> None:
        """`restarts_left`: see `make_agent`."""
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method)
        self.restarts_left = restarts_left
        self.pids: list[int] | None = None  # of the processes, [] when they have ended, None while they will be started

    def send_signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except DistStoreError:  # a node was lost before it had published its number of processes
            self._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with delayed_signals():  # until the processes are known; those that are started need locks of this one
            pids = super()._start_workers(worker_group)
            self.pids = list(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the processes. They have succeeded when all have ended with exit code 0.

        For torch, a process that ends without a result, as after `os._exit(0)`, never ends, and those with a result wait for it.
        """
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and not self._pcontext._pc.sentinels:
            result = RunResult(WorkerState.SUCCEEDED, dict.fromkeys(worker.global_rank for worker in worker_group.workers))
        if result.state != WorkerState.HEALTHY:
            self.pids = []
        for rank, failure in result.failures.items():
            self._remaining_restarts = self.restarts_left(failure.exitcode, rank, self._remaining_restarts)
            self.pids = None if self._remaining_restarts else []
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Healthy processes write a checkpoint when a node joins. They cannot when a node is lost, or its processes have ended.

        torch would kill them after 30 s, however long a checkpoint takes.
        """
        if self.pids:
            self.send_signal(NODE_JOINS)
            processes, nodes, deadline = self._pcontext._pc.processes, worker_group.spec.rdzv_handler, math.inf
            while any(process.is_alive() for process in processes):
                if deadline == math.inf and nodes.has_node_that_waits():
                    deadline = time.monotonic() + EXIT_TIMEOUT
                if nodes.has_lost_node() or time.monotonic() > deadline:
                    self._shutdown(signal.SIGKILL)
                time.sleep(0.2)
            if last_signal():
                sys.exit(OUT_OF_TIME if last_signal() == signal.SIGUSR1 else 128 + last_signal())
            if 128 + signal.SIGINT in (process.exitcode for process in processes):
                sys.exit(128 + signal.SIGINT)
            if all(process.exitcode == 0 for process in processes):
                raise RendezvousGracefulExitError("the run has ended meanwhile")
            self.pids = None
        super()._stop_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Does not wait for the other agents: `Meeting.end` does."""

    def _construct_event(self, state: str, source: EventSource, *arguments: Any, **values: Any) -> Event:
        """An event without the name of the host, for which torch would ask the DNS at every event."""
        return Event(state, source)


@changes(
    f"{_AGENT}.api:SimpleElasticAgent._rendezvous(self, worker_group)",
    f"{_AGENT}.local_elastic_agent:LocalElasticAgent._start_workers(self, worker_group)",
    f"{_AGENT}.local_elastic_agent:LocalElasticAgent._monitor_workers(self, worker_group)",
    f"{_AGENT}.local_elastic_agent:LocalElasticAgent._stop_workers(self, worker_group)",
    f"{_AGENT}.api:SimpleElasticAgent._construct_event",
    f"{_AGENT}.api:SimpleElasticAgent._exit_barrier(self)",
    "torch.distributed.elastic.multiprocessing.api:MultiprocessContext",
)
def make_agent(spec: WorkerSpec, start_method: str, restarts_left: Callable[[int, int, int], int]) -> Agent:
    """An agent whose processes end by themselves, see `Agent`.

    `restarts_left`: called with the exit code and the rank of the first process that has failed, and how often the processes can
    still start again; returns how often they can now. They start again if that is not 0.

    The agent has no public way to learn which processes it has started, or to give up after some exit codes. At a signal, it ends
    the processes and drops their exit codes, so the launcher handles signals instead.
    Upstream: no issue found.
    Checked with: torch 2.13.0.
    Remove when: the agent forwards signals and returns the exit codes.
    """
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # all nodes have the same number of processes
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGURG"  # one that is never sent
    return Agent(spec, start_method, restarts_left)
