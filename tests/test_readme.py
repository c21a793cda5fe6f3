"""What the pages of the project say exists: commands, flags, files, links, configs, the numbers of tables."""

import functools
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from harness import configs, instead
from harness.start import launch

import pytest
from conftest import ALL_CONFIGS, ALL_RECIPES, CONFIGS, RECIPES, ROOT, TABLE, TABLE_PAIRS
from known_flags import known_flags
from runs import check_run

OWN_PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md")
PAGES = {path: path.read_text() for path in OWN_PAGES}
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
FLAGS_OF_OTHERS = {"logdir", "max-lora-rank", "jobid", "overlap"}  # of tensorboard, vLLM and srun


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_whole(path):
    """An empty line in a table would end it: the lines after it would be printed with their bars."""
    for table in re.findall(r"(?:^\|.*\n)+", without_code(PAGES[path]), re.MULTILINE):
        lines = table.splitlines()
        assert len(lines) > 2 and re.fullmatch(r"[|\-: ]+", lines[1]), table
        assert len({len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for line in lines}) == 1, table


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_command_exists(command):
    while "=" in command[0]:  # variables before the program
        command = command[1:]
    program = command[0]
    if program == "sky":
        assert command[1] == "jobs" and (command[2] in ("queue", "logs") or (ROOT / command[3]).is_file())
    elif program == "aws":
        assert command[1:3] in (["s3", "mb"], ["s3", "sync"])
    elif program == "sbatch":
        assert "launch.sh" in command
    elif program == "cp":
        assert (ROOT / command[1]).is_file() and (ROOT / command[2]).parent.is_dir()
    elif program.startswith(".venv/bin/"):
        assert (Path(sys.executable).parent / Path(program).name).exists() or Path(program).name == "lm_eval"
        files = [word for word in command[1:] if word.split("/")[0] in FOLDERS and not Path(word).name.startswith("mine")]
        assert all((ROOT / word).exists() for word in files)
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
def test_help_lists_flags(command):
    process = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert process.returncode == 0 and "--" in process.stdout, process.stderr


LAUNCHER = re.compile(r"(\./)?launch\.sh")
STARTS = [[number for number, word in enumerate(command) if LAUNCHER.fullmatch(word)] for command in COMMANDS]
CALLS = [
    [word for word in command[start[0] + 1 :] if word not in ("--tiny", "--debug")]
    for command, start in zip(COMMANDS, STARTS, strict=True)
    if start
]
TRAINING = [call for call in CALLS if not any(word.startswith("-") for word in call[:2])]


@pytest.mark.parametrize("command", TRAINING, ids=shlex.join)
def test_training_command_passes_its_checks(command, tmp_path, monkeypatch):
    """As the launcher checks it, with the tiny model and dataset."""
    monkeypatch.chdir(tmp_path)
    recipe, config, *rest = command
    path = ROOT / f"recipes/{recipe}.py"
    if path not in RECIPES:  # the reader's own
        path = tmp_path / f"{recipe}.py"
        shutil.copy(ROOT / "recipes/qwen2_fineweb_edu.py", path)
    if "my-org/my-llama" in rest:  # a model of the reader's
        rest[rest.index("my-org/my-llama")] = "Qwen/Qwen2-0.5B"
    if "--dataset_name" in rest:  # data of the reader's
        first = rest.index("--dataset_name") + 1
        for number in itertools.takewhile(lambda number: not rest[number].startswith("--"), range(first, len(rest))):
            rest[number] = f"my{number}.jsonl"
            row = {"text": "a", "prompt": "a", "completion": "b"}
            Path(rest[number]).write_text(json.dumps(row) * 20)
    if "--output_dir" in rest:  # may be a folder of another machine
        rest[rest.index("--output_dir") + 1] = "a run"
    _, rest = launch.take_max_restarts(rest)
    config = configs.read(str(ROOT / f"accelerate_configs/{config}.yaml"))
    monkeypatch.setattr(sys, "argv", [str(path), *rest])
    assert check_run(path, config, config.num_processes, tiny=True)


def test_recipe_of_readme_passes_its_checks(tmp_path, monkeypatch):
    (text,) = re.findall(r"```python\n(.*?)```", PAGES[ROOT / "README.md"], re.DOTALL)
    recipe = tmp_path / "mine.py"
    recipe.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(recipe)])
    assert check_run(recipe, configs.read(str(ROOT / "accelerate_configs/1x3090.yaml")), 1, tiny=True)


