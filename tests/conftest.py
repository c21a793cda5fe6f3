"""Fixtures: the launcher as a user calls it, rehearsals that tests share, a recipe's trainer built in this process."""

import contextlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import yaml
from cluster import Nodes, Slurm, missing
from rehearsals import Rehearsals
from stand_in_hub import serve
from starts import Starts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

RECIPES = sorted((ROOT / "recipes").glob("*.py"))
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
# Packages of others than the project: what they are, and whether they run beside its own.
OTHERS = {"sky_python": (["skypilot==0.14.1"], False), "tracker_python": (["tensorboard==2.21.0", "trackio==0.43.0"], True)}
# Fixtures by when their tests run: those of seconds, of machines, of rehearsals, of what is being installed.
COSTS = {"environment": 1, "build_trainer": 1, "machinery": 2, "start": 3, "starts": 3, "drive": 3}
COSTS |= {"sky_python": 4, "tracker_python": 4}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """What answers at once comes first, whole rehearsals last; one worker has the machines, and one what a module shares.

    The machines come early: their tests wait a lot, and meanwhile the other worker has enough to compute.
    """
    items.sort(key=lambda item: max(COSTS.get(name, 0) for name in ("", *item.fixturenames)))
    for item in items:
        scopes = {definitions[-1].scope for definitions in item._fixtureinfo.name2fixturedefs.values()}
        if "machinery" in item.fixturenames or "module" in scopes:
            item.add_marker(pytest.mark.xdist_group("machines" if "machinery" in item.fixturenames else item.path.stem))


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of these tests have."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def installations(request, shared):
    """Packages of others, in environments of their own: begun at once, by the first worker, they take a minute."""
    for name in OTHERS.keys() & {name for item in request.session.items for name in item.fixturenames}:
        packages, beside_ours = OTHERS[name]
        folder = shared / name
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            if beside_ours:
                site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
                site.mkdir(parents=True)
                (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
            install = (
                f'"$0" -m venv "$1" && "$1/bin/python" -m pip install --quiet --disable-pip-version-check {" ".join(packages)}'
            )
            subprocess.Popen(["sh", "-c", f'{install} && touch "$1/installed"', sys.executable, folder])


@pytest.fixture(scope="session")
def sky_python(shared) -> Path:
    return _installed(shared / "sky_python")


@pytest.fixture(scope="session")
def tracker_python(shared) -> Path:
    return _installed(shared / "tracker_python")


def _installed(folder: Path) -> Path:
    wait_until((folder / "installed").exists, 600, lambda: f"{folder} is not installed")
    return folder / "bin/python"


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The tests' own Python, no network, caches of their own."""
    home = tmp_path_factory.mktemp("home")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SKYPILOT_", "MASTER_"))}
    return own | {
        "PYTHON": sys.executable,
        "HF_HOME": str(home / "huggingface"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody answers there
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_COLOR": "1",
    }


@pytest.fixture(scope="session")
def workplace(shared):
    """The folder rehearsals run in; it has a space in its name."""
    place = shared / "work place"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="session")
def launch(environment, workplace):
    """Calls launch.sh; returns the finished process with its output as text."""

    def call(*arguments, cwd=workplace, timeout=300, **variables):
        return subprocess.run(
            [ROOT / "launch.sh", *map(str, arguments)],
            cwd=cwd,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call


@pytest.fixture(scope="session")
def starts(environment, workplace):
    """What `launch` does to `harness.start.launch`, without its imports."""
    made = Starts(environment, workplace)
    yield made
    made.close()


@pytest.fixture(scope="session")
def rehearse(launch, starts, workplace):
    """Rehearses a recipe with a config and flags, once a session; returns the run's folder."""
    return Rehearsals(launch, starts, workplace / "runs")


@pytest.fixture
def build_trainer(workplace, monkeypatch, tmp_path):
    """Runs a recipe in this process, on its tiny stand-ins, and returns the trainer it hands to `train`."""
    import harness

    handed_over = []

    def call(recipe, *flags):
        monkeypatch.chdir(workplace)
        path = str(ROOT / "recipes" / f"{recipe}.py")
        launched = {"recipe": path, "processes": 1, "tiny": True, "on_cpu": True}
        monkeypatch.setattr(harness, "train", handed_over.append)
        # Once as launch.py does, to check and to make the stand-ins; once as a rank does.
        for checking in (True, False):
            monkeypatch.setenv("RECIPE_LAUNCH", json.dumps(launched | {"checking": checking}))
            monkeypatch.setattr(sys, "argv", [path, "--output_dir", str(tmp_path / f"in-process-{len(handed_over)}"), *flags])
            try:
                runpy.run_path(path, run_name="__main__")
            except harness.launched.Checked:
                assert checking
        return handed_over[-1]

    return call


@pytest.fixture
def says(capsys):
    """Calls something that must end the process with one line, and returns the line."""

    def call(function, *arguments):
        capsys.readouterr()  # what was said before
        with pytest.raises(SystemExit) as stopped:
            function(*arguments)
        message = capsys.readouterr().err
        assert stopped.value.code == 2 and message.count("\n") == 1
        return message

    return call


@pytest.fixture(scope="session")
def machinery(tmp_path_factory):
    """Three machines, under SLURM where it is installed."""
    if reason := missing():
        pytest.skip(reason)
    kind = Nodes if missing("slurmctld", "slurmd", "munged", "sbatch") else Slurm
    with kind(3, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="session")
def drive(environment, tmp_path_factory):
    """Calls tests/plan/drive.py with runs (recipe, config, flags, how); returns what was found for each."""

    def call(runs) -> list:
        folder = tmp_path_factory.mktemp("drive")
        runs = [[str(recipe), str(config), [str(flag) for flag in flags], how] for recipe, config, flags, how in runs]
        with serve(ROOT / "tests/published") as hub:
            process = subprocess.run(
                [sys.executable, ROOT / "tests/plan/drive.py", json.dumps(runs), str(free_port())],
                env=environment | {"HF_ENDPOINT": hub.url},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=580,
            )
        files = [folder / f"{number}.json" for number in range(len(runs))]
        assert all(file.is_file() for file in files), process.stdout + process.stderr
        return [json.loads(file.read_text()) for file in files]

    return call


@pytest.fixture(scope="session")
def two_by_two(shared):
    """The hybrid config on four processes: two replicas of two shards."""
    settings = yaml.safe_load((ROOT / "accelerate_configs/2x4gpu_hybrid_shard.yaml").read_text())
    assert settings["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    settings["parallelism_config"]["parallelism_config_dp_shard_size"] = 2
    settings |= {"num_processes": 4}
    path = shared / "hybrid_2x2.yaml"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(yaml.safe_dump(settings))
    return draft.rename(path)


def readme_pairs() -> list[tuple[str, str, int, bool]]:
    """The rows of the README's table: recipe, config, processes, sharded or not."""
    row = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (yes|no) \|", re.MULTILINE)
    pairs = [(r, c, int(n), fsdp == "yes") for r, c, n, fsdp in row.findall((ROOT / "README.md").read_text())]
    assert pairs, "the README's table of recipes was not found"
    return pairs


def is_one_line(process, *words):
    """The process ended with one line that holds `words`, and did nothing else."""
    assert process.returncode == 2, process.stdout + process.stderr
    assert process.stderr.count("\n") == 1 and process.stderr.startswith("error: "), process.stderr
    assert not process.stdout
    for word in words:
        assert word in process.stderr


def wait_until(condition, seconds: float, what):
    """Waits until `condition()`; when it takes too long, fails with `what()`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(folder: Path, name: str = "train_results.json") -> dict:
    return json.loads((folder / name).read_text())


def losses(folder: Path) -> dict[int, tuple]:
    """What a run logged: step to (loss, grad_norm)."""
    history = read(folder, "trainer_state.json")["log_history"]
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry}
