"""launch.sh without its imports: one process imports the libraries, and forks for every launch.

As a program it reads one JSON object per line and answers each with one; `ForkedLauncher` talks to it. A launch is answered
with its process ID, `{"poll": pid}` with its exit code, null while it runs.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
COMMANDS = {f"--{name}": f"harness.commands.{name}" for name in ("preview", "prepare", "merge", "chat", "verify")}
COMMANDS["--plan"] = "planner.command"
LIBRARIES = (
    *("harness", "torch.nn.attention.varlen", "torch.distributed.launcher.api", "datasets", "transformers.trainer"),
    *("trl.trainer.sft_trainer", "harness.run.training", "harness.start.recipes"),
)
WITH_CONFIG = ("harness.start.launch", "planner.command")


class ForkedLauncher:
    """Called as launch.sh is, with names or full paths of recipe and config; returns the finished process.

    With `trains=False` a run that passes its checks ends with code 0 and trains nothing. `mounts` are arguments of `mount`, and
    `node` is a network namespace and a host name, for this launch only; `new_session=True` calls `setsid`. `variables` cannot be
    those that libraries read when they are imported; STDIN is the file for standard input, which is empty without it.
    """

    def __init__(self, environment, folder):
        self.environment, self.folder, self.process = environment, folder, None

    def __call__(self, *arguments, timeout=300, **options) -> subprocess.CompletedProcess:
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            process = self.start(*arguments, out=out.name, err=err.name, **options)
            try:
                process.wait(timeout)
            finally:
                process.kill()
            printed = [Path(file.name).read_text() for file in (out, err)]
        return subprocess.CompletedProcess(arguments, process.returncode, *printed)

    def start(self, *arguments, out, err, cwd=None, **variables) -> "Started":
        """Does not wait for the end. `out` and `err` are the files for what it prints."""
        options = {name: variables.pop(name) for name in ("trains", "mounts", "node", "new_session") if name in variables}
        words = [str(argument) for argument in arguments]
        module = next((COMMANDS[word] for word in words if word in COMMANDS), "harness.start.launch")
        words = [word for word in words if word not in COMMANDS]
        folders = (("recipes", "py"), ("accelerate_configs", "yaml"))[: 2 if module in WITH_CONFIG else 1]
        named = [place for place, word in enumerate(words) if not word.startswith("--")][: len(folders)]
        for place, (folder, ending) in zip(named, folders, strict=False):
            if "/" not in words[place]:
                words[place] = str(ROOT / folder / f"{words[place]}.{ending}")
        call = {"module": module, "words": words, "folder": str(cwd or self.folder), "variables": variables}
        call |= {"out": str(out), "err": str(err), "options": options}
        for file in (out, err):
            Path(file).touch()
        return Started(self, self.ask(call))

    def ask(self, question: dict):
        """Sends a line to the process that imports the libraries; returns its answer."""
        if self.process is None:
            environment = self.environment | {"PYTHONPATH": str(ROOT / "recipes"), "PYTHONSAFEPATH": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, Path(__file__)], env=environment, **pipes)
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait(timeout=30)


class Started:
    """A launch that was started, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, launcher: ForkedLauncher, pid: int):
        self.launcher, self.pid, self.returncode = launcher, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.launcher.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until then the process exists, as a zombie if it has ended
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def import_libraries():
    """Imports what every run needs, before forks."""
    import torch

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes compiles functions when it is imported
    # With a CUDA build, a process that has imported bitsandbytes cannot be forked.
    without_cuda = [] if torch.version.cuda else ["bitsandbytes.nn"]
    for module in ("matplotlib.figure", *without_cuda, *LIBRARIES):
        importlib.import_module(module)
    del os.environ["TORCHDYNAMO_DISABLE"]
    gc.freeze()  # else the first garbage collection of every process would copy all memory pages


def main():
    import_libraries()
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                launch(**question)
        print(json.dumps(answer), flush=True)


def fork_instead(trains: bool):
    """Makes the launcher in this process fork the processes of a run, where it would start Python."""
    from torch.distributed.launcher import api

    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)  # it is for processes that torch forks
    start, popen = api.elastic_launch, subprocess.Popen

    def launch_forks(config, program):
        config.start_method = "fork"
        return lambda recipe, *flags: start(config, run_recipe)(recipe, flags, trains)

    def start_fork(command, *arguments, **options):
        if command[0] != sys.executable or not command[1].endswith(".py") or arguments or options:
            return popen(command, *arguments, **options)
        return Fork(command[1], command[2:], trains)

    api.elastic_launch, subprocess.Popen = launch_forks, start_fork


class Fork:
    """A forked process that runs a recipe, with the method of `subprocess.Popen` that the launcher uses."""

    def __init__(self, recipe, flags, trains):
        self.pid = os.fork()
        if self.pid == 0:
            try:
                run_recipe(recipe, flags, trains)
            finally:
                os._exit(0)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_recipe(recipe, flags, trains):
    """Does what `python RECIPE` does in a process that was forked; returns only after exit code 0, as torch's agent expects."""
    from harness import launched
    from harness.start import recipes

    import torch

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()  # torch's agent has enabled it
    launched.begin()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not trains:
        parse = recipes.parse
        recipes.parse = lambda *arguments, **values: (parse(*arguments, **values), launched.end_run(0))
    sys.argv = [recipe, *flags]
    sys.path.insert(0, str(Path(recipe).parent))
    code = 1
    try:
        runpy.run_path(recipe, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code:
            os._exit(code)


def launch(module: str, words: list[str], folder: str, variables: dict, out: str, err: str, options: dict):
    """Does what `python -m MODULE` does; never returns."""
    code = 1
    try:
        stdin = variables.pop("STDIN", os.devnull)
        for descriptor, file, flags in ((0, stdin, os.O_RDONLY), (1, out, APPEND), (2, err, APPEND)):
            opened = os.open(file, flags)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.chdir(folder)
        os.environ.update(variables)
        if options.get("new_session"):
            os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, a shell makes programs ignore it
        if node := options.get("node"):
            with Path("/run/netns", node[0]).open() as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET
            assert ctypes.CDLL(None).unshare(0x4000000) == 0  # CLONE_NEWUTS
            socket.sethostname(node[1])
        if mounts := options.get("mounts"):
            assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
            for words_of_mount in (["--make-rprivate", "/"], *mounts):
                subprocess.run(["mount", *words_of_mount], check=True)
        fork_instead(options.get("trains", True))
        sys.argv = ["launch", *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
