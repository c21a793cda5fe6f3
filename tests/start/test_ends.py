"""How a run ends, and what is left of it: exit codes, signals, kills, restarts, a second start, a lost node.

These tests start launch.sh as a user does, and look at exit codes, processes and files only. tests/recipes/own/moments.py records
how far each process has come.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from cluster import Slurm, missing
from conftest import ROOT, at_night, slow
from runs import losses, read, wait_until

RECIPE = ROOT / "tests/recipes/own/moments.py"
STEPS = 30
FLAGS = ["--use_cpu", "--max_steps", str(STEPS), "--save_steps", "4", "--bf16", "false", "--ddp_timeout", "20"]
ONE, TWO = "1x3090", "4gpu_ddp"
PROCESSES = {ONE: 1, TWO: 2}
SLOWLY = {"SECONDS_PER_STEP": "0.2"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", ROOT / f"accelerate_configs/{TWO}.yaml"]
ACCELERATE += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]


class Run:
    """A command that was started in `folder`, in a session of its own; its processes are those with MOMENTS=FOLDER."""

    def __init__(self, folder: Path, command: list, variables: dict, start=subprocess.Popen):
        self.folder, self.log = folder, folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "cwd": folder}
            if start is subprocess.Popen:  # in the background, a shell makes programs ignore Ctrl-C
                options |= {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
            words = list(map(str, command))
            self.process = start(words, env=variables | {"MOMENTS": str(folder)}, **options)

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


@slow
def test_long_save_is_not_cut_off(launched):
    """torch's own launcher kills processes 30 s after SIGTERM."""
    run = launched(TWO, acts=[["save", -1, "time.sleep(35)"]], **SLOWLY)
    run.wait_for("step 2", 2)
    began = time.monotonic()
    run.process.terminate()
    assert run.end(seconds=120) == 143, run.printed()
    assert time.monotonic() - began > 35
    run.check_message(errors=0)
    again = launched(TWO, folder=run.folder)
    assert again.end() == 0 and read(run.folder / "run")["resumed_from_step"] == run.moments("save")[0]["step"] < 4


# A module that is imported after a while in any process.
PAUSED_IMPORT = """
import json, os, pathlib, sys, time
class Pause:
    def find_spec(name, path=None, target=None):
        if name == os.environ["PAUSED"] and sys.argv[0] != "-c":  # launch.sh looks packages up
            with pathlib.Path(os.environ["MOMENTS"], "moments.jsonl").open("a") as file:
                file.write(json.dumps({"moment": name}) + "\\n")
            time.sleep(60)
sys.meta_path.insert(0, Pause)
"""


@pytest.mark.parametrize(
    ("moment", "config", "number"),
    [
        ("built", TWO, signal.SIGINT),
        *at_night(*itertools.product(["torch", "transformers", "recipe"], [TWO], [signal.SIGINT, signal.SIGTERM])),
        *at_night(("arguments", TWO, signal.SIGINT), ("arguments", ONE, signal.SIGTERM), ("built", TWO, signal.SIGTERM)),
        *at_night(("step 2", TWO, signal.SIGINT), ("step 2", ONE, signal.SIGINT)),
    ],
)
def test_signal_at_any_moment(launched, tmp_path, moment, config, number):
    """While libraries are imported, the processes are started, the run is checked, the trainer is built, the run trains.

    A terminal sends Ctrl-C to its process group, `kill` sends SIGTERM to the launcher.
    """
    variables = {"acts": [[moment, -1, "time.sleep(60)"]]}
    if moment in ("torch", "transformers"):
        (tmp_path / "sitecustomize.py").write_text(PAUSED_IMPORT)
        variables = {"PYTHONPATH": str(tmp_path), "PAUSED": moment}
    run = launched(config, **variables)
    run.wait_for(moment)
    began = time.monotonic()
    os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
    assert run.end() == 128 + number, run.printed()
    assert time.monotonic() - began < 45
    run.check_message(errors=0)


