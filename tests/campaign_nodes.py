"""Interrupts a run on two nodes at a random moment, starts what was lost again, and checks what the run has trained.

    python tests/campaign_nodes.py [TRIALS [SEED [KIND]]]

Needs root on Linux, for network namespaces. It prints a table, also after Ctrl-C, and writes every trial into
campaign_nodes.jsonl. KIND: only trials of one interruption or one moment.

A trial is a rehearsal of one epoch, 120 steps of four rows, on two nodes with one process each (NNODES=1:2). It saves and
evaluates every ten steps. What happens is in INTERRUPTIONS, when in MOMENTS; the same command then runs again on the node that is
gone.

In the end both launchers must exit with code 0, without a traceback. Every row of the epoch must have been trained once, counted
by the numbers in its tokens, in the attempts at each step that count: the last ones. Each step must have had the same rows in all
attempts and in an uninterrupted run, and the same loss up to rounding. The run must continue within LIMIT seconds.

If neither the logs nor the records grow for SILENT seconds, the stacks of all processes are written into stacks-N.txt, with
py-spy if it is installed.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import yaml
from cluster import Nodes, missing
from filelock import FileLock
from forked_launcher import ForkedLauncher

ROOT = Path(__file__).resolve().parents[1]
STEPS, ROWS_OF_STEP, EVALUATED = 120, 4, 16
SILENCE, WAIT = 6, 40  # NODE_SILENCE, NODE_WAIT
LIMIT = SILENCE + 60  # seconds until the run continues
SILENT = 45
TOLERANCE = 1e-3  # of a loss in float32, on another number of processes
FLAGS = ["--per_device_train_batch_size", "2", "--max_eval_samples", str(EVALUATED)]
FLAGS += ["--save_steps", "10", "--eval_steps", "10", "--logging_steps", "1", "--warmup_steps", "2"]
FLAGS += ["--learning_rate", "1e-3"]  # that of a rehearsal, 1e-2, makes much of a difference in rounding
VARIANTS = {
    "in memory": ["--max_steps", "-1", "--global_batch_size", str(ROWS_OF_STEP)],
    "streamed": ["--dataset_streaming", "true", "--max_steps", str(STEPS), "--gradient_accumulation_steps", "1"],  # on two nodes
}
INTERRUPTIONS = (
    "process of node 0",  # SIGKILL, as the others but the network and SIGTERM
    "process of node 1",
    "launcher of node 1",
    "node 1",
    "network of node 1",  # for 1 to 15 seconds
    "SIGTERM to node 1",
    "node 1 comes later",  # it is missing at first
    "node 0",
    "launcher of node 0",
)
MOMENTS = {"starting": "", "training": "rows", "evaluating": "evaluating", "saving": "saving"}  # which record begins it


class Failure(Exception):
    """Something in a trial is not as it should be."""


@dataclasses.dataclass
class Trial:
    what: str
    moment: str
    variant: str
    details: str = ""
    step: int = 0  # the last one that was trained before
    seconds: float = 0.0  # until a step was trained again
    lost_seconds: float = 0.0  # until the run was as far as before
    repeated: int = 0  # steps that were trained again
    starts: int = 0  # of the processes, with the first one
    difference: float = 0.0  # of a loss, at most
    problem: str = ""


class TwoNodes:
    """A run on two of `machines`, in `folder`."""

    def __init__(self, machines: Nodes, launcher: ForkedLauncher, folder: Path, variant: str):
        self.machines, self.launcher, self.folder, self.variant = machines, launcher, folder, variant
        self.run, self.records_file = folder / "run", folder / "records.jsonl"
        self.processes, self.logs = {}, []  # of the nodes; all logs
        self.size, self.grown, self.dumps = 0, time.monotonic(), 0
        folder.mkdir(parents=True)
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
        texts = (f"row {i}: {words[i % 11]} after {words[i // 11 % 11]}" for i in range(STEPS * ROWS_OF_STEP + EVALUATED))
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        settings = yaml.safe_load((ROOT / "accelerate_configs/4gpu_full_shard.yaml").read_text())
        (folder / "2 nodes.yaml").write_text(
            yaml.safe_dump(settings | {"num_machines": 2, "num_processes": 2, "mixed_precision": "no"})
        )

    def start(self, rank: int | None, wait: int = WAIT):
        """Starts the command on a node, or for None both processes on this machine."""
        flags = [*FLAGS, *VARIANTS[self.variant], "--dataset_name", self.folder / "rows.jsonl", "--output_dir", self.run]
        command = ["--tiny", ROOT / "tests/nodes/recorded.py", self.folder / "2 nodes.yaml", *flags]
        log = self.folder / f"{len(self.logs)}-node{rank}.log"
        options = {"out": log, "err": log, "cwd": self.folder, "RECORDS": str(self.folder)}
        if rank is None:
            self.processes[0] = self.launcher.start(*command, **options)
        else:
            options |= {"NNODES": "1:2", "NODE_RANK": str(rank), "MASTER_ADDR": "node0"}
            options |= {"NODE_SILENCE": str(SILENCE), "NODE_WAIT": str(wait)}
            self.processes[rank] = self.machines.fork(self.launcher, self.machines.names[rank], *command, **options)
        self.logs.append(log)

    def records(self, event: str = "rows") -> list[dict]:
        lines = self.records_file.read_text().splitlines() if self.records_file.exists() else []
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # its writer was killed
                records.append(json.loads(line))
        return sorted((each for each in records if each["event"] == event), key=lambda each: each["time"])

    def last_step(self) -> int:
        return max((each["step"] for each in self.records()), default=0)

    def wait_for(self, condition: Callable, seconds: float, what: str):
        """Waits until `condition()`."""
        deadline = time.monotonic() + seconds
        while not condition():
            size = sum(path.stat().st_size for path in (*self.logs, self.records_file) if path.exists())
            is_silent = size == self.size and time.monotonic() - self.grown > SILENT
            if size != self.size or is_silent:
                self.size, self.grown = size, time.monotonic()
            if is_silent or time.monotonic() > deadline:
                self.dump_stacks()
            if time.monotonic() > deadline:
                raise Failure(f"waited {seconds:.0f} s for {what}")
            time.sleep(0.05)

    def has_ended(self, rank: int) -> bool:
        return self.processes[rank].poll() is not None

    def go_on(self, what: str, starts: set[str]):
        """Starts the command on node 1 if it has ended; waits until both nodes train, after another start than `starts`.

        If only the network was lost for a while, the nodes can also train on without a start, and node 1 can end later.
        """
        since = time.time()
        if 1 not in self.processes or (self.has_ended(1) and not what.startswith("process")):
            self.start(1)

        def trains_on_both() -> bool:
            for rank, process in list(self.processes.items()):
                if self.has_ended(rank) and rank == 1 and what.startswith("network"):
                    self.start(1)
                elif self.has_ended(rank):
                    raise Failure(f"node {rank} ended with exit code {process.returncode}")
            last = self.records()[-1:] or [{"start": "", "time": 0, "processes": 0}]
            has_started = last[0]["start"] not in starts or (what.startswith("network") and last[0]["time"] > since + 2 * SILENCE)
            return has_started and last[0]["time"] > since and last[0]["processes"] == 2

        self.wait_for(trains_on_both, 2 * LIMIT, "a step on both nodes")

    def wait_for_end(self):
        """Waits until the launchers have ended well."""
        for rank, process in self.processes.items():
            self.wait_for(lambda: process.poll() is not None, 120, f"the end of node {rank}")  # noqa: B023
            if process.returncode:
                raise Failure(f"node {rank} ended with exit code {process.returncode}")
        for name in self.machines.names:
            self.wait_for(lambda: not self.machines.pids(name), 15, f"the end of all processes of {name}")  # noqa: B023
        for log in self.logs:
            if "Traceback" in log.read_text():
                raise Failure(f"a traceback in {log}")

    def dump_stacks(self):
        self.dumps += 1
        for name in self.machines.names:
            for pid in self.machines.pids(name):
                if spy := shutil.which("py-spy"):
                    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
                    stacks = subprocess.run(command, capture_output=True, text=True).stdout
                else:
                    stacks = "\n".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/wchan"))
                with (self.folder / f"stacks-{self.dumps}.txt").open("a") as file:
                    file.write(f"--- {name}, process {pid}\n{stacks}\n")

    def end(self):
        for name in self.machines.names:
            self.machines.kill(name)
            self.machines.set_cable(name, "up")


@dataclasses.dataclass
class Reference:
    """An uninterrupted run."""

    rows: dict[int, list[int]]  # of each step, sorted
    losses: dict[int, tuple]  # and the learning rate
    tokens: int


def make_reference(nodes: TwoNodes) -> Reference:
    (nodes.folder / "fast").touch()
    nodes.start(None)
    nodes.wait_for_end()
    rows = {step: sorted(attempts[-1]) for step, attempts in attempts_at_steps(nodes).items()}
    every_row = [row for step in rows.values() for row in step]
    assert len(every_row) == len(set(every_row)) == STEPS * ROWS_OF_STEP, every_row
    return Reference(rows, losses_of(nodes.run), tokens_of(nodes.run))


def try_once(nodes: TwoNodes, what: str, moment: str, reference: Reference, chance: random.Random) -> Trial:
    trial = Trial(what, moment, nodes.variant)
    try:
        interrupt(nodes, trial, chance)
        check(nodes, trial, reference)
    except Failure as failure:
        trial.problem = str(failure)
    finally:
        nodes.end()
    return trial


def interrupt(nodes: TwoNodes, trial: Trial, chance: random.Random):
    """Does what the trial is about, until the run has ended."""
    nodes.start(0, wait=15 if trial.what == "node 1 comes later" else WAIT)  # after this time it begins without node 1
    if trial.what != "node 1 comes later":
        nodes.start(1)
    victim = 0 if trial.what.endswith("node 0") else 1
    wait_for_moment(nodes, trial, victim, chance)
    trial.step, began, starts = nodes.last_step(), time.time(), {each["start"] for each in nodes.records()}
    seconds = chance.uniform(1, 15)
    trial.details += f", for {seconds:.1f} s" if trial.what == "network of node 1" else ""
    take_away(nodes, trial.what, seconds)
    if trial.what in ("node 0", "launcher of node 0"):
        nodes.wait_for(lambda: nodes.has_ended(1), LIMIT + WAIT, "the end of node 1 without node 0")
        if nodes.processes[1].returncode == 0:
            raise Failure("node 1 ended with exit code 0 without node 0")
        began = time.time()
        nodes.start(0)
    elif 1 in nodes.processes and nodes.has_ended(1):
        time.sleep(chance.uniform(0, 12))
    nodes.go_on(trial.what, starts)
    (nodes.folder / "fast").touch()
    nodes.wait_for_end()
    after = [each for each in nodes.records() if each["time"] > began]
    trial.seconds = round(min([each["time"] for each in after if each["start"] not in starts] or [began]) - began, 1)
    trial.lost_seconds = round(next(each["time"] for each in after if each["step"] > trial.step) - began, 1)
    trial.starts = len({each["start"] for each in nodes.records()})


def wait_for_moment(nodes: TwoNodes, trial: Trial, victim: int, chance: random.Random):
    if trial.moment != "starting":
        step = chance.randint(3, 60)
        event = MOMENTS[trial.moment]
        nodes.wait_for(lambda: any(each["step"] >= step for each in nodes.records(event)), 120, f"{event} at step {step}")
        delay = chance.uniform(0, 0.4)
    elif trial.what.startswith("process"):
        nodes.wait_for(lambda: pids_that_train(nodes, victim), 120, "a process that starts")
        delay = chance.uniform(0, 3)
    else:
        delay = chance.uniform(0, 8) + (15 if trial.what == "node 1 comes later" else 0)
    trial.details = f"{delay:.2f} s later"
    time.sleep(delay)


def take_away(nodes: TwoNodes, what: str, seconds: float):
    """Waits until what was killed has gone. A launcher must not leave its processes behind. `seconds`: without a network."""
    if what.startswith("process"):
        os.kill(pids_that_train(nodes, int(what[-1]))[-1], signal.SIGKILL)
    elif what == "network of node 1":
        nodes.machines.set_cable("node1", "down")
        time.sleep(seconds)
        nodes.machines.set_cable("node1", "up")
    elif what == "SIGTERM to node 1":
        nodes.processes[1].terminate()
        nodes.wait_for(lambda: nodes.has_ended(1), LIMIT, "the end of node 1 after SIGTERM")
    elif what != "node 1 comes later":
        rank = int(what[-1])
        if what.startswith("launcher"):
            nodes.processes[rank].kill()
        else:
            nodes.machines.kill(f"node{rank}")
        name = nodes.machines.names[rank]
        nodes.wait_for(lambda: nodes.has_ended(rank) and not nodes.machines.pids(name), 15, f"the end of all processes of {name}")


def pids_that_train(nodes: TwoNodes, rank: int) -> list[int]:
    """The process IDs that a node's processes have recorded, of those that run."""
    own = [each["pid"] for each in nodes.records("starting") if each["host"] == f"node{rank}"]
    return [pid for pid in own if pid in nodes.machines.pids(f"node{rank}")]


