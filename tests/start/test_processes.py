"""The processes of one machine: forked after one import, started together, stopped together."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from harness.nodes import network

import psutil
import pytest
from conftest import ROOT, losses, slow, wait_until

RECIPE = "qwen2_fineweb_edu"
STARTS_A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"


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


IMPORT = """
import os, sys, threading
from pathlib import Path
import torch
touches = []
def touch(*args, **kwargs):
    touches.append(args)
    raise RuntimeError("CUDA was initialized")
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
torch.cuda._lazy_init = torch._C._cuda_init = touch
from harness.start import processes
print(processes.import_libraries())
assert {"trl", "peft", "datasets", "transformers.trainer"} <= sys.modules.keys()
names = sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))
from transformers import conversion_mapping
assert conversion_mapping._checkpoint_conversion_mapping_cache, "every process would make the table of renamed weights"
print(threading.active_count(), [name for name in names if name != "jemalloc_bg_thd"], len(touches))
import bitsandbytes
try:
    bitsandbytes.nn
finally:
    print(len(touches) > 0)
"""


def test_imports_touch_no_gpu_and_start_no_thread(python):
    """On a machine with GPUs. bitsandbytes touches them when it is first used; the only other thread is the allocator's."""
    process = python(IMPORT, variables={"OPENBLAS_NUM_THREADS": "1"})
    assert process.stdout.splitlines() == ["True", "1 ['python'] 0", "True"], process.stderr


PROCESS = """
import os
from harness.start import processes
import work
processes.LIBRARIES = ("torch", "accelerate")  # the others would only take time
method = processes.start_server()
os.environ["SET"] = "after the fork"
code, (*small, large) = processes.Process(method, work.run, environment={"RANK": "1", "OMP_NUM_THREADS": "1"}).wait()
print(method, code, small, len(large))
"""
WORK = """
import os, sys
def run():
    has_imported = "accelerate" in sys.modules
    import torch
    variables = [os.environ.get(name) for name in ("SET", "RANK")]
    return has_imported, *variables, sys.stdin.readline(), os.read(0, 9), torch.get_num_threads(), "x" * 1_000_000
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_process_has_environment_and_stdin(python, tmp_path, method):
    """A process has the environment and the stdin of its launcher, a forked one also the imports.

    It is not forked after an import has started a thread. OMP_NUM_THREADS has an effect, although torch reads it when it is
    imported. The result can be larger than a pipe holds.
    """
    if method == "spawn":
        (tmp_path / "sitecustomize.py").write_text(STARTS_A_THREAD)
    process = python(PROCESS, WORK, input="typed\n", variables={"OMP_NUM_THREADS": "2"})
    assert process.returncode == 0, process.stderr
    result = [method == "forkserver", "after the fork", "1", "typed\n", b"", 1]
    assert process.stdout == f"{method} 0 {result} 1000000\n"


RUN_RECIPES = """
import sys
from harness.contexts import Context
from harness.start import processes
method = processes.start_server()
for path in sys.argv[1:]:
    code, result = processes.call(method, processes.run_recipe, Context(path), [])
    print(code, result, flush=True)
    print("---", flush=True)
