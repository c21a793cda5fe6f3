"""What the README says can be done can be done."""

import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

from harness import configs
from harness.launched import Checked
from harness.start import flags

import pytest
from conftest import CONFIGS, RECIPES, ROOT, readme_pairs

README = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line.removesuffix(" &"), comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]


def resolved(folder: str, extension: str, word: str) -> Path:
    return ROOT / folder / f"{word}.{extension}"


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_command_is_one_that_exists(command):
    while "=" in command[0]:  # variables before the program
        command = command[1:]
    program = command[0]
    if program == "sky":
        assert (ROOT / command[3]).is_file()
    elif program == "sbatch":
        assert "launch.sh" in command
    elif program == "cp":
        assert (ROOT / command[1]).is_file() and (ROOT / command[2]).parent.is_dir()
    elif program.startswith(".venv/bin/"):
        assert (Path(sys.executable).parent / Path(program).name).exists()
    else:
        assert program == "./launch.sh"
        assert command[1:2] == ["--test"] or len(command) > 2


LAUNCHER = re.compile(r"(\./)?launch\.sh")
STARTS = [[number for number, word in enumerate(command) if LAUNCHER.fullmatch(word)] for command in COMMANDS]
CALLS = [
    [word for word in command[start[0] + 1 :] if word != "--tiny"]
    for command, start in zip(COMMANDS, STARTS, strict=True)
    if start
]
TRAINING = [call for call in CALLS if not any(word.startswith("-") for word in call[:2])]


@pytest.mark.parametrize("command", TRAINING, ids=shlex.join)
def test_training_command_passes_its_checks(command, tmp_path, monkeypatch):
    """As launch.py checks it, on the stand-ins."""
    monkeypatch.chdir(tmp_path)
    names = [recipe.stem for recipe in RECIPES]
    recipe, config, *rest = command
    path = tmp_path / f"{recipe}.py"
    shutil.copy(resolved("recipes", "py", recipe if recipe in names else "qwen2_fineweb_edu"), path)
    if "my-org/my-llama" in rest:  # stands for a model of the reader's
        rest[rest.index("my-org/my-llama")] = "Qwen/Qwen2-0.5B"
    flags.check(path, rest)
    processes = configs.read(str(resolved("accelerate_configs", "yaml", config)))["num_processes"]
    launched = {"recipe": str(path), "config": str(resolved("accelerate_configs", "yaml", config)), "processes": processes}
    monkeypatch.setenv("RECIPE_LAUNCH", json.dumps(launched | {"tiny": True, "on_cpu": True, "checking": True}))
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false"))
    monkeypatch.setattr(sys, "argv", [str(path), *rest])
    with pytest.raises(Checked):
        runpy.run_path(str(path), run_name="__main__")


def test_the_table_names_every_recipe_and_config():
    pairs = readme_pairs()
    assert {pair[0] for pair in pairs} == {recipe.stem for recipe in RECIPES}
    assert {pair[1] for pair in pairs} == {config.stem for config in CONFIGS}
    for _, config, processes, is_sharded in pairs:
        settings = configs.read(str(resolved("accelerate_configs", "yaml", config)))
        assert (settings["num_processes"], settings["distributed_type"] == "FSDP") == (processes, is_sharded)


def test_numbers_say_whether_they_are_measured():
    """A number of the table is marked as a forecast, or carries hardware and date."""
    for line in README.splitlines():
        if line.startswith("| `"):
            for cell in line.split("|")[6:8]:
                assert "forecast" in cell or re.search(r"20\d\d-\d\d-\d\d", cell) or "out of memory" in cell, line


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_tables_are_what_the_arithmetic_says():
    paper = runpy.run_path(str(ROOT / "benchmarks/paper.py"))
    for table in (paper["memory"], paper["strategies"], paper["speed_up"]):
        assert paper["markdown"](table()) in README
    total = {row[0]: row[1:] for row in paper["memory"]()}
    assert total["total"][:2] == ["140.0 GB", "70.0 GB"]  # as in the source
    named = set(re.findall(r"`(\w+)`", "".join(row[-1] for row in paper["strategies"]())))
    assert named == {config.stem for config in CONFIGS if config.stem.startswith(("2x4", "3x", "4gpu"))}
