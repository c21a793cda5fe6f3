"""The nodes of a run: which they are, their network, and how their launchers start and end together.

The launchers exchange values through torch's TCPStore on the head node. The store's own waiting functions (`wait`, `get` of a
missing key, the barriers of torch.distributed.elastic) are not used: over a dead connection they outlast every timeout, and
block signal handlers meanwhile (torch 2.13).
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from harness.launched import OUT_OF_TIME, UserError, last_signal, record_signal, set_signal_handler

T = TypeVar("T")
MESSAGE_INTERVAL = 30  # seconds between two messages about a missing node
LEAVE_TIMEOUT = 30  # seconds a node's processes have to exit by themselves after another node has failed
DEFAULT_PORT = 29400
LOCAL_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}  # file systems
LOST = 3  # exit code of a process that lost the others
CAUSES = (
    "Usual causes, and the variable to set: GPUs that cannot reach each other directly (consumer cards, an IOMMU): "
    "NCCL_P2P_DISABLE=1; the wrong interface: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, one of `ip -br addr`; no working "
    "InfiniBand: NCCL_IB_DISABLE=1; a firewall: allow TCP on all ports between the nodes. NCCL_DEBUG=INFO prints more"
)
# gloo raises RuntimeError with the place in its source: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection …
FROM_GLOO = re.compile(r"\[[^\]]*gloo[^\]]*:\d+\]")


@dataclass
class Nodes:
    """The machines of a run, as seen from one of them. The defaults are one machine."""

    count: int = 1
    rank: int = 0  # of this machine; 0 is the head
    head: str = "127.0.0.1"  # name or address at which the others reach machine 0
    port: int = DEFAULT_PORT  # of the head, where the launchers meet
    processes: int = 0  # on each machine; 0: as many as the config says
    is_allocation: bool = False  # a SLURM allocation in which `srun` has not started this process


def nodes_from_environment() -> Nodes:
    """Reads the environment. Raises UserError if a variable is missing, wrong, or contradicts another."""
    if "SLURM_JOB_ID" in os.environ:
        nodes = _slurm_nodes()
    elif "SKYPILOT_NODE_RANK" in os.environ:
        addresses = os.environ.get("SKYPILOT_NODE_IPS", "").split()
        nodes = Nodes(len(addresses), integer_from_environment("SKYPILOT_NODE_RANK", least=0), (addresses or [""])[0])
        nodes.processes = integer_from_environment("SKYPILOT_NUM_GPUS_PER_NODE", 0, least=0)
    else:
        missing = [name for name in ("NNODES", "NODE_RANK", "MASTER_ADDR") if not os.environ.get(name)]
        nodes = Nodes(
            count=integer_from_environment("NNODES", 1),
            rank=integer_from_environment("NODE_RANK", 0, least=0),
            head=os.environ.get("MASTER_ADDR", ""),
        )
        if missing and (nodes.count > 1 or "NODE_RANK" not in missing):
            raise UserError(
                f"{' and '.join(missing)} missing: several machines need NNODES and MASTER_ADDR (the name of the first one), the "
                "same on all, and NODE_RANK, 0 on the first, 1 on the next"
            )
    if nodes.rank not in range(nodes.count):
        raise UserError(f"node rank {nodes.rank} of {nodes.count} nodes: ranks go from 0 to {nodes.count - 1}")
    nodes.processes = integer_from_environment("NPROC_PER_NODE", 0) or nodes.processes
    nodes.port = integer_from_environment("MASTER_PORT", nodes.port)
    if nodes.port > 65_535:
        raise UserError(f"MASTER_PORT is {nodes.port}, expected 1 to 65535")
    # The login host of a SLURM cluster may not know the names of its nodes.
    if nodes.count > 1 and (not nodes.is_allocation or "SLURMD_NODENAME" in os.environ):
        try:
            socket.getaddrinfo(nodes.head, nodes.port)
        except OSError as error:
            raise UserError(
                f"MASTER_ADDR: the head node {nodes.head} does not resolve ({error.strerror}): give its name or address, "
                "without a port"
            ) from error
    return nodes


def integer_from_environment(variable: str, default: int | None = None, least: int = 1) -> int:
    """A whole number from the environment; the default is not checked."""
    value = os.environ.get(variable)
    if value is None and default is not None:
        return default
    if not re.fullmatch(r"\d{1,9}", value or "") or int(value) < least:
        raise UserError(f"{variable} is {value!r}, expected a whole number, {least} or more")
    return int(value)


def _slurm_nodes() -> Nodes:
    """The nodes of a SLURM step (`srun` started this process) or of an allocation (a batch script, a shell in `salloc`)."""
    is_step = "SLURM_STEP_ID" in os.environ
    scope = "SLURM_STEP" if is_step else "SLURM_JOB"
    nodes = Nodes(count=integer_from_environment(f"{scope}_NUM_NODES", 1), is_allocation=not is_step)
    nodes.port = 10_000 + integer_from_environment("SLURM_JOB_ID") % 20_000  # below the ports the system gives to clients
    nodes.processes = integer_from_environment("SLURM_GPUS_ON_NODE", 0, least=0)
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE" if is_step else "SLURM_TASKS_PER_NODE", "1")
    if not is_step and not shutil.which("srun"):
        raise UserError("this is a SLURM allocation, but srun is not in PATH: load SLURM's module, or add its folder to PATH")
    if not re.fullmatch(r"1(\(x\d+\))?", tasks) and (is_step or "SLURM_NTASKS" in os.environ):
        raise UserError(
            f"SLURM has {tasks} tasks per node, expected one: launch.sh starts one process per GPU itself. Use "
            "--ntasks-per-node=1"
        )
    if not is_step:
        job = os.environ["SLURM_JOB_ID"]
        _, reason = _run_scontrol("show", "job", job)
        if reason:
            raise UserError(f"SLURM_JOB_ID is {job}, which SLURM does not know ({reason}): unset it outside of a job")
    if is_step:
        nodes.rank = integer_from_environment("SLURM_NODEID", least=0)
    nodes.head = os.environ.get("MASTER_ADDR", "")
    if nodes.count > 1 and not nodes.head:
        node_list = os.environ.get(f"{scope}_NODELIST", "")
        names, reason = _run_scontrol("show", "hostnames", node_list)
        if reason or not names:
            raise UserError(f"cannot read the names of the nodes {node_list} ({reason}): set MASTER_ADDR to the first one's name")
        nodes.head = names[0]
    return nodes


def _run_scontrol(*arguments: str) -> tuple[list[str], str]:
    """The words that scontrol prints, and the reason if it fails."""
    try:
        process = subprocess.run(["scontrol", *arguments], capture_output=True, text=True)
    except OSError:
        return [], "scontrol is not in PATH"
    reason = " ".join(process.stderr.split()[:40]) or f"exit code {process.returncode}"
    return process.stdout.split(), reason if process.returncode else ""


def run_with_srun(nodes: Nodes, arguments: list[str]) -> int:
    """Starts the launcher once on every node of a SLURM allocation; returns its exit code.

    A job that ran out of time, and has a checkpoint, goes back to the queue.
    """
    command = ["srun", f"--nodes={nodes.count}", f"--ntasks={nodes.count}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    cpus = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    if cpus:
        command.append(f"--cpus-per-task={min(cpus)}")  # the one task gets all the CPUs that the job has on a node
    started: list[subprocess.Popen] = []

    def forward(number: int, frame: FrameType | None) -> None:
        record_signal(number)
        for srun in started:
            srun.send_signal(number)  # srun sends it on to the nodes

    set_signal_handler(forward)
    started.append(subprocess.Popen([*command, sys.executable, "-m", "harness.start.launch", *arguments]))
    if last_signal():  # it came before srun was started
        forward(last_signal(), None)
    code = started[0].wait()
    job = os.environ["SLURM_JOB_ID"]
    if code == 128 + signal.SIGUSR1:
        print("error: out of time before the first checkpoint: give the job more --time", file=sys.stderr)
    if code == OUT_OF_TIME:
        print(f"Job {job} goes back to the queue and will resume from its newest checkpoint.", flush=True)
        if subprocess.run(["scontrol", "requeue", job]).returncode:
            print(f"error: job {job} cannot be requeued: submit the same command again", file=sys.stderr)
    return code


def physical_cores() -> int:
    """Physical cores that this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable)


