"""Interrupts runs at random, and checks that the same command then gives the results of an uninterrupted run.

    python tests/campaign.py [TRIALS [SEED [KIND]]]

A trial interrupts a rehearsal of six steps, which saves a checkpoint every two steps, in one of three ways:

- kill: SIGKILL, to one process or to all, just before the run changes a file in its output directory: opens it for writing,
  makes, renames or deletes it. Python's audit events report these changes. What torch and safetensors write without Python is
  killed before and after only; "damage" makes the incomplete files that a kill in between would leave.
- damage: a file of the newest checkpoint is missing, empty, truncated or changed.
- signal: SIGTERM or SIGUSR1 at a random moment after the start, to the launcher or to all processes.

Then the same command must exit with code 0, repeat no more steps than there are between two checkpoints, and write the losses and
the model of the uninterrupted run, bit for bit. No process and no traceback may remain.
"""

import contextlib
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
from runs import losses, read

ROOT = Path(__file__).resolve().parents[1]
INTERVAL = 2  # steps between two checkpoints
FLAGS = ["--max_steps", "6", "--save_steps", str(INTERVAL), "--logging_steps", "1", "--eval_strategy", "no", "--max_length", "64"]
FLAGS += ["--global_batch_size", "8"]  # also of a run that is killed before its first checkpoint
PEFT = ["--use_peft", "--learning_rate", "2e-4"]
# DDP is left out: it rounds the first step of a resumed run differently.
VARIANTS = {
    "full, 1 process": ["1x3090"],
    "adapter, 1 process": ["1x3090", *PEFT],
    "full, sharded, 1 process": ["1x3090_offload"],
    "full, sharded, 4 processes": ["4gpu_full_shard"],
    "adapter, sharded, 4 processes": ["4gpu_full_shard", *PEFT],
}
DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "changed": lambda path: path.write_bytes(bytes(255 - byte for byte in path.read_bytes())),
}
TARGETS = ("all", "one")
EXIT_CODES = {0, 75, 143, 138, -signal.SIGTERM, -signal.SIGUSR1}  # of runs that got a signal
CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")  # audit events


class Run:
    """A run in its own process group, whose output goes into FOLDER.log, and the changes of its files into FOLDER.changes.

    `kill_before`: the number of a change that is not made; `target`: whether its process is killed or all. `as_fork`: a fork of
    this process instead of launch.sh.
    """

    def __init__(self, folder: Path, variant: str, kill_before: int = 0, target: str = "all", as_fork: bool = True):
        self.log = folder.with_suffix(".log")
        config, *flags = VARIANTS[variant]
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
            watch_changes(folder, kill_before, target)
            sys.argv = command
            fork_instead(trains=True)
            runpy.run_module("harness.start.launch", run_name="__main__", alter_sys=True)  # exits
        except SystemExit as end:
            os._exit(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

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
        with contextlib.suppress(ProcessLookupError):
            for _ in range(100):
                os.killpg(self.pid, 0)
                time.sleep(0.1)
            os.killpg(self.pid, signal.SIGKILL)
            return code, "processes remained"
        return code, "".join(re.findall("Traceback.*", self.log.read_text(), re.DOTALL))[-2000:]


def watch_changes(folder: Path, kill_before: int, target: str) -> None:
    """Lists the changes in `folder` by this process and its forks, a line for each, and kills before one of them."""
    listed, is_in_hook = folder.with_suffix(".changes"), False
    listed.write_bytes(b"")

    def hook(event, arguments):
        nonlocal is_in_hook
        if event not in CHANGES or is_in_hook:
            return
        is_in_hook = True
        path = changed_path(event, arguments)
        if path.startswith(f"{folder}/"):
            with listed.open("a") as file:
                file.write(f"{event} {path.removeprefix(f'{folder}/')}\n")
            if len(listed.read_text().splitlines()) == kill_before:
                os.kill(0 if target == "all" else os.getpid(), signal.SIGKILL)
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


def kill(choose: random.Random, folder: Path, variant: str, uninterrupted: Path) -> tuple[str, int, str]:
    """What was done, the last step that was logged, and what is wrong with how the run ended; so the next two."""
    changes, target = uninterrupted.with_suffix(".changes").read_text().splitlines(), choose.choice(TARGETS)
    number = choose.randint(1, len(changes))
    run = Run(folder, variant, number, target)
    problem = run.wait()[1]
    return f"before {changes[number - 1]} ({number} of {len(changes)}) to {target}", last_step(run), problem


def damage(choose: random.Random, folder: Path, variant: str, uninterrupted: Path) -> tuple[str, int, str]:
    shutil.copytree(uninterrupted, folder, ignore=shutil.ignore_patterns("train_results.json"))
    files = sorted(path for path in (folder / "checkpoint-6").rglob("*") if path.is_file() and path.stat().st_size)
    file, how = choose.choice(files), choose.choice(list(DAMAGE))
    DAMAGE[how](file)
    return f"{file.relative_to(folder)} {how}", 6, ""


def interrupt(choose: random.Random, folder: Path, variant: str, uninterrupted: Path) -> tuple[str, int, str]:
    seconds = choose.uniform(0, 10 + read(uninterrupted)["train_runtime"])  # 10: before the first step
    number, target = choose.choice((signal.SIGTERM, signal.SIGUSR1)), choose.choice(TARGETS)
    run = Run(folder, variant, as_fork=False)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if target == "all" else os.kill)(run.pid, number)
    code, problem = run.wait()
    problem = problem or ("" if code in EXIT_CODES else f"exit code {code}")
    return f"{number.name} after {seconds:.1f} s to {target}", last_step(run), problem


