"""Python files of the working directory do not run instead of the modules that launch.sh and the harness import."""

import pytest
from conftest import ROOT
from payloads import ran, write_modules

RECIPE, CONFIG = "qwen2_fineweb_edu", "1x3090"


@pytest.mark.unit
@pytest.mark.parametrize(
    "command",
    [
        "",
        "--help",
        "qwen2_finewebedu 1x3090",
        f"{RECIPE} 1x309",
        f"--tiny {RECIPE} {CONFIG} --max_stepps 3",
        "--report no_run",
    ],
)
def test_files_of_the_working_directory_do_not_run(launch, tmp_path, command):
    """Also with an empty entry in PYTHONPATH, which is the working directory."""
    write_modules(tmp_path)
    process = launch(*command.split(), cwd=tmp_path, PYTHONPATH=f":{tmp_path / 'other'}::")
    assert process.returncode == (0 if command.endswith("--help") or not command else 2), process.stdout + process.stderr
    assert ran(tmp_path) == []


@pytest.mark.parametrize("command", ["--preview", "--prepare", "--plan", ""])
def test_files_of_the_working_directory_do_not_run_in_commands(launch, tmp_path, command):
    write_modules(tmp_path)
    words = [*command.split(), RECIPE, "--max_stepps" if command else "--help"]
    process = launch(*words, cwd=tmp_path, PYTHONPATH=f":{tmp_path / 'other'}::")
    assert process.returncode == (2 if command else 0), process.stderr
    assert ran(tmp_path) == []


@pytest.mark.rehearsal
def test_rehearsal_imports_files_next_to_the_recipe_only(launch, tmp_path):
    """Its processes, and programs that they start, ignore the working directory."""
    write_modules(tmp_path)
    folder = tmp_path / "recipes of mine"
    folder.mkdir()
    (folder / "neighbour.py").write_text("NAME = 'of the neighbour'\n")
    start = "import subprocess, sys, neighbour\nsubprocess.run([sys.executable, '-c', 'import random'], check=True)\n"
    recipe = folder / "mine.py"
    recipe.write_text(
        (ROOT / f"recipes/{RECIPE}.py").read_text().replace("def main", f"{start}print(neighbour.NAME)\n\ndef main")
    )
    process = launch("--tiny", recipe, CONFIG, "--max_steps", "1", "--eval_strategy", "no", cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "of the neighbour" in process.stdout
    assert ran(tmp_path) == []