def is_on_local_disk(folder: Path) -> bool:
    """Whether a folder is on a file system that belongs to this machine alone. False if that is unknown."""
    import psutil

    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    return next((mounts[parent] in LOCAL_DISKS for parent in (place, *place.parents) if parent in mounts), False)


def find_gpus() -> list[tuple[float, str, float]]:
    """(bytes of memory, name, compute capability) of every GPU that a run may use, from nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    selection = [f"--id={visible}"] if visible else []
    listed = ask_nvidia_smi("--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits", *selection)
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in listed.splitlines() if line.count(",") >= 2]
    gpus = [(float(size) * 2**20, name, float(version)) for name, size, version in rows if size.isdecimal()]
    return gpus[: integer_from_environment("NPROC_PER_NODE", len(gpus))]


def ask_nvidia_smi(*options: str) -> str:
    """What nvidia-smi prints, "" if it is not there or fails."""
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def host_memory() -> float:
    """Bytes of host memory, or those that a container or a SLURM job may use."""
    import psutil

    return min(psutil.virtual_memory().total, memory_limit())


def memory_limit(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """The smallest memory limit of this process's control groups, in bytes; infinity without one. Source: cgroups(7)."""
    limits = [math.inf]
    for line in process.read_text("utf-8").splitlines() if process.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):  # "": version 2, with all controllers
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        own = top / group.lstrip("/")
        for folder in (own, *own.parents):
            text = (folder / name).read_text("utf-8").strip() if (folder / name).is_file() else ""
            limits.append(int(text) if text.isdecimal() else math.inf)
    return min(limits)