def check(nodes: TwoNodes, trial: Trial, reference: Reference):
    """Compares a run with the uninterrupted one."""
    attempts = attempts_at_steps(nodes)
    if trial.seconds > LIMIT:
        raise Failure(f"it trained again after {trial.seconds} s")
    trial.repeated = sum(map(len, attempts.values())) - STEPS
    for step, rows in reference.rows.items():
        if step not in attempts or sorted(attempts[step][-1]) != rows:
            raise Failure(f"step {step} has trained rows {attempts.get(step)}, expected {rows}")
        if any(Counter(attempt) - Counter(rows) for attempt in attempts[step]):
            raise Failure(f"an attempt at step {step} had rows {attempts[step]}, expected {rows}")
    found = losses_of(nodes.run)
    if found.keys() != reference.losses.keys():
        raise Failure(f"logged steps {sorted(found)}")
    for step, (loss, learning_rate) in found.items():
        expected_loss, expected_rate = reference.losses[step]
        trial.difference = max(trial.difference, round(abs(loss - expected_loss), 5))
        if learning_rate != expected_rate or abs(loss - expected_loss) > TOLERANCE:
            raise Failure(f"loss and learning rate {found[step]} at step {step}, expected {reference.losses[step]}")
    if tokens_of(nodes.run) != reference.tokens:
        raise Failure(f"{tokens_of(nodes.run)} tokens, expected {reference.tokens}")