"""
# Last lines of a recipe: its exit code, and what it prints.
ENDS = {
    "sys.exit(7)": ("7", ""),
    "atexit.register(print, 'goodbye', flush=True)": ("0", "goodbye"),
    "atexit.register(print, 'goodbye', flush=True)\nsys.exit(7)": ("7", "goodbye"),
    "os.kill(os.getpid(), 9)": ("-9", ""),
    "sys.exit()": ("0", ""),
    # bitsandbytes would import PyTorch's compiler.
    "import bitsandbytes.nn\nprint('torch._inductor.compile_fx' in sys.modules, flush=True)": ("0", "False"),
    "os._exit(0)": ("0", ""),
    "import multiprocessing\nprint(multiprocessing.Pool(2).map(len, ['a', 'bc']), flush=True)": ("0", "[1, 2]"),
}


def test_exit_codes_exit_handlers_and_traceback(python, tmp_path):
    """The traceback starts in the recipe, not in the harness. An error that a library raises is one line."""
    recipes = [tmp_path / f"ends_{number}.py" for number in range(len(ENDS))]
    for recipe, body in zip(recipes, ENDS, strict=True):
        recipe.write_text(f"import atexit, os, sys\n{body}\n")
    fails = tmp_path / "fails.py"
    fails.write_text("def main():\n    raise KeyError('column')\n\n\nmain()\n")
    called_back = tmp_path / "called_back.py"
    called_back.write_text("import re\nre.sub('a', lambda match: {}['column'], 'a')\n")
    in_library = tmp_path / "in_library.py"
    in_library.write_text("import json\n\njson.loads('{')\n")
    process = python(RUN_RECIPES, arguments=[*recipes, fails, called_back, in_library])
    assert process.returncode == 0, process.stderr
    *outputs, of_failure, of_callback, of_library, end = process.stdout.split("---\n")
    for output, (body, (code, printed)) in zip(outputs, ENDS.items(), strict=True):
        assert output.split()[-2:] == [code, "None"] and printed in output, body
    assert of_failure == of_callback == "1 None\n" and of_library == "2 None\n" and not end
    first, second = process.stderr.split("Traceback")[1:]
    second, _, message = second.partition("error: ")
    assert "<lambda>" in second and second.endswith("KeyError: 'column'\n")
    assert message.startswith("in_library.py, line 3: JSONDecodeError: Expecting property name") and message.count("\n") == 1
    lines = f"Traceback{first}".splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{fails}", line 5, in <module>'], process.stderr
    assert lines[-1] == "KeyError: 'column'"


TRAIN = """
import sys
from pathlib import Path
from harness.configs import AccelerateConfig
from harness.contexts import Context
from harness.nodes.rendezvous import OneNode
from harness.start import processes
processes.LIBRARIES = ("torch",)  # the others would only take time
method = processes.start_server()
for path, count in zip(sys.argv[1::2], sys.argv[2::2]):
    context = Context(path, AccelerateConfig(distributed_type="FSDP"), processes=int(count))
    code = processes.train(method, context, [], {}, OneNode(), Path(path).parent)
    print("code", code, flush=True)
    print("---", flush=True)
    print("---", file=sys.stderr, flush=True)