def check_all_reduce(device: Any, seconds: float = 120) -> None:
    """All processes all-reduce some numbers within `seconds`. Exits with the usual causes if that fails. Collective.

    The sum is checked too: behind an IOMMU, GPUs can reach each other and read the wrong bytes.
    """
    import torch
    import torch.distributed as dist

    with time_limit(seconds, exit_with_causes, f"no answer within {seconds:.0f} s"):
        numbers = torch.full((65_536,), dist.get_rank() + 1.0, device=device)
        try:
            dist.all_reduce(numbers)
            expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
            wrong = int((numbers != expected).sum())
        except RuntimeError as error:
            exit_with_causes(error)
        if wrong:
            exit_with_causes(f"{wrong} of {len(numbers)} sums were wrong")


def wait_for_first_process() -> None:
    """Waits until the first process calls this too, however long it checks a run and quantizes its model. Collective."""
    import torch.distributed as dist

    try:
        store, rank, _ = next(dist.rendezvous("env://"))
        if rank == 0:
            store.set("first process is ready", "")
        while not store.check(["first process is ready"]):
            time.sleep(0.5)
    except RuntimeError as error:
        exit_with_causes(error)


@contextlib.contextmanager
def time_limit(seconds: float, stop: Callable[[Any], None], argument: Any) -> Iterator[None]:
    """Calls `stop(argument)` from a thread if the block takes longer: torch can hang where its own timeouts do not apply."""
    timer = threading.Timer(seconds, stop, [argument])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def exit_with_causes(reason: Exception | str) -> NoReturn:
    """Exits because processes that have just started cannot communicate."""
    _exit(f"the processes cannot communicate: {first_line(reason)}. {CAUSES}")


def exit_if_connection_lost(error: Exception, step: int, resume: str) -> None:
    """Exits with one message if `error` is a lost connection to another process; returns if it is something else."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and FROM_GLOO.search(str(error))):
        _exit(f"the connection to another process was lost at step {step} ({first_line(error)}). {resume}")


def _exit(message: str) -> NoReturn:
    """Exits without waiting for the others, which cannot be reached. The first process of each node prints the message."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The first process prints and exits first. If it is the one that was lost, the launcher prints a message.
        time.sleep(3)
    elif not last_signal():  # after a signal the launcher says why the other process exited
        print(f"\nerror: {message}", file=sys.stderr, flush=True)
    os._exit(LOST)


def first_line(error: Exception | str) -> str:
    """The first sentence of an error, without the place in gloo's source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).strip().split("\n")[0]).split(". ")[0][:200]


def own_address(host: str) -> str:
    """This machine's address on the route to `host`, "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket sends nothing when it connects
        except OSError:
            return ""
        return probe.getsockname()[0]


def interface_to(host: str) -> str | None:
    """The name of the network interface on the route to `host`, None if that is the loopback interface or not known."""
    import psutil

    own = own_address(host)
    if own.startswith("127."):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if own in {address.address for address in addresses}:
            return name
    return None


def seconds_to_wait() -> int:
    """How long a node that starts late is waited for, and one whose processes exit late."""
    return integer_from_environment("NODE_WAIT", 600)


def seconds_of_silence() -> int:
    """After how long a node that sends nothing counts as lost."""
    return integer_from_environment("NODE_SILENCE", 60)


