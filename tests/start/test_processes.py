"""The processes of one machine: started together, stopped together."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

RECIPE = "qwen2_fineweb_edu"


@pytest.fixture
def python(environment, tmp_path):
    """Runs a script; `work` is the content of a module with functions for other processes."""

    def call(script, work="", arguments=(), **options):
        (tmp_path / "work.py").write_text(work)
        variables = environment | {"PYTHONPATH": f"{ROOT / 'recipes'}{os.pathsep}{tmp_path}"}
        options |= {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True, "timeout": 120}
        return subprocess.run([sys.executable, "-c", script, *arguments], **options)

    return call


def test_exit_with_parent(python):
    """Also if the parent was killed before the call."""
    script = "import os\nfrom harness.launched import exit_with_parent\nexit_with_parent({})\nprint('lives')"
    assert python(script.format("os.getppid()")).stdout == "lives\n"
    assert python(script.format("os.getpid()")).returncode == 137


DAEMON = """
import multiprocessing, work
from harness.start.recipes import start_of_training
start_of_training()
is_deaf = multiprocessing.Event()
multiprocessing.Process(target=work.ignore_sigterm, args=(is_deaf,), daemon=True).start()
is_deaf.wait()
"""


def test_exit_does_not_wait_for_a_daemon_that_ignores_sigterm(python):
    """Python 3.12 and newer start no thread while they exit."""
    work = "import signal, time\ndef ignore_sigterm(event):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    ended = python(DAEMON, work + "    event.set()\n    time.sleep(1000)\n")
    assert (ended.returncode, ended.stderr) == (0, "")


INTERRUPT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), int(number))
            except BaseException:  # as some imports do
                pass
number, module = sys.argv.pop(1), sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt)
runpy.run_module("harness.start.launch", run_name="__main__", alter_sys=True)
"""
WORDS = ["--tiny", str(ROOT / f"recipes/{RECIPE}.py"), str(ROOT / "accelerate_configs/1x3090.yaml")]


@pytest.mark.parametrize(
    ("number", "handler", "flags", "codes"),
    [
        (signal.SIGINT, signal.SIG_DFL, [], (-2, 130)),
        (signal.SIGTERM, signal.SIG_DFL, [], (-15, 143)),
        (signal.SIGINT, signal.SIG_IGN, ["--max_restarts", "none"], (2,)),
    ],
    ids=["Ctrl-C", "SIGTERM", "Ctrl-C in the background"],
)
def test_signal_during_imports_of_the_launcher(python, number, handler, flags, codes):
    """An import can swallow the exception that a handler raises. In the background a shell makes programs ignore SIGINT."""
    arguments = [str(int(number)), "yaml", *WORDS, *flags]
    process = python(INTERRUPT, arguments=arguments, preexec_fn=lambda: signal.signal(signal.SIGINT, handler))
    assert process.returncode in codes and ("--max_restarts" in process.stderr if flags else not process.stderr)