processes.exit_quickly(code)
"""
# What each process does, and what is expected: the exit code, the end of the message, and how often a process was ended.
FAILURES = [
    (["finish", "os._exit(0)"], 0, "", 0),
    (["finish", "sys.exit(9)"], 9, "process 1 failed first (exit code 9); see its output above", 0),
    (["wait", "fail"], 9, "process 1 failed first (exit code 9); see its output above", 1),
    (["wait", "die", "wait"], 137, "process 1 failed first (exit code 137): it was killed", 2),
    (["lose", "die"], 137, "process 1 failed first (exit code 137): it was killed", 0),
    (["wait", "raise UserError('mine')"], 2, "error: process 1: mine", 1),
]
BEHAVIOUR = """
import os, signal, sys, time
from harness.messages import UserError
from harness.nodes import network
def stop(number, frame):
    print("ended", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
rank = int(os.environ["RANK"])
assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("{count}", str(rank))
def fail(): time.sleep(0.5); sys.exit(9)
def wait(): time.sleep(60)
def die(): time.sleep(0.5); os.kill(os.getpid(), 9)
def lose():
    from harness.signals import record_signal
    signal.signal(signal.SIGTERM, record_signal)
    time.sleep(0.51)
    network._exit("the connection was lost", network.LOST)
def finish(): pass
"""


def test_others_are_ended_when_one_fails(python, tmp_path):
    """The message is about the first one that failed, also if others lose their connection to it at the same moment."""
    arguments = []
    for number, (acts, *_) in enumerate(FAILURES):
        recipe = tmp_path / f"recipe_{number}.py"
        calls = [f"if rank == {rank}: {act if '(' in act else act + '()'}" for rank, act in enumerate(acts)]
        recipe.write_text("\n".join([BEHAVIOUR.replace("{count}", str(len(acts))), *calls]))
        arguments += [str(recipe), str(len(acts))]
    process = python(TRAIN, arguments=arguments)
    printed, errors = process.stdout.split("---\n"), process.stderr.split("---\n")
    assert (printed.pop(), errors.pop()) == ("", ""), process.stdout + process.stderr
    for (acts, code, message, ended), out, err in zip(FAILURES, printed, errors, strict=True):
        assert out.endswith(f"code {code}\n") and out.count("ended") == ended, (acts, out, err)
        assert message in err and err.count("error: ") == bool(code) and "Traceback" not in err, (acts, out, err)
    assert process.returncode == FAILURES[-1][1]


RESTARTS = """
import os, sys
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(__file__).parent
attempt = len(list(folder.glob("attempt-*")))
import torch.distributed as dist
dist.init_process_group("gloo")  # both have counted the attempts
if rank == 0: (folder / f"attempt-{{attempt}}").touch()
dist.barrier()
if rank == 0:
    print("attempt", attempt, flush=True)
if attempt < {crashes} and rank == 1:
    {crash}
"""


SAVE = "(folder / f'checkpoint-{attempt}').mkdir(); (folder / f'checkpoint-{attempt}/complete.json').touch(); "


# In how many attempts it crashes, and how; the exit code, and how many attempts there are.
CRASHES = {
    "crashes twice": (2, "os.kill(os.getpid(), 9)", 0, 3),
    "makes progress": (4, SAVE + "os.kill(os.getpid(), 9)", 0, 5),
    "crashes always": (9, "os.abort()", 134, 3),
    "user error": (9, "sys.exit(2)", 2, 1),
    "out of memory": (9, "sys.exit(12)", 12, 1),
}


def test_processes_that_crash_start_again(python, tmp_path):
    """At most `max_restarts` times without a new checkpoint, and not after what happens again."""
    arguments = []
    for kind, (crashes, crash, *_) in CRASHES.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "recipe.py").write_text(RESTARTS.format(crashes=crashes, crash=crash))
        arguments += [str(tmp_path / kind / "recipe.py"), "2"]
    process = python(TRAIN.replace(".parent)", ".parent, max_restarts=2)"), arguments=arguments)
    printed, errors = process.stdout.split("---\n"), process.stderr.split("---\n")
    assert (printed.pop(), errors.pop()) == ("", ""), process.stdout + process.stderr
    for (kind, expected), out, err in zip(CRASHES.items(), printed, errors, strict=True):
        *_, code, attempts = expected
        assert out.endswith(f"code {code}\n"), (kind, out, err)
        assert out.count("attempt") == attempts and out.count("Starting again") == attempts - 1, (kind, out)
        assert out.count("Process 1 failed first") == attempts - 1, (kind, out)
        assert err.count("error: ") == err.count("process 1 failed first") == (code > 100), (kind, err)


SIGNAL_BETWEEN = """
import multiprocessing.popen_forkserver, os, pathlib, sys
launch, started = multiprocessing.popen_forkserver.Popen._launch, []
def signal_before_second(popen, process):
    started.append(process)
    if len(started) == 2:
        os.kill(os.getpid(), {number})
    launch(popen, process)
    pathlib.Path(sys.argv[1]).with_name("started").write_text(str(len(started)))
multiprocessing.popen_forkserver.Popen._launch = signal_before_second
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_processes_are_started(python, tmp_path, number):
    """A process that is just starting needs locks of the launcher, which must not exit before it has started all."""
    (tmp_path / "recipe.py").write_text("import time\ntime.sleep(60)\n")
    script = SIGNAL_BETWEEN.format(number=int(number)) + TRAIN
    process = python(script, arguments=[str(tmp_path / "recipe.py"), "3"], preexec_fn=_hear_ctrl_c)
    assert process.returncode == 128 + number, process.stdout + process.stderr
    message = "" if number == signal.SIGINT else "Stopped by SIGTERM before the training began.\n"
    assert process.stderr.removesuffix("---\n") == message
    assert (tmp_path / "started").read_text() == "3"


IGNORES_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "0": os._exit(9)
time.sleep(90)
"""


@slow
def test_process_that_ignores_sigterm_is_killed(python, tmp_path):
    """After 30 s, for which torch has no setting."""
    (tmp_path / "recipe.py").write_text(IGNORES_SIGTERM)
    started = time.monotonic()
    assert python(TRAIN, arguments=[str(tmp_path / "recipe.py"), "2"]).returncode == 9
    assert 25 < time.monotonic() - started < 60


SIGNAL_BEFORE_END = """
import os, signal, sys
from harness.start import processes
import work
processes.LIBRARIES = ("torch",)
method = processes.start_server()
started = processes.Process(method, work.wait)
print(started.process.pid, flush=True)
processes.exit_quickly(143)
"""
WAIT = "import time\ndef wait():\n    time.sleep(60)\n"


def test_launcher_that_exits_leaves_no_process(python):
    """It does not wait for them."""
    started = time.monotonic()
    process = python(SIGNAL_BEFORE_END, WAIT)
    assert process.returncode == 143 and not process.stderr, process.stderr
    assert time.monotonic() - started < 50  # `work.wait` takes 60 s
    assert not psutil.pid_exists(int(process.stdout))


BLOCKED = """
import multiprocessing, signal, time
def block():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
def finish():
    multiprocessing.get_context("fork").Process(target=block, daemon=True).start()
    time.sleep(0.5)
    return "finished"
"""
CALL = """
from harness.start import processes
import work
processes.LIBRARIES = ("torch",)
print(*processes.call(processes.start_server(), work.finish), flush=True)
"""


def test_process_does_not_wait_for_a_daemon(python):
    """For a DataLoader's worker that reads: it ignores SIGTERM."""
    started = time.monotonic()
    process = python(CALL, BLOCKED)
    assert process.stdout == "0 finished\n" and not process.stderr, process.stdout + process.stderr
    assert time.monotonic() - started < 50  # `block` takes 60 s


def test_every_process_can_exit_before_training(fork_launch, tmp_path):
    """By `sys.exit` or `os._exit`."""
    recipe = tmp_path / "exits.py"
    text = (ROOT / f"recipes/{RECIPE}.py").read_text()
    exits = "__import__('os')._exit(0) if training_args.process_index else exit()"
    recipe.write_text(text.replace("    train(", f"    {exits}\n    train("))
    process = fork_launch("--tiny", recipe, "4gpu_shard_grad_op", cwd=tmp_path, NPROC_PER_NODE="2", timeout=120)
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


@slow
def test_spawned_processes_log_the_same_losses(rehearse, tmp_path):
    """As where forking is not possible."""
    (tmp_path / "sitecustomize.py").write_text(STARTS_A_THREAD)
    flags = ["--max_steps", "2", "--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
    spawned = rehearse(RECIPE, "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2", PYTHONPATH=str(tmp_path))
    forked = rehearse(RECIPE, "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2")
    assert losses(spawned) == losses(forked) and len(losses(spawned)) == 2


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
    assert len(alive()) >= 4  # the launcher, the fork server and two that train
    process.kill()
    process.wait()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


def test_killed_process_starts_again(session, rehearse, workdir):
    """The run resumes from its newest checkpoint, and logs the losses of an uninterrupted one."""
    flags = ["--max_steps", "30", "--save_steps", "4"]
    process, log, alive = session(workdir / "runs/starts-again", *flags, "--max_restarts", "1")
    wait_until(lambda: "step  6/30" in log.read_text() or process.poll() is not None, 120, log.read_text)
    psutil.Process(max(one.pid for one in alive() if one.ppid() != process.pid != one.pid)).kill()
    assert process.wait(timeout=120) == 0, log.read_text()
    assert "it was killed" in log.read_text() and "Starting again from the newest checkpoint, 1 of 1 times" in log.read_text()
    flags += ["--logging_steps", "1", "--eval_strategy", "no"]
    uninterrupted = rehearse(RECIPE, "4gpu_full_shard", *flags, NPROC_PER_NODE="2")
    assert losses(workdir / "runs/starts-again") == losses(uninterrupted)


def test_exit_with_parent(python):
    """Also if the parent was killed before the call."""
    script = "import os\nfrom harness.signals import exit_with_parent\nexit_with_parent({})\nprint('lives')"
    assert python(script.format("os.getppid()")).stdout == "lives\n"
    assert python(script.format("os.getpid()")).returncode == 137


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
    ("module", "number"),
    [
        ("yaml", signal.SIGINT),
        ("yaml", signal.SIGTERM),
        ("torch._C", signal.SIGINT),
        ("torch._C", signal.SIGUSR1),
        ("accelerate.accelerator", signal.SIGINT),
        ("accelerate.accelerator", signal.SIGTERM),
    ],
)
def test_signal_during_imports_ends_the_launcher(python, module, number):
    """With one message at most, although an import can swallow the exception that a handler raises."""
    process = python(INTERRUPT, arguments=[str(int(number)), module, *WORDS], preexec_fn=_hear_ctrl_c)
    assert process.returncode in (-number, 128 + number) and "Traceback" not in process.stderr
    lines = process.stderr.splitlines()
    assert lines in ([], [f"Stopped by {number.name} before the training began."])
    assert bool(lines) == (module != "yaml" and number != signal.SIGINT)


# Lines of a recipe, and what is inserted before them: signals to all processes.
MOMENTS = {
    "the run is checked": ("def main(", "if type(contexts.current()).__name__ == 'Check':\n    {}\n\n\ndef main("),
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
    imports = "import os\n\nfrom harness import contexts\nfrom harness"
    text = (ROOT / f"recipes/{RECIPE}.py").read_text().replace("from harness", imports, 1)
    recipe.write_text(text.replace(line, lines.format(f"os.killpg(0, {int(number)})")))
    process, log, alive = session(tmp_path / "run", recipe=recipe)
    assert process.wait(timeout=120) == 128 + number, log.read_text()
    printed = log.read_text()
    assert "Traceback" not in printed and "error: " not in printed
    messages = 0 if number == signal.SIGINT else 1
    assert printed.count(f"Stopped by {number.name} before the training began.\n") == messages
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


AFTER_CHECK = """
import os, runpy, sys
class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == "accelerate.commands.launch":
            os.killpg(0, int(number))
number = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt)
runpy.run_module("harness.start.launch", run_name="__main__", alter_sys=True)
"""


@slow
def test_signal_to_all_processes_after_the_check(python, tmp_path):
    """Sent when the launcher imports a module. No process is left: each would keep the pipe open that is read to its end."""
    words = [str(int(signal.SIGUSR1)), *WORDS[:-1], str(ROOT / "accelerate_configs/4gpu_full_shard.yaml")]
    options = {"start_new_session": True, "variables": {"NPROC_PER_NODE": "2"}}
    process = python(AFTER_CHECK, arguments=[*words, "--output_dir", str(tmp_path / "run")], **options)
    assert process.returncode == 128 + signal.SIGUSR1
    assert process.stderr == "Stopped by SIGUSR1 before the training began.\n"


def test_ctrl_c_is_ignored_in_the_background(python):
    """A shell makes the programs that it starts in the background ignore SIGINT."""
    arguments = [str(int(signal.SIGINT)), "yaml", *WORDS, "--help"]
    process = python(INTERRUPT, arguments=arguments, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.returncode == 0 and "--max_steps" in process.stdout


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
    ranks = sorted(one.pid for one in alive() if one.ppid() != process.pid != one.pid)  # those of the fork server
    assert len(ranks) == 2
    psutil.Process(ranks[-1]).suspend()
    assert process.wait(timeout=90) not in (0, 2), log.read_text()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "was lost at step" in errors[0] and "Traceback" not in log.read_text(), log.read_text()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


LOST = """
import os, signal
from harness.start import processes
signal.signal(signal.{name}, processes.{handler})
class Destroyed:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        for _ in range(10_000):
            pass
Destroyed()
print("goes on")
processes.stop_if_signaled()
print("lost")
"""


@pytest.mark.parametrize(
    ("name", "handler", "end"), [("SIGINT", "interrupt", "KeyboardInterrupt"), ("SIGTERM", "exit_for_signal", "")]
)
def test_signal_in_a_destructor_is_not_lost(python, name, handler, end):
    """Python only prints what is raised there."""
    process = python(LOST.format(name=name, handler=handler))
    assert process.stdout == "goes on\n" and end in process.stderr.splitlines()[-1]
    assert process.returncode == (143 if name == "SIGTERM" else -2)
