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
        variables = environment | {"PYTHONPATH": f"{ROOT / 'recipes'}{os.pathsep}{tmp_path}"} | options.pop("variables", {})
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            **options,
        )

    return call


def _hear_ctrl_c():
    """For `preexec_fn`: these tests may run in the background, where a shell makes programs ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_exit_with_parent(python):
    """Also if the parent was killed before the call."""
    script = "import os\nfrom harness.signals import exit_with_parent\nexit_with_parent({})\nprint('lives')"
    assert python(script.format("os.getppid()")).stdout == "lives\n"
    assert python(script.format("os.getpid()")).returncode == 137


DAEMON = """
import multiprocessing, work
from harness.start.recipes import begin_process
begin_process()
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_imports_ends_the_launcher(python, number):
    """Although an import can swallow the exception that a handler raises."""
    process = python(INTERRUPT, arguments=[str(int(number)), "yaml", *WORDS], preexec_fn=_hear_ctrl_c)
    assert process.returncode in (-number, 128 + number) and not process.stderr


# Lines of a recipe, and what is inserted before them: signals to all processes.
MOMENTS = {
    "the run is checked": ("def main(", "{}\n\n\ndef main("),
    "the trainers are built": ("    train(", "    {}\n    train("),
}


def test_ctrl_c_is_ignored_in_the_background(python):
    """A shell makes the programs that it starts in the background ignore SIGINT."""
    arguments = [str(int(signal.SIGINT)), "yaml", *WORDS, "--max_restarts", "none"]
    process = python(INTERRUPT, arguments=arguments, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.returncode == 2 and "--max_restarts" in process.stderr