def test_table_of_recipes_agrees_with_configs():
    assert RECIPES and CONFIGS
    assert {recipe for recipe, *_ in TABLE_PAIRS} <= {recipe.stem for recipe in ALL_RECIPES}
    assert {config for _, config, *_ in TABLE_PAIRS} <= {config.stem for config in ALL_CONFIGS}
    for _, config, processes, is_sharded in TABLE_PAIRS:
        settings = configs.read(str(ROOT / f"accelerate_configs/{config}.yaml"))
        assert (settings.num_processes, settings.is_fsdp) == (processes, is_sharded)


def test_readme_has_every_recipe_once():
    named = re.findall(r"^\|[^|`]+\|[^|`]+\| `(\w+)` \|", PAGES[ROOT / "README.md"], re.MULTILINE)
    assert sorted(named) == sorted({recipe for recipe, *_ in TABLE_PAIRS})


def test_numbers_are_forecasts_or_have_a_date():
    lines = TABLE.splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(TABLE_PAIRS)
    titles = lines[lines.index(rows[0]) - 2].split("|")[6:8]
    assert all("forecast" in title for title in titles)
    for row in rows:
        for cell in row.split("|")[6:8]:
            assert re.fullmatch(r" [\d.,–]+( GB)?( on \w+s)? ", cell) or re.search(r"\(.*, 20\d\d-\d\d-\d\d\)", cell), row


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
    headings = re.findall(r"^#+ (.*)", without_code(PAGES[page]), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_readme_links_every_page():
    readme = PAGES[ROOT / "README.md"]
    assert all(f"({page.relative_to(ROOT)})" in readme for page in PAGES if page.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_and_configs_exist(page):
    text = PAGES[page] + "".join((page.parent / svg).read_text() for svg in re.findall(r"\(([\w-]+\.svg)\)", PAGES[page]))
    named = set(re.findall(r"\b\d+(?:x[a-z\d]|gpu)\w+", text))
    assert {name for name in named if not re.fullmatch(r"\dx[34]090|\dx\dx\w+", name)} <= {config.stem for config in CONFIGS}
    assert set(re.findall(r"\b(?:gpt2|llama31|qwen2)_\w+", text)) <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_exist(page):
    """Those that stand between backticks; a flag is one of a recipe, of a file of the project, or one that is answered."""
    known = (
        {name.removeprefix("--") for name in instead.INSTEAD}
        | known_flags()
        | {flag[2:] for flag in re.findall(r"--[\w-]+", _sources())}
        | FLAGS_OF_OTHERS
    )
    for word in " ".join(re.findall(r"`([^`]+)`", without_code(PAGES[page]))).split():
        if word.startswith("--"):
            assert word[2:].split("=")[0].rstrip(",") in known, f"{word} is not a flag"
        elif word.split("/")[0] in FOLDERS:
            assert list(ROOT.glob(word)) or "mine" in word, word


@functools.cache
def _sources() -> str:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    return "\n".join(path.read_text() for path in [*files, ROOT / "launch.sh"])


def test_tables_are_those_of_the_arithmetic():
    paper = runpy.run_path(str(ROOT / "benchmarks/paper.py"))
    for table in (paper["memory"], paper["strategies"], paper["zero"], paper["largest"]):
        assert paper["markdown"](table()) in EVERYTHING
    total = {row[0]: row[1:] for row in paper["memory"]()}
    assert total["total"][:2] == ["140.0 GB", "70.0 GB"]  # as CINECA's slides have it
    named = set(re.findall(r"`(\w+)`", "".join(row[-1] for row in paper["strategies"]())))
    assert named == {config.stem for config in CONFIGS if config.stem.startswith(("2x4", "3x", "4gpu"))}
    drawn = (ROOT / "docs/what-each-gpu-keeps.svg").read_text()
    sums = zip(re.findall(r">(\w*gpu\w*)<", drawn), re.findall(r">([\d.]+ GB) on each GPU<", drawn), strict=True)
    for config, gigabytes in sums:
        assert gigabytes == next(row[4] for row in paper["strategies"]() if f"`{config}`" in row[-1]), config
