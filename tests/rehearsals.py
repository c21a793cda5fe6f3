"""Rehearsals that several tests look at, also tests of other workers: each is run once."""

import hashlib
import json
from pathlib import Path

import yaml
from filelock import FileLock

CONFIGS = Path(__file__).resolve().parents[1] / "accelerate_configs"

# A checkpoint in the middle and one at the end.
SHORT = ["--max_steps", "6", "--save_steps", "4", "--eval_steps", "6"]


def fewer_processes(config: str) -> dict:
    """NPROC_PER_NODE=2 for a config of the project with four or more processes: two show as much, unless shards are replicated.

    Three stay three, because their shards have different sizes.
    """
    file = CONFIGS / f"{config}.yaml"
    settings = yaml.safe_load(file.read_text()) if "/" not in str(config) else {}
    has_more = settings.get("num_processes", 1) > 3 and "parallelism_config" not in settings
    return {"NPROC_PER_NODE": "2"} if has_more else {}


class Rehearsals:
    """Called with a recipe, a config and flags (SHORT unless they set max_steps); returns the output directory."""

    def __init__(self, launch, fork_launch, folder: Path):
        self.launch, self.fork_launch, self.folder = launch, fork_launch, folder
        folder.mkdir(exist_ok=True)

    def __call__(self, recipe, config, *flags, **variables) -> Path:
        flags = flags if "--max_steps" in flags else (*flags, *SHORT)
        variables = fewer_processes(config) | variables
        key = json.dumps([recipe, config, flags, variables], default=str)
        run = self.folder / f"{Path(recipe).stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        failure = run.with_suffix(".txt")  # empty after a success
        with FileLock(run.with_suffix(".lock")):
            if not failure.exists():
                launch = self.launch if {"PYTHON", "PYTHONPATH"} & variables.keys() else self.fork_launch
                process = launch("--tiny", recipe, config, "--output_dir", run, *flags, **variables)
                failure.write_text("" if process.returncode == 0 else process.stdout + process.stderr)
        assert not failure.read_text(), failure.read_text()
        return run
