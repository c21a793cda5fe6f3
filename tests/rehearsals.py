"""Rehearsals that tests share: each is run once a session, those that are known to be needed in the background."""

import contextlib
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil

BRIEF = ["--max_steps", "20"]  # a checkpoint on the way, at 15, and one at the end; a rehearsal by itself takes 30


class Rehearsals:
    """Called with a recipe, a config and flags (BRIEF unless they say how long), returns the run's folder.

    `begin` takes the same and returns at once: the run waits for its turn in the background until it is called for.
    """

    def __init__(self, launch, folder: Path):
        self.launch, self.folder, self.number, self.runs = launch, folder, itertools.count(), {}
        self.background = ThreadPoolExecutor(max_workers=1)

    def __call__(self, recipe, config, *flags, **variables) -> Path:
        key = self._key(recipe, config, flags, variables)
        begun = self.runs.get(key)
        if begun is None or begun.cancel():  # it had not begun to run
            self.runs[key] = begun = Future()
            try:
                begun.set_result(self._run(*key))
            except Exception as error:
                begun.set_exception(error)
        return begun.result()

    def begin(self, recipe, config, *flags, **variables):
        key = self._key(recipe, config, flags, variables)
        self.runs[key] = self.background.submit(self._run, *key)

    def close(self):
        self.background.shutdown(wait=False, cancel_futures=True)
        for launcher in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                launcher.kill()  # and with it whatever it started

    def _key(self, recipe, config, flags, variables):
        return recipe, config, flags if "--max_steps" in flags else (*flags, *BRIEF), tuple(variables.items())

    def _run(self, recipe, config, flags, variables) -> Path:
        folder = self.folder / f"{next(self.number)}-{Path(recipe).stem}"
        process = self.launch("--tiny", recipe, config, "--output_dir", folder, *flags, **dict(variables))
        assert process.returncode == 0, process.stdout + process.stderr
        return folder