class Meeting(contextlib.AbstractContextManager):
    """This node among the others, from before the checks until all nodes have ended.

    Every node publishes values under a key; `read` returns the value of one node. A thread publishes a heartbeat every second.
    """

    def __init__(self, nodes: Nodes, facts: dict[str, Any]) -> None:
        """Waits until all nodes are here. `facts` must be the same on all nodes; a difference ends this process."""
        self.nodes = nodes
        self.silence, self.patience = seconds_of_silence(), seconds_to_wait()
        self.known: dict[int, dict] = {}  # rank: host, address and facts of that node
        self.is_training = False
        self.exit_code: int | None = None  # of this node, once it has ended
        self.has_ended = threading.Event()
        self._waiting_since: float | None = None
        self._next_message = 5.0
        self._store = self._open_store("127.0.0.1" if nodes.rank == 0 else nodes.head, nodes.port)
        self._find_nodes({"NNODES": nodes.count} | facts)
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        codes = {type(None): 0, SystemExit: getattr(error, "code", 0), UserError: 2}
        self.end(codes.get(type(error), 1))

    def check_in_turn(self, check: Callable[[], T]) -> T:
        """Runs `check` on one node after the other, because they can share a folder. Returns this node's result."""
        if self.nodes.rank > 0:
            self._wait_for("checked", self.nodes.rank - 1)
        result = check()
        self._exchange("checked", True)
        return result

    def all_see(self, folder: Path, patience: float | None = None) -> bool:
        """Whether all nodes see the same `folder`. Network file systems can show a new file late. Collective."""
        if patience is None:
            patience = 2 if is_on_local_disk(folder) else 90
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-nodes-") as own:
            of_head, deadline = folder / self._exchange("token", Path(own.name).name)[0], time.monotonic() + patience
            while not (sees := of_head.exists()) and time.monotonic() < deadline:
                time.sleep(0.5)
                os.scandir(folder).close()
            return all(self._exchange("sees", sees))

    def another_address(self) -> str:
        """An address of another node."""
        return self.nodes.head if self.nodes.rank else self.known[1]["address"]

    def run(self, train: Callable[[], int]) -> int:
        """Runs `train`, this node's part of the training; returns its exit code, 0 to 255."""
        self.is_training = True
        code = train()
        self.end(code)
        return code

    def end(self, code: int | None) -> None:
        """Tells the others how this node ended. The head waits until all have ended, because the store ends with it."""
        if self.exit_code is None:
            self.exit_code = code or 0
            self.has_ended.set()
            if self.is_training:
                self.watcher.join(LEAVE_TIMEOUT + 5 if code else self.patience)  # a node that fails ends the others
            else:
                self.watcher.join(5)

    def publish(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(f"{key}/{self.nodes.rank}", json.dumps(value)))

    def read(self, key: str, rank: int) -> Any:
        """What node `rank` has published under `key`; None if it has not."""
        name = f"{key}/{rank}"
        return self._ask(lambda: json.loads(self._store.get(name)) if self._store.check([name]) else None)

    def name(self, rank: int) -> str:
        return f"node {rank} ({self.known[rank]['host']})" if rank in self.known else f"node {rank}"

    def _open_store(self, host: str, port: int) -> Any:
        """The store in which the nodes meet: node 0 opens it, the others wait for it. Exits if something else answers there.

        Whether it is the store of this run is found out by `_find_nodes`.
        """
        from harness.compat.torch import hide_store_warnings

        from torch.distributed import TCPStore

        hide_store_warnings()  # the messages here replace them
        if self.nodes.rank == 0:
            problem = (
                f"port {port} of this machine is in use, perhaps by another NODE_RANK 0: set another MASTER_PORT on all nodes"
            )
        else:
            problem = f"the process that answers at {host}:{port} is not node 0 of this run"
            while not _accepts_connections(host, port):
                self._wait_or_exit(f"node 0: nothing answers at {host}:{port} (MASTER_ADDR, MASTER_PORT; a firewall?)")
        try:
            with time_limit(self.silence, exit_with, problem):
                return TCPStore(host, port, is_master=self.nodes.rank == 0, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            exit_with(f"{problem} ({first_line(error)})")

    def _find_nodes(self, facts: dict[str, Any]) -> None:
        """Registers this node, waits for all others, and exits if a rank is taken or a node was started with other facts."""
        rank, nodes = self.nodes.rank, self.nodes
        own = {"host": socket.gethostname(), "pid": os.getpid(), "address": own_address(nodes.head), "facts": facts}
        # Sets the value unless there is one, and returns the value that is there.
        registered = self._ask(lambda: json.loads(self._store.compare_set(f"node/{rank}", "", json.dumps(own))))
        if registered != own:
            was_killed = registered["host"] == own["host"] and not Path(f"/proc/{registered['pid']}").exists()
            if not was_killed:
                exit_with(f"{registered['host']} is node {rank} already: give each machine its own NODE_RANK")
            if self.read("heartbeat", 0):  # the head has a heartbeat once all nodes have met
                exit_with(f"node {rank} was started again while the others run: stop all nodes, then start all again")
        self.publish("node", own)
        while len(self.known) < nodes.count:
            found = {other: self.read("node", other) for other in range(nodes.count)}
            self.known = {other: node for other, node in found.items() if node}
            for other, node in self.known.items():
                for fact, value in facts.items():
                    if node["facts"].get(fact) != value:
                        theirs = node["facts"].get(fact)
                        if rank == 0:
                            time.sleep(2)  # until the others have seen it too: the store ends with this process
                        exit_with(f"{self.name(other)} was started with another {fact} than this node: {theirs}, here {value}")
            if missing := ", ".join(str(other) for other in range(nodes.count) if other not in self.known):
                self._wait_or_exit(f"NODE_RANK {missing} (of {nodes.count} nodes, counted from 0)")
        if rank > 0:
            print(f"Node {rank} has joined; {self.name(0)} prints the messages of all {nodes.count} nodes.", flush=True)

    def _wait_or_exit(self, what: str) -> None:
        """Waits half a second; prints what is waited for now and then, and exits after `patience` seconds."""
        if self._waiting_since is None:  # importing torch takes long; that time does not count
            self._waiting_since = time.monotonic()
        seconds = time.monotonic() - self._waiting_since
        waited = f"{seconds:.0f} of {self.patience} s (NODE_WAIT)"
        if seconds > self.patience:
            exit_with(f"waited {waited} for {what}")
        if seconds > self._next_message:
            self._next_message = seconds + MESSAGE_INTERVAL
            print(f"Waiting for {what}, {waited} so far.", flush=True)
        time.sleep(0.5)

    def _exchange(self, key: str, value: Any) -> list:
        """Every node's value, by rank. Collective."""
        self.publish(key, value)
        return [self._wait_for(key, rank) for rank in range(self.nodes.count)]

    def _wait_for(self, key: str, rank: int) -> Any:
        """Waits for the value of a node, however long that takes; `_watch` ends this process if that node is lost."""
        while True:
            # The exit code is read first: it is the last thing that a node publishes.
            code, value = self.read("exit_code", rank), self.read(key, rank)
            if value is not None:
                return value
            if code:
                print(f"error: {self.name(rank)} did not pass its checks: see its output", file=sys.stderr)
            if code is not None:
                sys.exit(code)
            time.sleep(0.2)

    def _watch(self) -> None:
        """The thread: publishes heartbeats and this node's exit code, and ends this node when another is lost or has failed."""
        now = time.monotonic()
        last_heard = {rank: (None, now) for rank in self.known if rank != self.nodes.rank}  # heartbeat, and when it came

        def seconds_silent(rank: int) -> float:
            heartbeat, now = self.read("heartbeat", rank), time.monotonic()
            if heartbeat != last_heard[rank][0]:
                last_heard[rank] = heartbeat, now
            return now - last_heard[rank][1]

        while self.exit_code is None:
            self.publish("heartbeat", time.monotonic())
            for rank in last_heard:
                code, silent = self.read("exit_code", rank), seconds_silent(rank)
                if code is None and silent > self.silence:
                    self._exit_for_silence(rank)
                elif code and self.is_training and silent > LEAVE_TIMEOUT:
                    self._fail(f"{self.name(rank)} ended with exit code {code}: see its output")
            self.has_ended.wait(1)
        self.publish("exit_code", self.exit_code)
        while self.nodes.rank == 0 and any(
            self.read("exit_code", rank) is None and seconds_silent(rank) < self.silence for rank in last_heard
        ):
            time.sleep(1)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The answer of the store; the store's silence ends this node."""
        try:
            with time_limit(self.silence, self._exit_for_silence, 0):
                return question()
        except RuntimeError:  # torch's DistNetworkError and DistStoreError are subclasses
            self._fail(f"{self.name(0)} has exited, or the network to it is down: see its output")

    def _exit_for_silence(self, rank: int) -> None:
        self._fail(f"nothing was heard from {self.name(rank)} for {self.silence} s: it or the network is down")

    def _fail(self, message: str) -> NoReturn:
        """Ends the process with a message, from any thread; only the thread if this node has ended."""
        if self.exit_code is None:
            exit_with(f"{message}. The same command resumes from the newest checkpoint, if there is one")
        sys.exit()


def _accepts_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def exit_with(message: str) -> NoReturn:
    """Ends the process with a message, from any thread; on Linux the processes it has started are killed with it."""
    print(f"\nerror: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(1)
