"""Kills, damages and signals runs, and looks whether the same command gives what an undisturbed run gives.

    python tests/campaign.py [TRIALS [SEED]]   prints a table, also after Ctrl-C; every trial goes to campaign.jsonl

Three ways to disturb a rehearsal of six steps that saves every second one:

- kill: SIGKILL, to one process or to all at once, at one of the places where the run opens a file of its folder for
  writing, makes, renames or deletes one. Python's audit events name the places; what torch and safetensors write past
  Python is met before and after, and half of it is what the next way leaves.
- damage: a file of the newest checkpoint is missing, empty, cut or changed.
- signal: SIGTERM or SIGUSR1 at a random moment from the command on, to the launcher or to every process.

Afterwards the same command must end with exit code 0, the losses and the model of the undisturbed run, to the bit (see
`ROUNDED`); have repeated no more than one interval between checkpoints; and nothing may be left running, nor a traceback
shown. Every run is a fork of this process, which has imported the libraries, and does from there on what launch.sh does;
those that get a signal are launch.sh itself.
"""

import contextlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTERVAL = 2
FLAGS = ["--max_steps", "6", "--save_steps", str(INTERVAL), "--logging_steps", "1", "--eval_strategy", "no", "--max_length", "64"]
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
# After its first step DDP puts gradients into other buckets, and the sums of more than two processes depend on the bucket: a
# run that goes on rounds that step otherwise. Its losses may differ by this share, its weights by a few units of their dtype.
ROUNDED = {"full, 4 processes": 1e-3, "adapter, 4 processes": 1e-3}
UNITS = {"torch.bfloat16": {"rtol": 0.02, "atol": 0.005}, "torch.float32": {"rtol": 1e-4, "atol": 1e-6}}
MODEL = ("model.safetensors", "adapter_model.safetensors")
DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "changed": lambda path: path.write_bytes(bytes(255 - byte for byte in path.read_bytes())),
}
CODES = {0, 75, 143, 138, -signal.SIGTERM, -signal.SIGUSR1}  # how a run may answer a signal


class Run:
    """A command in a process group of its own; `at` kills it at that place, `places` takes their names."""

    def __init__(self, folder: Path, arguments: list[str], at=0, whom="all", places: Path | None = None, forks: bool = True):
        self.log = folder.with_name(f"{folder.name}.log")
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(log, number)
            if at or places:
                self._watch(folder, at, whom, places)
            config, *flags = arguments
            recipe, config = str(ROOT / "recipes/qwen2_fineweb_edu.py"), str(ROOT / f"accelerate_configs/{config}.yaml")
            sys.argv = ["launch.sh", "--tiny", recipe, config, *flags, *FLAGS, "--output_dir", str(folder)]
            if not forks:
                os.execv(ROOT / "launch.sh", sys.argv)
            runpy.run_module("harness.start.launch", run_name="__main__", alter_sys=True)

    def _watch(self, folder: Path, at: int, whom: str, places: Path | None):
        counter, inside = folder.with_name(f"{folder.name}.count"), []
        counter.write_bytes(b"")

        def hook(event, arguments):
            if inside or event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                return
            if isinstance(arguments[0], int) or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                return
            inside.append(event)
            at_folder = arguments[-1] if event in ("os.remove", "os.rmdir") else -1
            start = Path(f"/proc/self/fd/{at_folder}").readlink() if at_folder != -1 else str(Path.cwd())
            path = os.path.normpath(os.path.join(start, os.fsdecode(arguments[0])))  # noqa: PTH118 (of any type)
            if path.startswith(f"{folder}/"):
                number = os.open(counter, os.O_WRONLY | os.O_APPEND)  # one for all processes
                os.write(number, b".")
                count = os.lseek(number, 0, os.SEEK_CUR)
                os.close(number)
                if places:
                    with places.open("a") as file:
                        file.write(f"{event} {Path(path).relative_to(folder)}\n")
                if count == at:
                    os.kill(0 if whom == "all" else os.getpid(), signal.SIGKILL)
            inside.clear()

        sys.addaudithook(hook)

    def send(self, number: int, whom: str):
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if whom == "all" else os.kill)(self.pid, number)

    def wait(self, seconds: float = 300) -> tuple[int | None, str]:
        """The exit code (-N: signal N; None: it did not end), and what is wrong with how it ended."""
        deadline = time.monotonic() + seconds
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return None, "hung"
            time.sleep(0.05)
        for _ in range(100):
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
        else:
            os.killpg(self.pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(done[1]), "left processes"
        return os.waitstatus_to_exitcode(done[1]), "".join(re.findall("Traceback.*", self.log.read_text(), re.DOTALL))[-2000:]


class Campaign:
    def __init__(self, folder: Path, seed: int, variants=tuple(VARIANTS)):
        self.folder, self.random, self.variants, self.importing = folder, random.Random(seed), variants, prepare()
        self.undisturbed, self.trials = {}, []
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)

    def reference(self, variant: str) -> tuple[Path, list[str], float]:
        """An undisturbed run, the places at which it writes, the seconds it took."""
        if variant not in self.undisturbed:
            run = self.folder / f"undisturbed-{len(self.undisturbed)}"
            Run(run, VARIANTS[variant]).wait()  # makes the stand-ins
            shutil.rmtree(run)
            places, began = run.with_suffix(".places"), time.monotonic()
            code, wrong = (started := Run(run, VARIANTS[variant], places=places)).wait()
            assert (code, wrong) == (0, ""), started.log.read_text()
            self.undisturbed[variant] = run, places.read_text().splitlines(), time.monotonic() - began
        return self.undisturbed[variant]

    def trial(self, kind: str, variant: str) -> dict:
        undisturbed, places, seconds = self.reference(variant)
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        whom, last, wrong = self.random.choice(("all", "one")), 0, ""
        if kind == "damage":
            shutil.copytree(undisturbed, run, ignore=shutil.ignore_patterns("train_results.json"))
            newest = run / "checkpoint-6"
            file = self.random.choice(sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size))
            what = self.random.choice(list(DAMAGE))
            DAMAGE[what](file)
            where, last = f"{file.relative_to(newest)} {what}", 6
        else:
            if kind == "kill":
                at = self.random.randint(1, len(places))
                started, where = Run(run, VARIANTS[variant], at, whom), f"{places[at - 1]} ({at} of {len(places)}) to {whom}"
                code, wrong = started.wait()
            else:
                moment = self.random.uniform(0, seconds + self.importing)
                number = self.random.choice((signal.SIGTERM, signal.SIGUSR1))
                started, where = Run(run, VARIANTS[variant], forks=False), f"{number.name} after {moment:.1f} s to {whom}"
                time.sleep(moment)
                started.send(number, whom)
                code, wrong = started.wait()
                wrong = wrong or f"exit code {code}" * (code not in CODES)
            steps = re.findall(r"^step +(\d+)/.*  loss ", started.log.read_text(), re.MULTILINE)
            last = int(steps[-1]) if steps else 0
        again = Run(run, VARIANTS[variant])
        code, then = again.wait()
        wrong = (
            wrong
            or then
            or (f"then exit code {code}: {again.log.read_text()[-300:]}" if code else _differs(run, undisturbed, variant))
        )
        repeated = 0 if wrong or "is finished" in again.log.read_text() else max(0, last - _results(run)["resumed_from_step"])
        wrong = wrong or f"{repeated} steps repeated" * (repeated > INTERVAL)
        self.trials.append({"kind": kind, "variant": variant, "where": where, "repeated": repeated, "wrong": wrong})
        with (self.folder / "campaign.jsonl").open("a") as file:
            file.write(json.dumps(self.trials[-1]) + "\n")
        return self.trials[-1]

    def table(self) -> str:
        counts = Counter((trial["variant"], trial["kind"]) for trial in self.trials)
        lines = ["| run | kill | damage | signal |", "|---|---|---|---|"]
        lines += [f"| {v} | {' | '.join(str(counts[v, k]) for k in ('kill', 'damage', 'signal'))} |" for v in self.variants]
        failed = [trial for trial in self.trials if trial["wrong"]]
        most = max((trial["repeated"] for trial in self.trials), default=0)
        lines += [
            "",
            f"{len(self.trials)} trials, {len(failed)} failed; at most {most} steps were repeated, of {INTERVAL} between saves.",
        ]
        return "\n".join([*lines, *(f"- {trial}" for trial in failed)])


