"""One import a start: where processes come from, what they begin and end with."""

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
    """Runs a script; functions that other processes are to run stand in its module `work`."""

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


IMPORTED = """
import os, sys, threading
from pathlib import Path
import torch
touches = []
def touched(*args, **kwargs):
    touches.append(args)
    raise RuntimeError("CUDA was initialized")
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
torch.cuda._lazy_init = torch._C._cuda_init = touched
from harness.start import server
problem = server.import_libraries()
assert not problem, problem
assert {"trl", "peft", "datasets", "transformers.trainer"} <= sys.modules.keys()
names = sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))
print(threading.active_count(), [name for name in names if name != "jemalloc_bg_thd"], len(touches))
import bitsandbytes
try:
    bitsandbytes.nn
finally:
    print(len(touches) > 0)
"""


def test_what_is_imported_before_the_fork(python):
    """With GPUs there: none is touched, except by bitsandbytes when it is used; no thread but the allocator's is alive."""
    process = python(IMPORTED, variables={"OPENBLAS_NUM_THREADS": "1"})
    assert process.stdout.splitlines() == ["1 ['python'] 0", "True"], process.stderr


CALL = """
import os, sys
from harness.start import processes, server, worker
import work
server.prepare()
os.environ["SINCE"] = "then"
print(server.method, *processes.call({call}), flush=True)
"""


@pytest.mark.parametrize("begins_a_thread", [False, True], ids=["forked", "an import begins a thread"])
def test_a_process_has_imported_already_or_starts_anew(python, tmp_path, begins_a_thread):
    """Either way it finds the environment of its launcher, and what its launcher was given to read."""
    if begins_a_thread:
        (tmp_path / "sitecustomize.py").write_text(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
        )
    work = "import os, sys\ndef what():\n    return 'trl' in sys.modules, os.environ['SINCE'], sys.stdin.readline()\n"
    process = python(CALL.format(call="work.what"), work, input="typed\n")
    assert process.returncode == 0, process.stderr
    method, code, *answer = process.stdout.split(maxsplit=2)
    expected = ("spawn", "(False, 'then', '')") if begins_a_thread else ("forkserver", r"(True, 'then', 'typed\n')")
    assert (method, code, answer[0].strip()) == (expected[0], "0", expected[1])


ENDS = {
    "sys.exit(7)": ("7", ""),
    "atexit.register(print, 'goodbye', flush=True)": ("0", "goodbye"),
    "os.kill(os.getpid(), 9)": ("-9", ""),
    "sys.exit()": ("0", ""),
    "import multiprocessing\nprint(multiprocessing.Pool(2).map(len, ['a', 'bc']), flush=True)": ("0", "[1, 2]"),
}


def test_how_a_recipe_ends(python, tmp_path):
    script = CALL.rsplit("print(", 1)[0] + "for path in sys.argv[1:]:\n"
    script += "    print(*processes.call(worker.recipe, path, []), flush=True)\n    print('---', flush=True)\n"
    recipes = [tmp_path / f"ends_{number}.py" for number in range(len(ENDS))]
    for recipe, body in zip(recipes, ENDS, strict=True):
        recipe.write_text(f"import atexit, os, sys\n{body}\n")
    process = python(script, arguments=recipes)
    assert process.returncode == 0 and not process.stderr, process.stderr
    for said, (body, (code, shown)) in zip(process.stdout.split("---\n"), ENDS.items(), strict=False):
        assert said.split()[-2:] == [code, "None"] and shown in said, body


def test_every_process_may_leave_by_exit(launch, tmp_path):
    """torch's launcher waits for what a process returns, and neither `sys.exit(main())` nor `os._exit(0)` returns anything."""
    recipe = tmp_path / "leaves.py"
    text = (ROOT / f"recipes/{RECIPE}.py").read_text()
    recipe.write_text(text.replace("    train(", "    __import__('os')._exit(0) if args.process_index else exit()\n    train("))
    process = launch("--tiny", recipe, "4gpu_shard_grad_op", cwd=tmp_path, NPROC_PER_NODE="2", timeout=120)
    assert process.returncode == 0 and not process.stderr, process.stderr


def test_a_traceback_begins_in_the_recipe(python, tmp_path):
    recipe = tmp_path / "fails.py"
    recipe.write_text("def main():\n    raise KeyError('column')\n\n\nmain()\n")
    process = python(CALL.format(call=f"worker.recipe, {str(recipe)!r}, []"))
    lines = process.stderr.splitlines()
    assert process.stdout.split()[-2:] == ["1", "None"]
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{recipe}", line 5, in <module>'], process.stderr
    assert lines[-1] == "KeyError: 'column'"


@pytest.mark.parametrize("who", ["True", "args.process_index"])
def test_processes_that_fail_alike_show_one_traceback(starts, tmp_path, who):
    """And one that fails alone shows its own."""
    recipe = tmp_path / "fails.py"
    text = (ROOT / f"recipes/{RECIPE}.py").read_text()
    recipe.write_text(text.replace("    train(", f"    assert not ({who}), 'mine'\n    train("))
    process = starts("--tiny", recipe, "4gpu_ddp", cwd=tmp_path, NPROC_PER_NODE="2")
    assert process.stderr.count("Traceback") == process.stderr.count("AssertionError: mine") == 1, process.stderr
    # Another one that notices first that this one has gone is the first to end.
    assert process.returncode in ((1, network.LOST) if who != "True" else (1,))


