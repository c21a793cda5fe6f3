"""How a run ends, and what is left of it: exit codes, signals, kills, restarts, a second start.

They start launch.sh as a user does, and look at exit codes, processes and files only. tests/recipes/own/moments.py records
how far each process has come.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, at_night, slow
from runs import losses, read, wait_until

RECIPE = ROOT / "tests/recipes/own/moments.py"
STEPS = 30
FLAGS = ["--use_cpu", "--max_steps", str(STEPS), "--save_steps", "4", "--bf16", "false", "--ddp_timeout", "20"]
ONE, TWO = "1x3090", "4gpu_ddp"
PROCESSES = {ONE: 1, TWO: 2}
SLOWLY = {"SECONDS_PER_STEP": "0.2"}


class Run:
    """A command that was started in `folder`, in a session of its own; its processes are those with MOMENTS=FOLDER."""

    def __init__(self, folder: Path, command: list, variables: dict):
        self.folder, self.log = folder, folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "cwd": folder, "start_new_session": True}
            options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background shell ignores Ctrl-C
            self.process = subprocess.Popen(list(map(str, command)), env=variables | {"MOMENTS": str(folder)}, **options)

    def printed(self) -> str:
        return self.log.read_text()

    def moments(self, moment: str) -> list[dict]:
        file = self.folder / "moments.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [record for record in map(json.loads, lines) if record["moment"] == moment]

    def wait_for(self, moment: str, count: int = 1):
        """Waits until so many processes have come to a moment."""
        wait_until(lambda: len(self.moments(moment)) >= count or self.process.poll() is not None, 120, self.printed)
        assert self.process.poll() is None, self.printed()

    def alive(self) -> list[psutil.Process]:
        own = []
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:  # it has ended
                continue
            if f"MOMENTS={self.folder}\0".encode() in environment:
                own.append(process)
        return own

    def end(self, seconds: float = 90) -> int:
        """Waits for the end, also of its processes; returns the exit code that a shell shows."""
        code = self.process.wait(seconds)
        self.wait_for_processes()
        return code if code >= 0 else 128 - code

    def wait_for_processes(self):
        wait_until(lambda: not self.alive(), 20, lambda: f"{self.alive()}\n{self.printed()}")

    def check_message(self, errors: int):
        """At most one message is about the end, and there is no traceback."""
        lines = [line for line in self.printed().splitlines() if line.startswith("error: ")]
        assert len(lines) == errors and "Traceback" not in self.printed(), self.printed()


@pytest.fixture
def start(environment, tmp_path):
    """Starts a command; kills what is left at the end of the test. `folder`: of an earlier run."""
    runs = []

    def call(*command, folder=None, acts=(), **variables) -> Run:
        own = environment | {"PYTHONPATH": str(ROOT / "recipes"), "ACTS": json.dumps(list(acts))} | variables
        runs.append(Run(folder or tmp_path / f"run-{len(runs)}", command, own))
        return runs[-1]

    yield call
    for run in runs:
        for process in run.alive():
            process.kill()


@pytest.fixture
def launched(start):
    """Starts launch.sh with the recipe, a config and flags. The output directory is `run`."""

    def call(config, *flags, before=(), **options) -> Run:
        command = [*before, ROOT / "launch.sh", RECIPE, config, *FLAGS, "--output_dir", "run", *flags]
        return start(*command, NPROC_PER_NODE=str(PROCESSES[config]), **options)

    return call


@pytest.fixture(scope="module")
def uninterrupted(environment, tmp_path_factory) -> Path:
    """The folder of a finished run on two processes."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [ROOT / "launch.sh", RECIPE, TWO, *FLAGS, "--output_dir", "run"]
    run = Run(folder, command, environment | {"NPROC_PER_NODE": "2"})
    assert run.end() == 0 and len(losses(folder / "run")) == STEPS, run.printed()
    return folder


def check_resumed(run: Run, uninterrupted: Path, step: int):
    """The run has continued from the checkpoint of a step, and logged what an uninterrupted run logs, bit for bit."""
    assert read(run.folder / "run")["resumed_from_step"] == step
    assert losses(run.folder / "run") == losses(uninterrupted / "run")


@slow
@pytest.mark.parametrize(
    ("flags", "began"), [(["--global_batch_size", "3"], 0), (["--learning_rate", "1e30"], 2)], ids=["in the check", "in training"]
)
def test_refused_run_is_not_tried_again(launched, flags, began):
    """A step cannot have three rows on two processes; the loss of the other run is NaN."""
    run = launched(TWO, *flags, "--max_restarts", "2")
    assert run.end() == 2, run.printed()
    run.check_message(errors=1)
    assert len(run.moments("parsed")) == began and len(run.moments("recipe")) <= 3 and not run.moments("trained")


