"""Fixtures: the launcher as a user calls it, rehearsals that tests share, a recipe's trainer built in this process."""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

RECIPES = sorted((ROOT / "recipes").glob("*.py"))
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


SLOW = {"rehearse", "machinery", "sky_python", "start"}  # fixtures of what takes longer than seconds


def pytest_collection_modifyitems(items):
    """What takes seconds first, whole rehearsals last."""
    items.sort(key=lambda item: not SLOW.isdisjoint(item.fixturenames))


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
def workplace(tmp_path_factory):
    """The folder rehearsals run in; it has a space in its name."""
    return tmp_path_factory.mktemp("work place")


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
def rehearse(launch, workplace):
    """Rehearses a recipe with a config and flags, once a session (or again: `fresh`); returns the run's folder."""
    done = {}

    def call(recipe, config, *flags, fresh=False, **variables):
        key = (recipe, config, *flags, *([len(done)] if fresh else []))
        if key not in done:
            folder = workplace / "runs" / f"{len(done)}-{recipe}"
            process = launch("--tiny", recipe, config, "--output_dir", folder, *flags, **variables)
            assert process.returncode == 0, process.stdout + process.stderr
            done[key] = folder
        return done[key]

    return call


@pytest.fixture
def build_trainer(workplace, monkeypatch, tmp_path):
    """Runs a recipe in this process, on its tiny stand-ins, and returns the trainer it hands to `train`."""
    import harness

    handed_over = []

    def call(recipe, *flags):
        monkeypatch.chdir(workplace)
        launched = {"recipe": recipe, "processes": 1, "tiny": True, "on_cpu": True}
        monkeypatch.setattr(harness, "train", handed_over.append)
        path = str(ROOT / "recipes" / f"{recipe}.py")
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


@pytest.fixture(scope="session")
def two_by_two(tmp_path_factory):
    """The hybrid config on four processes: two replicas of two shards."""
    settings = yaml.safe_load((ROOT / "accelerate_configs/2x4gpu_hybrid_shard.yaml").read_text())
    assert settings["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    settings["parallelism_config"]["parallelism_config_dp_shard_size"] = 2
    settings |= {"num_processes": 4}
    path = tmp_path_factory.mktemp("a config") / "hybrid_2x2.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def readme_pairs() -> list[tuple[str, str, int, bool]]:
    """The rows of the README's table: recipe, config, processes, sharded or not."""
    row = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (yes|no) \|", re.MULTILINE)
    pairs = [(r, c, int(n), fsdp == "yes") for r, c, n, fsdp in row.findall((ROOT / "README.md").read_text())]
    assert pairs, "the README's table of recipes was not found"
    return pairs


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