def test_threads_of_arithmetic(python):
    """OMP_NUM_THREADS is read when torch is imported, which was before. An answer may be larger than a pipe holds."""
    work = "import torch\ndef threads():\n    return str(torch.get_num_threads()) * 1_000_000\n"
    script = CALL.format(call="work.threads").replace('os.environ["SINCE"] = "then"', 'os.environ["OMP_NUM_THREADS"] = "1"')
    process = python(script, work, variables={"OMP_NUM_THREADS": "2"})
    assert process.stdout.split() == ["forkserver", "0", "1" * 1_000_000], process.stderr


def test_processes_that_start_anew_log_the_same_losses(rehearse, tmp_path):
    """Where nothing can be forked, a launch does the same at a higher price."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    flags = ["--max_steps", "2", "--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
    anew = rehearse(RECIPE, "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2", PYTHONPATH=str(tmp_path))
    forked = rehearse(RECIPE, "4gpu_shard_grad_op", *flags, NPROC_PER_NODE="2")
    assert losses(anew) == losses(forked) and len(losses(anew)) == 2


@pytest.fixture
def session(environment, workplace, tmp_path):
    """Starts a rehearsal on two processes in a session of its own; returns it once it trains, and what lives in it."""
    started = []

    def alive():
        return [p for p in psutil.process_iter(["status"]) if _session(p.pid) == started[0].pid and p.info["status"] != "zombie"]

    def call(run, *more):
        flags = ["--output_dir", str(run), "--max_steps", "2000", "--save_steps", "1000", "--logging_steps", "1"]
        command = [str(ROOT / "launch.sh"), "--tiny", RECIPE, "4gpu_full_shard", *flags, "--eval_strategy", "no", *more]
        with (tmp_path / "log").open("w") as log:
            env = environment | {"NPROC_PER_NODE": "2"}
            started.append(subprocess.Popen(command, cwd=workplace, env=env, stdout=log, stderr=log, start_new_session=True))
        return started[0], tmp_path / "log", alive

    yield call
    for process in alive():
        process.kill()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_a_signal_to_every_process_at_once(session, workplace, number, code):
    """As SLURM sends it, to whatever runs in the job: the server lives on, a checkpoint is written, nothing is left."""
    run = workplace / f"runs/signalled-{code}"
    process, log, alive = session(run)
    wait_until(lambda: log.read_text().count("  loss ") > 1, 120, log.read_text)
    for one in alive():
        one.send_signal(number)
    assert process.wait(timeout=60) == code, log.read_text()
    assert f"Stopped by {number.name} at step" in log.read_text() and "Traceback" not in log.read_text()
    assert "Warning" not in log.read_text()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))
    assert list(run.glob("checkpoint-*/complete.json"))


def test_a_killed_launcher_takes_everything_with_it(session, workplace):
    process, log, alive = session(workplace / "runs/killed-launcher")
    wait_until(lambda: log.read_text().count("  loss ") > 1, 120, log.read_text)
    assert len(alive()) >= 4  # launcher, server and two that train
    process.kill()
    process.wait()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))


INTERRUPTED = """
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
def test_a_signal_while_modules_are_imported(python, module, number):
    """It ends the launcher, in one line at most, although an import may swallow what a handler raises."""
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # also where these tests run in the background
    process = python(INTERRUPTED, arguments=[str(int(number)), module, *WORDS], **heard)
    assert process.returncode in (-number, 128 + number) and "Traceback" not in process.stderr
    lines = process.stderr.splitlines()
    assert lines in ([], [f"Stopped by {number.name} before the training began."])
    assert bool(lines) == (module != "yaml" and number != signal.SIGINT)


def test_ctrl_c_is_not_for_what_runs_in_the_background(python):
    arguments = [str(int(signal.SIGINT)), "yaml", *WORDS, "--help"]
    process = python(INTERRUPTED, arguments=arguments, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.returncode == 0 and "--max_steps" in process.stdout


def test_a_signal_after_the_last_step_does_no_harm(session, workplace):
    """To every process, again and again, while the model is written, while samples are made, while Python ends."""
    run = workplace / "runs/finished-all-the-same"
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


def test_nobody_is_left_when_the_parent_went_first(python):
    """A launcher that is killed between a fork and the child's wish to die with it."""
    script = "import os\nfrom harness.nodes import signals\nsignals.die_with_parent({})\nprint('lives')"
    assert python(script.format("os.getppid()")).stdout == "lives\n"
    assert python(script.format("os.getpid()")).returncode == 137


def test_a_process_that_hangs(session, workplace):
    """As `kill -STOP` makes it: within --ddp_timeout the others notice, one line says so, and nothing is left."""
    process, log, alive = session(workplace / "runs/hangs", "--ddp_timeout", "10")
    wait_until(lambda: log.read_text().count("  loss ") > 1, 120, log.read_text)
    ranks = sorted(one.pid for one in alive() if one.ppid() != process.pid and one.pid != process.pid)
    psutil.Process(ranks[-1]).suspend()
    assert process.wait(timeout=90) not in (0, 2), log.read_text()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "was lost at step" in errors[0] and "Traceback" not in log.read_text(), log.read_text()
    wait_until(lambda: not alive(), 20, lambda: str(alive()))