@pytest.mark.parametrize("to", ["launcher", *at_night("all")])
@pytest.mark.parametrize(
    ("number", "code", "config"),
    [(signal.SIGTERM, 143, TWO), *at_night((signal.SIGTERM, 143, ONE), (signal.SIGUSR1, 75, ONE))],
)
def test_signal_saves_and_ends(launched, uninterrupted, to, number, code, config):
    """Nothing starts again by itself, and the same command resumes. SLURM sends signals to every process of a job."""
    run = launched(config, "--max_restarts", "2", **SLOWLY)
    run.wait_for("step 2", PROCESSES[config])
    for process in run.alive() if to == "all" else [run.process]:
        process.send_signal(number)
    assert run.end() == code, run.printed()
    run.check_message(errors=0)
    assert len(run.moments("parsed")) == PROCESSES[config] and "Warning" not in run.printed()
    stopped = run.moments("save")[-1]["step"]
    assert 2 <= stopped < STEPS and not (run.folder / "run/train_results.json").exists()
    if (config, to) == (TWO, "launcher"):
        again = launched(config, folder=run.folder)
        assert again.end() == 0, again.printed()
        check_resumed(again, uninterrupted, stopped)


@pytest.mark.parametrize(
    ("moment", "config", "number"),
    [
        ("built", TWO, signal.SIGINT),
        *at_night(("recipe", TWO, signal.SIGTERM), ("arguments", ONE, signal.SIGTERM), ("step 2", TWO, signal.SIGINT)),
    ],
)
def test_signal_at_any_moment(launched, moment, config, number):
    """While the processes are started, the run is checked, the trainer is built, the run trains.

    A terminal sends Ctrl-C to its process group, `kill` sends SIGTERM to the launcher.
    """
    run = launched(config, acts=[[moment, -1, "time.sleep(60)"]])
    run.wait_for(moment)
    began = time.monotonic()
    os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
    assert run.end() == 128 + number, run.printed()
    assert time.monotonic() - began < 45
    run.check_message(errors=0)


@pytest.mark.parametrize(("moment", "config"), [("step 2", TWO), *at_night(("built", TWO), ("step 2", ONE))])
def test_killed_launcher_leaves_no_process(launched, moment, config):
    run = launched(config, **SLOWLY)
    run.wait_for(moment, PROCESSES[config])
    run.process.kill()
    run.process.wait()
    run.wait_for_processes()


def test_killed_process(launched, uninterrupted):
    """The processes start again as often as --max_restarts says, and resume. The message is about the one that was killed."""
    run = launched(TWO, "--max_restarts", "1", acts=[["step 6", 1, "os.kill(os.getpid(), 9)"]])
    assert run.end() == 137, run.printed()
    run.check_message(errors=1)
    assert len(run.moments("parsed")) == 4 and [each["step"] for each in run.moments("save") if each["rank"] == 0] == [4]
    once = "os.path.exists('killed') or (open('killed', 'w'), os.kill(os.getpid(), 9))"
    again = launched(TWO, "--max_restarts", "1", folder=run.folder, acts=[["step 10", 1, once]])
    assert again.end() == 0, again.printed()
    check_resumed(again, uninterrupted, 8)


@pytest.mark.parametrize(
    ("rank", "act", "code"),
    [
        (-1, "fail()", 1),
        *at_night((1, "fail()", None), (-1, "sys.exit(7)", 2), (-1, "sys.exit()", 2), (-1, "os._exit(0)", 0)),
    ],
)
def test_recipe_that_ends_before_training(launched, rank, act, code):
    """An exception prints one traceback, from the recipe's own lines on, although all processes have it."""
    run = launched(TWO, acts=[["built", rank, act]])
    ended, printed = run.end(), run.printed()
    assert ended == code if code is not None else ended not in (0, 2), printed
    assert printed.count("Traceback") == printed.count("AssertionError: mine") == (code in (1, None)), printed


def test_finished_run_ends_at_once(start, uninterrupted):
    """With exit code 0, and without a change of any file."""

    def files() -> dict:
        paths = [path for path in (uninterrupted / "run").rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before = files()
    run = start(ROOT / "launch.sh", RECIPE, TWO, *FLAGS, "--output_dir", uninterrupted / "run", NPROC_PER_NODE="2")
    assert run.end(seconds=60) == 0, run.printed()
    run.check_message(errors=0)
    assert files() == before and not run.moments("trained")
