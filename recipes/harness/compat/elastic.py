"""PyTorch's elastic agent, which starts and watches the processes of a node: what it lacks, and private names of it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from harness.compat.guards import changes
from harness.signals import NODE_JOINS, OUT_OF_TIME, SIGNALS, last_signal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

_AGENT = "torch.distributed.elastic.agent.server"


class Agent(LocalElasticAgent):
    """An agent whose processes end by themselves, and that passes signals on to them."""

    def __init__(
        self,
        spec: WorkerSpec,
        start_method: str,
        is_of_another_node: Callable[[int], bool],
        is_final: Callable[[int], bool],
        progress: Callable[[], Any],
        report: Callable[..., None],
    ) -> None:
        """For the functions see `make_agent`."""
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method)
        self.is_of_another_node, self.is_final, self.progress, self.report = is_of_another_node, is_final, progress, report
        self.progress_before = progress()
        self.pids: list[int] | None = None  # of the processes, [] when they have ended, None while they will be started

    def send_signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *SIGNALS))  # until the processes are known
        pids = super()._start_workers(worker_group)
        self.pids = list(pids.values())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
            restarts, before, self.progress_before = worker_group.spec.max_restarts, self.progress_before, self.progress()
            if self.is_of_another_node(failure.exitcode):
                self._remaining_restarts += 1  # torch counts it
            elif self.is_final(failure.exitcode):
                self._remaining_restarts = 0
            else:
                if self.progress_before != before:
                    self._remaining_restarts = restarts
                if self._remaining_restarts:
                    self.report(failure.exitcode, rank, restarts - self._remaining_restarts + 1, restarts)
            if self._remaining_restarts:
                self.pids = None
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Healthy processes are stopped when a node joins, with a checkpoint, or is lost, when they only wait for it.

        torch would kill them after 30 s, however long a checkpoint takes.
        """
        if self.pids:
            self.send_signal(NODE_JOINS)
            while any(process.is_alive() for process in self._pcontext._pc.processes):
                if worker_group.spec.rdzv_handler.has_lost_nodes():
                    self._shutdown(signal.SIGKILL)
                time.sleep(0.1)
            if last_signal():
                sys.exit(OUT_OF_TIME if last_signal() == signal.SIGUSR1 else 128 + last_signal())
            self.pids = None
        super()._stop_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Does not wait for the other agents: `Meeting.end` does."""

    def _construct_event(self, state: str, source: EventSource, *arguments: Any, **values: Any) -> Event:
        """An event without the name of the host, for which torch would ask the DNS at every event."""
        return Event(state, source)


@changes(
    f"{_AGENT}.local_elastic_agent:LocalElasticAgent._start_workers(self, worker_group)",
    f"{_AGENT}.local_elastic_agent:LocalElasticAgent._monitor_workers(self, worker_group)",
    f"{_AGENT}.local_elastic_agent:LocalElasticAgent._stop_workers(self, worker_group)",
    f"{_AGENT}.api:SimpleElasticAgent._construct_event",
    f"{_AGENT}.api:SimpleElasticAgent._exit_barrier(self)",
    "torch.distributed.elastic.multiprocessing.api:MultiprocessContext",
)
def make_agent(
    spec: WorkerSpec,
    start_method: str,
    is_of_another_node: Callable[[int], bool],
    is_final: Callable[[int], bool],
    progress: Callable[[], Any],
    report: Callable[[int, int, int, int], None],
) -> Agent:
    """An agent whose processes end by themselves, see `Agent`.

    `is_of_another_node`: whether this exit code is no crash, and does not count. `is_final`: whether processes are not started
    again after this exit code. `progress`: if it returns something else than after the last crash, they can be started again
    `spec.max_restarts` times. `report`: called before they are, with the exit code and the rank of the first one that failed, how
    often they have been started again, this time included, and how often they can.

    The agent has no public way to learn which processes it has started, or to give up after some exit codes. At a signal, it ends
    the processes and drops their exit codes, so the launcher handles signals instead.
    Upstream: no issue found.
    Checked with: torch 2.13.0.
    Remove when: the agent forwards signals and returns the exit codes.
    """
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # all nodes have the same number of processes
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGURG"  # one that is never sent
    return Agent(spec, start_method, is_of_another_node, is_final, progress, report)