def _results(run: Path) -> dict:
    return json.loads((run / "train_results.json").read_text())


def _differs(run: Path, undisturbed: Path, variant: str) -> str:
    ours, theirs = _losses(run), _losses(undisturbed)
    from safetensors.torch import load_file

    if share := ROUNDED.get(variant):
        steps = zip(ours, theirs, strict=False)
        is_near = all(abs(one - other) <= share * abs(other) for both in steps for one, other in zip(*both, strict=True))
        file = next(name for name in MODEL if (undisturbed / name).is_file())
        one, other = (load_file(folder / file) for folder in (run, undisturbed))
        if one.keys() != other.keys() or not all(one[n].allclose(other[n], **UNITS[str(one[n].dtype)]) for n in one):
            return "another model"
        return "other losses" * (len(ours) != len(theirs) or not is_near)
    for file in MODEL:
        if (undisturbed / file).is_file() and (run / file).read_bytes() != (undisturbed / file).read_bytes():
            return "another model"
    return "other losses" * (ours != theirs)


def _losses(run: Path) -> list:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def prepare() -> float:
    """Imports what every run would, and says how many seconds that took; nothing here may begin a thread."""
    began = time.monotonic()
    sys.path.insert(0, str(ROOT / "recipes"))
    os.environ |= {"PYTHONPATH": str(ROOT / "recipes"), "PYTHON": sys.executable}
    from harness.start import server

    assert not (problem := server.import_libraries()), problem
    return time.monotonic() - began


def main(trials: int = 300, seed: int = 0):
    campaign = Campaign(Path(os.environ.get("TMPDIR", "/tmp"), f"campaign-{os.getpid()}"), seed)
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(trials):
            kind = ("kill", "damage", "signal")[number % 3]
            trial = campaign.trial(kind, campaign.variants[number // 3 % len(campaign.variants)])
            print(f"{number + 1} {time.monotonic() - began:.0f} s", *trial.values(), flush=True)
    print(campaign.table(), f"\nseed {seed}, {time.monotonic() - began:.0f} s, {campaign.folder}")
    return any(trial["wrong"] for trial in campaign.trials)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
