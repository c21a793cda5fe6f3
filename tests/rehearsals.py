"""Rehearsals that tests share, also those of other workers: each is run once."""

import hashlib
import json
from pathlib import Path

from filelock import FileLock

BRIEF = ["--max_steps", "15", "--save_steps", "10", "--eval_steps", "10"]  # a checkpoint on the way and one at the end


class Rehearsals:
    """Called with a recipe, a config and flags (BRIEF unless they say how long), returns the run's folder."""

    def __init__(self, launch, starts, folder: Path):
        self.launch, self.starts, self.folder = launch, starts, folder
        folder.mkdir(exist_ok=True)

    def __call__(self, recipe, config, *flags, **variables) -> Path:
        flags = flags if "--max_steps" in flags else (*flags, *BRIEF)
        key = json.dumps([recipe, config, flags, variables], default=str)
        run = self.folder / f"{Path(recipe).stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        said = run.with_suffix(".txt")  # how it ended
        with FileLock(run.with_suffix(".lock")):
            if not said.exists():
                start = self.starts if variables.keys() <= {"NPROC_PER_NODE"} else self.launch
                process = start("--tiny", recipe, config, "--output_dir", run, *flags, **variables)
                said.write_text("" if process.returncode == 0 else process.stdout + process.stderr)
        assert not said.read_text(), said.read_text()
        return run
