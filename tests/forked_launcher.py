"""launch.sh without its imports: one process imports the libraries, and forks for every launch.

As a program it reads one JSON object per line and answers each with `{"code", "out", "err"}`; `ForkedLauncher` talks to it.
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
COMMANDS = {"--preview": "harness.commands.preview", "--prepare": "harness.commands.prepare"}


class ForkedLauncher:
    """Called as launch.sh is, with names or full paths of recipe and config; returns the finished process.

    With `trains=False` a run that passes its checks ends with code 0 and trains nothing. `mounts` are arguments of `mount`,
    for this launch only. `variables` cannot be those that libraries read when they are imported.
    """

    def __init__(self, environment, folder):
        self.environment, self.folder, self.process = environment, folder, None

    def __call__(self, *arguments, cwd=None, timeout=300, trains=True, mounts=(), **variables) -> subprocess.CompletedProcess:
        words = [str(argument) for argument in arguments]
        module = next((COMMANDS[word] for word in words if word in COMMANDS), "harness.start.launch")
        words = [word for word in words if word not in COMMANDS]
        folders = (("recipes", "py"), ("accelerate_configs", "yaml"))[: 2 if module == "harness.start.launch" else 1]
        named = [place for place, word in enumerate(words) if not word.startswith("--")][: len(folders)]
        for place, (folder, ending) in zip(named, folders, strict=False):
            if "/" not in words[place]:
                words[place] = str(ROOT / folder / f"{words[place]}.{ending}")
        call = {"module": module, "words": words, "folder": str(cwd or self.folder), "variables": variables}
        call |= {"mounts": mounts, "trains": trains, "timeout": timeout}
        if self.process is None:
            environment = self.environment | {"PYTHONPATH": str(ROOT / "recipes"), "PYTHONSAFEPATH": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, Path(__file__)], env=environment, **pipes)
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(arguments, answer["code"], answer["out"], answer["err"])

    def close(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait(timeout=30)


def main():
    from harness.start import processes

    if not processes.import_libraries():
        sys.exit("this process cannot be forked")
    for module in ("matplotlib.figure", "bitsandbytes.nn", "harness.run.session", "harness.start.arguments"):
        importlib.import_module(module)
    for line in sys.stdin:
        call = json.loads(line)
        deadline = time.monotonic() + call.pop("timeout")
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                launch(**call)
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            printed = {name: os.pread(file.fileno(), 1 << 20, 0).decode() for name, file in (("out", out), ("err", err))}
        print(json.dumps({"code": code, **printed}), flush=True)


def launch(module: str, words: list[str], folder: str, variables: dict, mounts: list[list[str]], trains: bool):
    """Does what `python -m MODULE` does; never returns."""
    from harness.start import processes

    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.update(variables)
        if mounts:
            assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
            for options in (["--make-rprivate", "/"], *mounts):
                subprocess.run(["mount", *options], check=True)
        if not trains:
            processes.train_in_one_process = processes.train_in_processes = lambda *arguments: 0
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