def attempts_at_steps(nodes: TwoNodes) -> dict[int, list[list[int]]]:
    """The rows of each attempt at a step, by step; the last attempt is last."""
    rows = defaultdict(list)
    for each in nodes.records():
        rows[each["step"], each["start"]] += each["rows"]
    attempts = defaultdict(list)
    for (step, _), numbers in rows.items():  # in the order of time, because the records are
        attempts[step].append(numbers)
    return attempts


def losses_of(run: Path) -> dict[int, tuple]:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: (entry["loss"], entry["learning_rate"]) for entry in history if "loss" in entry}


def tokens_of(run: Path) -> int:
    return json.loads((run / "train_results.json").read_text())["tokens"]


def table(trials: list[Trial]) -> str:
    lines = [f"| taken away | {' | '.join(MOMENTS)} | seconds until it trained again |", "|---" * (2 + len(MOMENTS)) + "|"]
    for what in INTERRUPTIONS:
        of_kind = [trial for trial in trials if trial.what == what]
        counts = Counter(trial.moment for trial in of_kind)
        seconds = [trial.seconds for trial in of_kind if trial.seconds and not trial.problem] or [0]
        times = f"{statistics.median(seconds):.0f}, at most {max(seconds):.0f}"
        lines.append(f"| {what} | {' | '.join(str(counts[moment]) for moment in MOMENTS)} | {times} |")
    failed = [trial for trial in trials if trial.problem]
    return "\n".join([*lines, "", f"{len(trials)} trials, {len(failed)} failed", *(f"- {trial}" for trial in failed)])


