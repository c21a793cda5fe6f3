"""Starts many launches that are refused, for the price of one: imports once, then forks for each.

Reads one JSON object a line, `{"words", "folder", "variables", "mounts"}`; answers each with
`{"code", "out", "err"}`. `words` are what launch.sh gives to `harness.start.launch`.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile

from harness.start import launch, server


def main():
    if problem := server.import_libraries():
        sys.exit(problem)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                begin(**json.loads(line))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = {name: os.pread(file.fileno(), 1 << 20, 0).decode() for name, file in (("out", out), ("err", err))}
        print(json.dumps({"code": code, **said}), flush=True)


def begin(words: list[str], folder: str, variables: dict, mounts: list[list[str]]):
    """What `python -m harness.start.launch` does; never returns."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.update(variables)
        if mounts:  # for this process and its children alone
            assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
            for options in (["--make-rprivate", "/"], *mounts):
                subprocess.run(["mount", *options], check=True)
        launch.processes.run = lambda *arguments: 0  # what is not refused trains no model
        sys.argv = ["launch", *words]
        options = [word for word in words[:2] if word.startswith("--")]
        launch.main(options, *words[len(options) :])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        server.leave(code)


if __name__ == "__main__":
    main()