@slow
def test_signals_after_the_last_step_have_no_effect(launched):
    """All processes get them again and again, until the last one has ended."""
    run = launched(TWO)
    run.wait_for("trained", 2)
    signals = 0
    while run.process.poll() is None:
        for process in run.alive():
            process.send_signal((signal.SIGUSR1, signal.SIGTERM)[signals % 2])
        signals += 1
    assert run.end() == 0 and signals > 2, run.printed()
    run.check_message(errors=0)
    assert len(losses(run.folder / "run")) == read(run.folder / "run")["global_step"] == STEPS


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


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([ROOT / "launch.sh", RECIPE, TWO], id="launch.sh"),
        pytest.param([sys.executable, RECIPE], id="python", marks=slow),
        pytest.param([sys.executable, *TORCHRUN, RECIPE], id="torchrun", marks=slow),
        pytest.param([sys.executable, *ACCELERATE, RECIPE], id="accelerate launch", marks=slow),
    ],
)
def test_finished_run_ends_at_once(start, uninterrupted, command):
    """With exit code 0, and without a change of any file."""

    def files() -> dict:
        paths = [path for path in (uninterrupted / "run").rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before = files()
    run = start(*command, *FLAGS, "--output_dir", uninterrupted / "run", NPROC_PER_NODE="2")
    try:
        assert run.end(seconds=60) == 0, run.printed()
    except subprocess.TimeoutExpired:
        pytest.fail("it hangs")
    run.check_message(errors=0)
    assert files() == before and not run.moments("trained")


# What processes do, and the exit code of the job. SIGTERM and SIGUSR1 stop a run with a checkpoint.
ENDS = {
    "finished": ([], [], 0),
    "refused": (["--global_batch_size", "3", "--per_device_train_batch_size", "2"], [], 2),
    "NaN": (["--learning_rate", "1e30"], [], 2),
    "exit": ([], [["built", -1, "sys.exit(7)"]], 2),
    "crash": ([], [["built", -1, "fail()"]], 1),
    "SIGTERM": ([], [["step 2", 0, "os.kill(os.getpid(), 15)"]], 143),
    "SIGUSR1": ([], [["step 2", 0, "os.kill(os.getpid(), 10)"]], 75),
    "killed": ([], [["step 2", 0, "os.kill(os.getpid(), 9)"]], 137),
}


@slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("program", [[], ["srun", "--ntasks=1"]], ids=["launch.sh", "srun"])
def test_exit_code_through_srun(machines, launched, program, end):
    """In an allocation launch.sh starts itself with srun, or the user does."""
    if not isinstance(machines, Slurm):
        pytest.skip(missing("slurmctld", "slurmd", "munged", "sbatch"))
    flags, acts, code = ENDS[end]
    run = launched(ONE, *flags, before=["salloc", "--nodes=1", *program], acts=acts, **machines.variables)
    assert run.end() == code, run.printed()


@slow
def test_node_that_dies_and_comes_back(machines, environment, uninterrupted, tmp_path):
    """The same command starts again where it has ended, as a scheduler does; the losses are those of an uninterrupted run."""
    settings = yaml.safe_load((ROOT / f"accelerate_configs/{TWO}.yaml").read_text())
    config = tmp_path / "2 nodes.yaml"
    config.write_text(yaml.safe_dump(settings | {"num_machines": 2, "num_processes": 2}))
    command = [ROOT / "launch.sh", RECIPE, config, *FLAGS, "--output_dir", "run", "--max_restarts", "3"]

    def start(rank: int, **more) -> Run:
        own = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": machines.names[0], "NPROC_PER_NODE": "1"} | more
        return Run(
            tmp_path, command, environment | own, lambda words, **more: machines.start(machines.names[rank], *words, **more)
        )

    runs = [start(rank, **SLOWLY) for rank in (0, 1)]
    wait_until(lambda: len(runs[0].moments("step 6")) == 2, 120, runs[0].printed)
    machines.kill("node1")
    starts = 0
    deadline = time.monotonic() + 240
    while any(run.process.poll() != 0 for run in runs):
        assert time.monotonic() < deadline and starts < 6, runs[0].printed()
        for rank, run in enumerate(runs):
            if run.process.poll() not in (None, 0):
                assert run.process.returncode != 2, run.printed()
                runs[rank], starts = start(rank), starts + 1
        time.sleep(1)
    runs[0].wait_for_processes()
    assert starts >= 1 and "Traceback" not in runs[0].printed()
    check_resumed(runs[0], uninterrupted, 4)
