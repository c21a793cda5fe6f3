"""The processes of one machine: started together, stopped together."""

import contextlib
import os
import signal
import subprocess
import sys

from harness.nodes import network

import psutil
import pytest
from conftest import ROOT, losses, wait_until

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


def test_every_process_can_exit_before_training(launch, tmp_path):
    """By `sys.exit` or `os._exit`."""
    recipe = tmp_path / "exits.py"
    text = (ROOT / f"recipes/{RECIPE}.py").read_text()
    exits = "__import__('os')._exit(0) if training_args.process_index else exit()"
    recipe.write_text(text.replace("    train(", f"    {exits}\n    train("))
    process = launch("--tiny", recipe, "4gpu_shard_grad_op", cwd=tmp_path, NPROC_PER_NODE="2", timeout=120)
    assert process.returncode == 0 and not process.stderr, process.stderr


@pytest.mark.parametrize("who", ["True", "training_args.process_index"], ids=["all fail", "one fails"])
def test_one_traceback_when_processes_fail(fork_launch, tmp_path, who):
    recipe = tmp_path / "fails.py"
    text = (ROOT / f"recipes/{RECIPE}.py").read_text()
    recipe.write_text(text.replace("    train(", f"    assert not ({who}), 'mine'\n    train("))
    process = fork_launch("--tiny", recipe, "4gpu_ddp", cwd=tmp_path, NPROC_PER_NODE="2")
    assert process.stderr.count("Traceback") == process.stderr.count("AssertionError: mine") == 1, process.stderr
    # A process that loses the connection to the failed one can be the first to exit.
    assert process.returncode in ((1, network.LOST) if who != "True" else (1,))


