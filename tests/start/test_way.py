"""How far a reader goes from the first line of a recipe to `Trainer.train`."""

import itertools

from conftest import ROOT
from runs import read

MOST_FILES, MOST_RETURNS = 46, 75


def test_files_and_returns_to_files(fork_launch, tmp_path):
    """A return: the next function is in a file that was left before."""
    process = fork_launch("--tiny", ROOT / "tests/start/follow_recipe.py", "1x3090", "--max_steps", "1", "--output_dir", tmp_path)
    assert process.returncode == 0, process.stderr
    visits = [file for file, _ in itertools.groupby(read(tmp_path, "way.json"))]
    files = len(set(visits))
    returns = len(visits) - files
    assert files <= MOST_FILES and returns <= MOST_RETURNS, (files, returns)
