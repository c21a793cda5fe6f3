"""Interrupts runs at random, and checks that the same command then gives the results of an uninterrupted run.

    python tests/campaign.py [TRIALS [SEED [KIND]]]

It prints a table, also after Ctrl-C, and writes every trial into campaign.jsonl. KIND: only trials of one kind.

A trial interrupts a rehearsal of six steps, which saves a checkpoint every two steps, in one of three ways:

- kill: SIGKILL, to one process or to all, just before the run changes a file in its output directory: opens it for writing,
  makes, renames or deletes it. Python's audit events report these changes. What torch and safetensors write without Python is
  killed before and after only; "damage" makes the incomplete files that a kill in between would leave.
- damage: a file of the newest checkpoint is missing, empty, truncated or changed.
- signal: SIGTERM or SIGUSR1 at a random moment after the start, to the launcher or to all processes.

Then the same command must exit with code 0, repeat no more steps than there are between two checkpoints, and log the losses and
save the model of the uninterrupted run, bit for bit (except ROUNDED). No process may remain and no traceback may be printed.
Every run is a fork of this process, which has imported the libraries, and does what launch.sh does; runs that get a signal are
launch.sh itself.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from forked_launcher import fork_instead, import_libraries
from runs import history, read

ROOT = Path(__file__).resolve().parents[1]
INTERVAL = 2  # steps between two checkpoints
FLAGS = ["--max_steps", "6", "--save_steps", str(INTERVAL), "--logging_steps", "1", "--eval_strategy", "no", "--max_length", "64"]
FLAGS += ["--global_batch_size", "8"]  # also of a run that is killed before its first checkpoint
PEFT = ["--use_peft", "--learning_rate", "2e-4"]
VARIANTS = {
    "full, 1 process": ["1x3090"],
    "adapter, 1 process": ["1x3090", *PEFT],
    "full, sharded, 1 process": ["1x3090_offload"],
    "full, 4 processes": ["4gpu_ddp"],
    "adapter, 4 processes": ["4gpu_ddp", *PEFT],
    "full, sharded, 4 processes": ["4gpu_full_shard"],
    "adapter, sharded, 4 processes": ["4gpu_full_shard", *PEFT],
}
# DDP changes its gradient buckets after its first step, and the sum over more than two processes depends on the bucket, so a
# resumed run rounds its first step differently. Its losses may differ by this share, and its weights by TOLERANCES.
ROUNDED = {"full, 4 processes": 1e-3, "adapter, 4 processes": 1e-3}
TOLERANCES = {"torch.bfloat16": {"rtol": 0.02, "atol": 0.005}, "torch.float32": {"rtol": 1e-4, "atol": 1e-6}}
MODEL_FILES = ("model.safetensors", "adapter_model.safetensors")
DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "changed": lambda path: path.write_bytes(bytes(255 - byte for byte in path.read_bytes())),
}
KINDS = ("kill", "damage", "signal")
TARGETS = ("all", "one")
EXIT_CODES = {0, 75, 143, 138, -signal.SIGTERM, -signal.SIGUSR1}  # of runs that got a signal
CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")  # audit events


class Run:
    """A run in its own process group, whose output goes into FOLDER.log.

    `kill_before`: the number of a change of a file; `target`: whether it kills the process or all. `changes`: a file that lists
    all changes. `as_fork`: a fork of this process instead of launch.sh.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        kill_before: int = 0,
        target: str = "all",
        changes: Path | None = None,
        as_fork: bool = True,
    ):
        self.log = folder.with_name(f"{folder.name}.log")
        config, *flags = arguments
        recipe, config = str(ROOT / "recipes/qwen2_fineweb_edu.py"), str(ROOT / f"accelerate_configs/{config}.yaml")
        command = ["launch.sh", "--tiny", recipe, config, *flags, *FLAGS, "--output_dir", str(folder)]
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if not as_fork:
                os.execv(ROOT / "launch.sh", command)
            if kill_before or changes:
                watch_changes(folder, kill_before, target, changes)
            sys.argv = command
            fork_instead(trains=True)
            runpy.run_module("harness.start.launch", run_name="__main__", alter_sys=True)  # exits
        except SystemExit as end:
            os._exit(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def send_signal(self, number: int, target: str):
        with contextlib.suppress(ProcessLookupError):
            if target == "all":
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def wait(self, seconds: float = 300) -> tuple[int | None, str]:
        """The exit code (-N for signal N, None if it did not exit), and what is wrong with how the run ended."""
        deadline = time.monotonic() + seconds
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return None, "did not exit"
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(ended[1])
        deadline = time.monotonic() + 10
        while self._has_processes():
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                return code, "processes remained"
            time.sleep(0.1)
        tracebacks = re.findall("Traceback.*", self.log.read_text(), re.DOTALL)
        return code, "".join(tracebacks)[-2000:]

    def _has_processes(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def watch_changes(folder: Path, kill_before: int, target: str, changes: Path | None):
    """Counts the changes in `folder` by this process and its forks; lists them in `changes`, or kills before one of them."""
    counter, is_in_hook = folder.with_name(f"{folder.name}.count"), False
    counter.write_bytes(b"")

    def count_and_kill(event, arguments):
        path = changed_path(event, arguments)
        if not path.startswith(f"{folder}/"):
            return
        file = os.open(counter, os.O_WRONLY | os.O_APPEND)  # one byte per change, of all processes
        os.write(file, b".")
        count = os.lseek(file, 0, os.SEEK_CUR)
        os.close(file)
        if changes:
            with changes.open("a") as file:
                file.write(f"{event} {Path(path).relative_to(folder)}\n")
        if count == kill_before:
            os.kill(0 if target == "all" else os.getpid(), signal.SIGKILL)

    def hook(event, arguments):
        nonlocal is_in_hook
        if event in CHANGES and not is_in_hook:
            is_in_hook = True
            count_and_kill(event, arguments)
            is_in_hook = False

    sys.addaudithook(hook)


def changed_path(event: str, arguments: tuple) -> str:
    """The absolute path that an audit event of CHANGES is about, "" for one that changes nothing."""
    if isinstance(arguments[0], int) or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        return ""
    directory = str(Path.cwd())
    if event in ("os.remove", "os.rmdir") and arguments[-1] != -1:  # relative to an open directory, as in shutil.rmtree
        directory = str(Path(f"/proc/self/fd/{arguments[-1]}").readlink())
    return os.path.normpath(os.path.join(directory, os.fsdecode(arguments[0])))  # noqa: PTH118 (it can be bytes)


@dataclasses.dataclass
class Reference:
    """An uninterrupted run."""

    folder: Path
    changes: list[str]  # of files in its folder
    seconds: float


@dataclasses.dataclass
class Trial:
    kind: str
    variant: str
    what: str  # what was done to the run, and when
    repeated: int  # steps that were trained twice
    problem: str  # "" if the trial succeeded


class Campaign:
    def __init__(self, folder: Path, seed: int, variants=tuple(VARIANTS)):
        self.folder, self.random, self.variants = folder, random.Random(seed), variants
        self.import_seconds = import_what_runs_need()
        self.references: dict[str, Reference] = {}
        self.trials: list[Trial] = []
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)

    def reference(self, variant: str) -> Reference:
        if variant not in self.references:
            run = self.folder / f"uninterrupted-{len(self.references)}"
            Run(run, VARIANTS[variant]).wait()  # makes the tiny model and dataset, which would be changes too
            shutil.rmtree(run)
            changes, began = run.with_suffix(".changes"), time.monotonic()
            started = Run(run, VARIANTS[variant], changes=changes)
            assert started.wait() == (0, ""), started.log.read_text()
            self.references[variant] = Reference(run, changes.read_text().splitlines(), time.monotonic() - began)
        return self.references[variant]

    def try_once(self, kind: str, variant: str) -> Trial:
        reference, run = self.reference(variant), self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        interrupts = {"kill": self._kill, "damage": self._damage, "signal": self._signal}
        what, last_step, problem = interrupts[kind](run, variant, reference)
        again = Run(run, VARIANTS[variant])
        code, problem_of_second = again.wait()
        problem, repeated = problem or problem_of_second, 0
        if not problem and code != 0:
            problem = f"then exit code {code}: {again.log.read_text()[-300:]}"
        if not problem:
            problem = difference(run, reference.folder, variant)
        if not problem and "is finished" not in again.log.read_text():
            repeated = max(0, last_step - read(run)["resumed_from_step"])
            problem = f"{repeated} steps repeated" if repeated > INTERVAL else ""
        trial = Trial(kind, variant, what, repeated, problem)
        self.trials.append(trial)
        with (self.folder / "campaign.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(trial)) + "\n")
        return trial

    def _kill(self, run: Path, variant: str, reference: Reference) -> tuple[str, int, str]:
        """What was done, the last step that was logged, and what is wrong with how the run ended."""
        number, target = self.random.randint(1, len(reference.changes)), self.random.choice(TARGETS)
        started = Run(run, VARIANTS[variant], number, target)
        what = f"before {reference.changes[number - 1]} ({number} of {len(reference.changes)}) to {target}"
        _, problem = started.wait()
        return what, last_logged_step(started), problem

    def _damage(self, run: Path, variant: str, reference: Reference) -> tuple[str, int, str]:
        shutil.copytree(reference.folder, run, ignore=shutil.ignore_patterns("train_results.json"))
        newest = run / "checkpoint-6"
        file = self.random.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
        damage = self.random.choice(list(DAMAGE))
        DAMAGE[damage](file)
        return f"{file.relative_to(newest)} {damage}", 6, ""

    def _signal(self, run: Path, variant: str, reference: Reference) -> tuple[str, int, str]:
        moment, target = self.random.uniform(0, reference.seconds + self.import_seconds), self.random.choice(TARGETS)
        number = self.random.choice((signal.SIGTERM, signal.SIGUSR1))
        started = Run(run, VARIANTS[variant], as_fork=False)
        time.sleep(moment)
        started.send_signal(number, target)
        code, problem = started.wait()
        if not problem and code not in EXIT_CODES:
            problem = f"exit code {code}"
        return f"{number.name} after {moment:.1f} s to {target}", last_logged_step(started), problem

    def table(self) -> str:
        counts = Counter((trial.variant, trial.kind) for trial in self.trials)
        lines = [f"| run | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
        for variant in self.variants:
            lines.append(f"| {variant} | {' | '.join(str(counts[variant, kind]) for kind in KINDS)} |")
        failed = [trial for trial in self.trials if trial.problem]
        most = max((trial.repeated for trial in self.trials), default=0)
        summary = (
            f"{len(self.trials)} trials, {len(failed)} failed; at most {most} steps were repeated, of {INTERVAL} between saves."
        )
        return "\n".join([*lines, "", summary, *(f"- {trial}" for trial in failed)])


def last_logged_step(run: Run) -> int:
    steps = re.findall(r"^step +(\d+)/.*  loss ", run.log.read_text(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def difference(run: Path, uninterrupted: Path, variant: str) -> str:
    """How the results of a run differ from those of the uninterrupted one, "" if they do not."""
    losses, expected_losses = logged_losses(run), logged_losses(uninterrupted)
    share = ROUNDED.get(variant)
    file = next(name for name in MODEL_FILES if (uninterrupted / name).is_file())
    if share is None:
        if (run / file).read_bytes() != (uninterrupted / file).read_bytes():
            return "another model"
        return "" if losses == expected_losses else "other losses"

    from safetensors.torch import load_file

    weights, expected = load_file(run / file), load_file(uninterrupted / file)
    if weights.keys() != expected.keys():
        return "another model"
    for name, weight in weights.items():
        if not weight.allclose(expected[name], **TOLERANCES[str(weight.dtype)]):
            return "another model"
    if len(losses) != len(expected_losses):
        return "other losses"
    pairs = zip(sum(losses, ()), sum(expected_losses, ()), strict=True)
    return "" if all(abs(one - other) <= share * abs(other) for one, other in pairs) else "other losses"


def logged_losses(run: Path) -> list[tuple]:
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in history(run)]


def import_what_runs_need() -> float:
    """Returns the seconds that it took. No thread may be started before a fork."""
    began = time.monotonic()
    sys.path.insert(0, str(ROOT / "recipes"))
    os.environ |= {"PYTHONPATH": str(ROOT / "recipes"), "PYTHON": sys.executable}
    import_libraries()
    return time.monotonic() - began


def main(trials: str = "300", seed: str = "0", kind: str = "") -> int:
    """Returns 1 if a trial failed."""
    campaign = Campaign(Path(os.environ.get("TMPDIR", "/tmp"), f"campaign-{os.getpid()}"), int(seed))
    kinds = [(variant, each) for variant in campaign.variants for each in ([kind] if kind else KINDS)]
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(int(trials)):
            variant, each = kinds[number % len(kinds)]
            trial = campaign.try_once(each, variant)
            print(f"{number + 1} {time.monotonic() - began:.0f} s", *dataclasses.astuple(trial), flush=True)
    print(campaign.table(), f"\nseed {seed}, {time.monotonic() - began:.0f} s, {campaign.folder}")
    return int(any(trial.problem for trial in campaign.trials))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
