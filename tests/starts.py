"""Launches for a third of their price: a process imports the libraries once, then forks for each of them.

As a program it reads one JSON object a line and answers each with `{"code", "out", "err"}`; `Starts` talks to it.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Starts:
    """Called as `launch.sh` is, with names or whole paths of recipe and config; returns the finished process.

    With `trains=False` what is not refused ends with code 0 and trains no model. `mounts` are arguments of `mount`, for this
    launch alone. `variables` cannot be those that are read when a library is imported.
    """

    def __init__(self, environment, folder):
        self.environment, self.folder, self.process = environment, folder, None

    def __call__(self, *arguments, cwd=None, timeout=300, trains=True, mounts=(), **variables) -> subprocess.CompletedProcess:
        words = [str(argument) for argument in arguments]
        named = 1 if words[0].startswith("--pre") else 2  # a recipe, or a recipe and a config
        names = [place for place, word in enumerate(words) if not word.startswith("--")][:named]
        for place, (room, ending) in zip(names, (("recipes", "py"), ("accelerate_configs", "yaml")), strict=False):
            if "/" not in words[place]:
                words[place] = str(ROOT / room / f"{words[place]}.{ending}")
        call = {"words": words, "folder": str(cwd or self.folder), "variables": variables, "mounts": mounts, "trains": trains}
        if self.process is None:
            environment = self.environment | {"PYTHONPATH": str(ROOT / "recipes"), "PYTHONSAFEPATH": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, Path(__file__)], env=environment, **pipes)
        self.process.stdin.write(json.dumps(call | {"timeout": timeout}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(arguments, answer["code"], answer["out"], answer["err"])

    def close(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait(timeout=30)


def main():
    from harness.start import server

    if problem := server.import_libraries():
        sys.exit(problem)
    importlib.import_module("matplotlib.figure")  # and what else a process that trains imports besides
    importlib.import_module("harness.run.session")
    for line in sys.stdin:
        call = json.loads(line)
        deadline = time.monotonic() + call.pop("timeout")
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                begin(**call)
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = {name: os.pread(file.fileno(), 1 << 20, 0).decode() for name, file in (("out", out), ("err", err))}
        print(json.dumps({"code": code, **said}), flush=True)


def begin(words: list[str], folder: str, variables: dict, mounts: list[list[str]], trains: bool):
    """What `python -m harness.start.launch` does; never returns."""
    from harness.start import processes

    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.update(variables)
        if mounts:
            assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
            for options in (["--make-rprivate", "/"], *mounts):
                subprocess.run(["mount", *options], check=True)
        if not trains:
            processes.run = lambda *arguments: 0
        sys.argv = ["launch", *words]
        runpy.run_module("harness.start.launch", run_name="__main__", alter_sys=True)  # which ends the process
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