def main(trials: str = "64", seed: str = "0", kind: str = "") -> int:
    """Returns 1 if a trial failed."""
    if reason := missing():
        sys.exit(reason)
    folder, chance, done = Path(tempfile.mkdtemp(prefix="campaign-nodes-")), random.Random(int(seed)), []
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "home"), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    launcher = ForkedLauncher(os.environ | offline, folder)
    plan = [(one, moment) for one in INTERRUPTIONS for moment in MOMENTS if kind in ("", one, moment)]
    chance.shuffle(plan)
    print(folder, flush=True)
    lock = FileLock("/tmp/campaign-nodes.lock")  # whatever TMPDIR is: the names of the namespaces are the same
    with lock, Nodes(2, folder / "machines", "campaign", "10.178.0") as machines, contextlib.suppress(KeyboardInterrupt):
        references = {}
        for variant in VARIANTS:
            references[variant] = make_reference(TwoNodes(machines, launcher, folder / f"uninterrupted {variant}", variant))
        for number in range(int(trials)):
            variant = chance.choice(list(VARIANTS))
            nodes = TwoNodes(machines, launcher, folder / f"trial {number + 1}", variant)
            trial = try_once(nodes, *plan[number % len(plan)], references[variant], chance)
            done.append(trial)
            with (folder / "campaign_nodes.jsonl").open("a") as file:
                file.write(json.dumps(dataclasses.asdict(trial)) + "\n")
            print(number + 1, trial, flush=True)
            if not trial.problem:
                shutil.rmtree(nodes.folder)
    launcher.close()
    print(f"{table(done)}\nseed {seed}, {folder}")
    return int(any(trial.problem for trial in done))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