KINDS = {"kill": kill, "damage": damage, "signal": interrupt}


def last_step(run: Run) -> int:
    steps = re.findall(r"^step +(\d+)/.*  loss ", run.log.read_text(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def find_problem(folder: Path, variant: str, uninterrupted: Path, trained: int) -> str:
    """What is wrong after the same command, "" if nothing is. `trained`: steps of the run that was interrupted."""
    run = Run(folder, variant)
    code, problem = run.wait()
    if code or problem:
        return problem or f"then exit code {code}: {run.log.read_text()[-300:]}"
    if losses(folder) != losses(uninterrupted):
        return "other losses"
    (file,) = uninterrupted.glob("*model.safetensors")
    if (folder / file.name).read_bytes() != file.read_bytes():
        return "another model"
    repeated = 0 if "is finished" in run.log.read_text() else trained - read(folder)["resumed_from_step"]
    return f"{repeated} steps repeated" if repeated > INTERVAL else ""


def main(trials: str = "300", seed: str = "0", kind: str = "") -> int:
    """Returns 1 if a trial failed."""
    place, choose = Path(os.environ.get("TMPDIR", "/tmp"), f"campaign-{os.getpid()}"), random.Random(int(seed))
    place.mkdir(parents=True)
    os.chdir(place)
    sys.path.insert(0, str(ROOT / "recipes"))
    os.environ |= {"PYTHONPATH": str(ROOT / "recipes"), "PYTHON": sys.executable}
    import_libraries()  # no thread may be started before a fork
    counts, failed = Counter(), 0
    kinds = [(variant, each) for variant in VARIANTS for each in ([kind] if kind else KINDS)]
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(int(trials)):
            variant, each = kinds[number % len(kinds)]
            folder, uninterrupted = place / "run", place / variant
            if not uninterrupted.exists():
                Run(uninterrupted, variant).wait()  # makes the tiny model and dataset, which would be changes too
                shutil.rmtree(uninterrupted)
                assert Run(uninterrupted, variant).wait() == (0, "")
            shutil.rmtree(folder, ignore_errors=True)
            what, trained, problem = KINDS[each](choose, folder, variant, uninterrupted)
            problem = problem or find_problem(folder, variant, uninterrupted, trained)
            counts[variant, each] += 1
            failed += bool(problem)
            print(number + 1, variant, each, what, problem or "ok", sep=" | ", flush=True)
    print(*(f"{count} | {variant} | {each}" for (variant, each), count in counts.items()), sep="\n")
    print(f"{counts.total()} trials, {failed} failed; seed {seed}, {place}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