@pytest.fixture
def session(fork_launch, tmp_path):
    """Starts a rehearsal on two processes in a session of its own; returns it, its log, and a function that lists the session."""
    started, log = [], tmp_path / "log"

    def alive():
        return [p for p in psutil.process_iter(["status"]) if _session(p.pid) == started[0].pid and p.info["status"] != "zombie"]

    def call(run, *more, recipe=RECIPE):
        flags = ["--output_dir", run, "--max_steps", "2000", "--save_steps", "1000", "--logging_steps", "1"]
        command = ["--tiny", recipe, "4gpu_full_shard", *flags, "--eval_strategy", "no", *more]
        started.append(fork_launch.start(*command, out=log, err=log, new_session=True, NPROC_PER_NODE="2"))
        return started[0], log, alive

    yield call
    for process in alive():
        process.kill()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _hear_ctrl_c():
    """For `preexec_fn`: these tests may run in the background, where a shell makes programs ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for_steps(process, log):
    wait_until(lambda: log.read_text().count("  loss ") > 1 or process.poll() is not None, 120, log.read_text)
    assert process.poll() is None, log.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_signal_to_all_processes_saves_a_checkpoint(session, workdir, number, code):
    """SLURM sends signals to every process of a job."""
    run = workdir / f"runs/signalled-{code}"
    process, log, alive = session(run)
    _wait_for_steps(process, log)
    for one in alive():
        one.send_signal(number)
    assert process.wait(timeout=60) == code, log.read_text()
    assert f"Stopped by {number.name} at step" in log.read_text() and "Traceback" not in log.read_text()
    assert "Warning" not in log.read_text()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))
    assert list(run.glob("checkpoint-*/complete.json"))


@pytest.mark.parametrize("to", ["all", "launcher"])
def test_ctrl_c_prints_one_message(session, workdir, to):
    """A terminal sends SIGINT to all processes, `kill -INT` to one."""
    process, log, alive = session(workdir / f"runs/ctrl-c-{to}")
    _wait_for_steps(process, log)
    for one in alive() if to == "all" else [process]:
        one.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, log.read_text()
    assert log.read_text().count("Stopped at step") == 1 and "Traceback" not in log.read_text(), log.read_text()
    assert "error" not in log.read_text() and "Warning" not in log.read_text()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


def test_killed_launcher_leaves_no_process(session, workdir):
    process, log, alive = session(workdir / "runs/killed-launcher")
    _wait_for_steps(process, log)
    assert len(alive()) == 3  # the launcher and two that train
    process.kill()
    process.wait()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


def test_killed_process_starts_again(session, rehearse, workdir):
    """The run resumes from its newest checkpoint, and logs the losses of an uninterrupted one."""
    flags = ["--max_steps", "30", "--save_steps", "4"]
    process, log, alive = session(workdir / "runs/starts-again", *flags, "--max_restarts", "1")
    wait_until(lambda: "step  6/30" in log.read_text() or process.poll() is not None, 120, log.read_text)
    psutil.Process(max(one.pid for one in alive() if one.ppid() == process.pid)).kill()
    assert process.wait(timeout=120) == 0, log.read_text()
    flags += ["--logging_steps", "1", "--eval_strategy", "no"]
    uninterrupted = rehearse(RECIPE, "4gpu_full_shard", *flags, NPROC_PER_NODE="2")
    assert losses(workdir / "runs/starts-again") == losses(uninterrupted)


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


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("the run is checked", signal.SIGTERM),
        ("the trainers are built", signal.SIGTERM),
        ("the trainers are built", signal.SIGINT),
    ],
)
def test_signal_to_all_processes_before_training(session, tmp_path, moment, number):
    recipe, (line, lines) = tmp_path / "interrupted.py", MOMENTS[moment]
    imports = "import os\n\nfrom harness import runs\nfrom harness"
    text = (ROOT / f"recipes/{RECIPE}.py").read_text().replace("from harness", imports, 1)
    recipe.write_text(text.replace(line, lines.format(f"os.killpg(0, {int(number)})")))
    process, log, alive = session(tmp_path / "run", recipe=recipe)
    assert process.wait(timeout=120) == 128 + number, log.read_text()
    printed = log.read_text()
    assert "Traceback" not in printed and "error: " not in printed
    messages = 0 if number == signal.SIGINT else 1
    assert printed.count(f"Stopped by {number.name} before the training began.\n") == messages
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


def test_ctrl_c_is_ignored_in_the_background(python):
    """A shell makes the programs that it starts in the background ignore SIGINT."""
    arguments = [str(int(signal.SIGINT)), "yaml", *WORDS, "--max_restarts", "none"]
    process = python(INTERRUPT, arguments=arguments, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.returncode == 2 and "--max_restarts" in process.stderr


def test_signals_after_the_last_step_have_no_effect(session, workdir):
    """All processes get them again and again: while the model is saved, while samples are generated, while Python exits."""
    run = workdir / "runs/finished-despite-signals"
    process, log, alive = session(run, "--max_steps", "4")
    wait_until(lambda: "step 4/4" in log.read_text() or process.poll() is not None, 120, log.read_text)
    signals = 0
    while process.poll() is None:
        for one in alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal((signal.SIGUSR1, signal.SIGTERM)[signals % 2])
        signals += 1
    assert process.returncode == 0 and signals > 2, log.read_text()
    assert (run / "train_results.json").is_file() and (run / "model.safetensors").is_file()
    assert "Traceback" not in log.read_text() and "Stopped" not in log.read_text()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


def test_suspended_process_ends_the_run(session, workdir):
    """As `kill -STOP` does. Within --ddp_timeout the others print one message and exit; no process is left."""
    process, log, alive = session(workdir / "runs/suspended", "--ddp_timeout", "10")
    _wait_for_steps(process, log)
    ranks = sorted(one.pid for one in alive() if one.ppid() == process.pid)
    assert len(ranks) == 2
    psutil.Process(ranks[-1]).suspend()
    assert process.wait(timeout=90) not in (0, 2), log.read_text()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "was lost at step" in errors[0] and "Traceback" not in log.read_text(), log.read_text()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))
