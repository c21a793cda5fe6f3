"""What README, CONTRIBUTING and docs/ say is so: what they call can be called, what they name is there."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from harness import configs
from harness.launched import Checked
from harness.start import flags

import pytest
from conftest import CONFIGS, RECIPES, ROOT, readme_pairs

PAGES = {path: path.read_text() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))}
EVERYTHING = "\n".join(PAGES.values())
COMMANDS = list(
    {
        line: shlex.split(line.removesuffix(" &"), comments=True)
        for block in re.findall(r"```bash\n(.*?)```", EVERYTHING, re.DOTALL)
        for line in block.splitlines()
        if line.strip() and not line.startswith("#")
    }.values()
)
FOLDERS = ("accelerate_configs", "benchmarks", "cloud", "docs", "recipes", "tests")
# Where other words come from that the pages use.
LIBRARIES = {
    "accelerate": ["commands/launch.py", "utils/dataclasses.py"],
    "peft": ["auto.py"],
    "transformers": ["trainer_pt_utils.py", "integrations/integration_utils.py"],
}
OTHERS = {"apt", "logdir", "max_hourly_cost", "SBATCH_ACCOUNT", "TRACKIO_DIR", "WANDB_API_KEY", "WANDB_MODE"}  # of others


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
        assert (Path(sys.executable).parent / Path(program).name).exists() or Path(program).name == "lm_eval"
    elif program == ".ci/run":
        assert os.access(ROOT / program, os.X_OK)
    else:
        assert program == "./launch.sh"
        assert command[1:2] == ["--test"] or len(command) > 2
        if command[1:3] == ["--test", "-k"]:
            assert _selected(command[3]), "no test has these words"


def _selected(expression: str) -> list[str]:
    """The tests that `pytest -k` with words joined by "and" selects."""
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    tests = [f"{name} {test}" for name, text in files.items() for test in re.findall(r"^def (test_\w+)", text, re.MULTILINE)]
    return [test for test in tests if all(word in test for word in expression.split(" and "))]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--help" in c], ids=shlex.join)
def test_help_helps(command):
    process = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert process.returncode == 0 and "--" in process.stdout, process.stderr


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
    path = resolved("recipes", "py", recipe)
    if recipe not in names:  # the reader's own
        path = tmp_path / f"{recipe}.py"
        shutil.copy(resolved("recipes", "py", "qwen2_fineweb_edu"), path)
    if "my-org/my-llama" in rest:  # stands for a model of the reader's
        rest[rest.index("my-org/my-llama")] = "Qwen/Qwen2-0.5B"
    if "--dataset_name" in rest:  # and this for data of the reader's
        rest[rest.index("--dataset_name") + 1] = "my.jsonl"
        row = {"text": "a", "prompt": "a", "completion": "b"}
        Path("my.jsonl").write_text(json.dumps(row) * 20)
    if "--output_dir" in rest:  # may be a folder of a machine that is not this one
        rest[rest.index("--output_dir") + 1] = "a run"
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
    for line in EVERYTHING.splitlines():
        if line.startswith("| `"):
            for cell in line.split("|")[6:8]:
                assert "forecast" in cell or re.search(r"20\d\d-\d\d-\d\d", cell) or "out of memory" in cell, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists() and there.is_relative_to(ROOT), target
            assert not heading or heading in _anchors(there), target


def _anchors(page: Path) -> list[str]:
    """The headings of a page as GitHub writes them behind a #."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_is_one_sitting_and_leads_to_every_page():
    readme = PAGES[ROOT / "README.md"]
    assert len(readme.splitlines()) <= 220
    assert all(f"({page.relative_to(ROOT)})" in readme for page in PAGES if page.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_and_configs_are_there(page):
    text = PAGES[page] + "".join((page.parent / svg).read_text() for svg in re.findall(r"\(([\w-]+\.svg)\)", PAGES[page]))
    assert set(re.findall(r"\b\d+(?:x[a-z\d]|gpu)\w+", text)) <= {config.stem for config in CONFIGS}
    assert set(re.findall(r"\b(?:gpt2|llama31|qwen2)_\w+", text)) <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_stands_in_code_marks_is_there(page):
    """Paths exist, flags are flags, any other word is one of the files that run or of a command above."""
    own = "\n".join(path.read_text() for path in _files()) + " ".join(map(shlex.join, COMMANDS))
    known = flags.known(RECIPES[0]) | set(re.findall(r"--[\w-]+", own)) | set(re.findall(r"\w+", own)) | OTHERS
    known |= {path.stem for path in _files()}
    for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)):
        for word in span.split():
            if word.startswith("--"):
                name = word.split("=")[0]
                assert name in known or name[2:] in known, f"{name} is no flag: {span}"
            elif word.split("/")[0] in FOLDERS:
                assert (ROOT / word).exists(), word
            else:
                assert set(re.findall(r"\b[A-Za-z]\w*", word)) <= known, f"{word} is nowhere: {span}"


def _files() -> list[Path]:
    """All that runs, but tests, and the libraries' files that are spoken of."""
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    theirs = [
        Path(importlib.util.find_spec(package).origin).parent / name for package in LIBRARIES for name in LIBRARIES[package]
    ]
    own = [path for path in below if "tests" not in path.relative_to(ROOT).parts]
    return [*own, *theirs, *(ROOT / name for name in ("launch.sh", ".ci/run", "requirements.txt", ".gitignore"))]


def test_the_tables_are_what_the_arithmetic_says():
    paper = runpy.run_path(str(ROOT / "benchmarks/paper.py"))
    for table in (paper["memory"], paper["strategies"], paper["speed_up"], paper["largest"]):
        assert paper["markdown"](table()) in EVERYTHING
    total = {row[0]: row[1:] for row in paper["memory"]()}
    assert total["total"][:2] == ["140.0 GB", "70.0 GB"]  # as in the source
    named = set(re.findall(r"`(\w+)`", "".join(row[-1] for row in paper["strategies"]())))
    assert named == {config.stem for config in CONFIGS if config.stem.startswith(("2x4", "3x", "4gpu"))}
    drawn = (ROOT / "docs/what-each-gpu-keeps.svg").read_text()
    sums = zip(re.findall(r">(\w*gpu\w*)<", drawn), re.findall(r">([\d.]+ GB) on each GPU<", drawn), strict=True)
    for config, gigabytes in sums:
        assert gigabytes == next(row[4] for row in paper["strategies"]() if f"`{config}`" in row[-1]), config
