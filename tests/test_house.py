"""The harness in rooms: imports run downwards only, no circles, short modules; a recipe takes two names from it."""

import ast
import re
from pathlib import Path

import pytest
from conftest import RECIPES, ROOT

HARNESS = ROOT / "recipes/harness"
LEVELS = {"ground": 0, "nodes": 1, "rehearsal": 1, "commands": 2, "start": 3, "run": 3, "plan": 4, "roof": 5}


def module(path: Path, package: Path) -> str:
    """The dotted name of a file: `harness.start.flags`; a folder's for its `__init__.py`."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(name: str, modules: dict[str, Path]) -> str:
    """The roof is the package itself, the ground what lies directly in it."""
    parts = name.split(".")
    if len(parts) == 2 and modules[name].name != "__init__.py":
        return "ground"
    return parts[1] if len(parts) > 1 else "roof"


def imports(path: Path, package: Path):
    """Line and full dotted name of whatever a file imports from the package, wherever in it the statement stands."""
    here = module(path, package).split(".")
    base = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = base[: len(base) - node.level + 1] if node.level else []
            source = [*start, *([node.module] if node.module else [])]
            names = [".".join([*source, alias.name]) for alias in node.names]
        for name in names:
            if name.split(".")[0] == package.name:
                yield node.lineno, name


def home(name: str, modules: dict[str, Path]) -> str | None:
    """The module that `name` is, or in which it is defined; None where there is neither."""
    if name in modules:
        return name
    parent, _, thing = name.rpartition(".")
    nodes = list(ast.walk(ast.parse(modules[parent].read_text("utf-8")))) if parent in modules else []
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return parent if thing in defined else None


def violations(package: Path) -> list[str]:
    """`file:line imports X, which …` for every import that does not run downwards."""
    modules = {module(path, package): path for path in sorted(package.rglob("*.py"))}
    found, within = [], {}  # within: imports that stay in their room
    for importer, path in modules.items():
        own = room(importer, modules)
        if own not in LEVELS:
            found.append(f"{path.relative_to(package)}:1 stands in a room without a level, {own}")
            continue
        for line, name in imports(path, package):
            target = home(name, modules)
            where = f"{path.relative_to(package)}:{line} imports {target or name}, which"
            other = room(target, modules) if target else None
            if target is None:
                found.append(f"{where} is not there")
            elif own == other != "roof":
                within.setdefault(importer, []).append((target, where))
            elif own != "roof" and LEVELS.get(other, 0) > LEVELS[own]:
                found.append(f"{where} stands above it")
            elif own != "roof" and LEVELS.get(other) == LEVELS[own]:
                found.append(f"{where} stands beside it")

    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        seen.add(start)
        return start == goal or any(reaches(t, goal, seen) for t, _ in within.get(start, []) if t not in seen)

    circles = [where for name, edges in within.items() for target, where in edges if reaches(target, name, set())]
    return found + [f"{where} imports it in turn" for where in circles]


def test_imports_run_downwards():
    assert not violations(HARNESS)


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("folder.py", "from harness.nodes import signals", "folder.py:1 imports harness.nodes.signals, which stands above it"),
        ("folder.py", "def f():\n    import harness.run.session", "folder.py:2 imports harness.run.session, which stands above"),
        ("nodes/board.py", "from harness import train", "nodes/board.py:1 imports harness, which stands above it"),
        (
            "nodes/board.py",
            "from harness.rehearsal.tiny import train",
            "board.py:1 imports harness.rehearsal.tiny, which stands beside",
        ),
        ("start/launch.py", "from harness.run.session import train", "imports harness.run.session, which stands beside it"),
        (
            "run/session.py",
            "import os\nif os:\n    import harness.start.launch as l",
            "session.py:3 imports harness.start.launch",
        ),
        ("rehearsal/tiny.py", "from ..commands import merge", "tiny.py:1 imports harness.commands.merge, which stands above it"),
        ("nodes/board.py", "from . import signals\nfrom .. import run", "board.py:2 imports harness.run, which stands above it"),
        ("nodes/signals.py", "from . import board", "signals.py:1 imports harness.nodes.board, which imports it in turn"),
        (
            "nodes/board.py",
            "def f():\n    from harness.nodes.board import train",
            "board.py:2 imports harness.nodes.board, which imports it",
        ),
        ("configs.py", "from harness.folder import train", "configs.py:1 imports harness.folder, which imports it in turn"),
        (
            "run/session.py",
            "from harness.nodes.borad import train",
            "session.py:1 imports harness.nodes.borad.train, which is not there",
        ),
        ("run/session.py", "from harness.nodes import borad", "session.py:1 imports harness.nodes.borad, which is not there"),
        (
            "run/session.py",
            "def f():\n    from harness.folder import tain",
            "session.py:2 imports harness.folder.tain, which is not",
        ),
        ("cellar/wine.py", "", "cellar/wine.py:1 stands in a room without a level, cellar"),
        ("nodes/board.py", "from harness import folder\nfrom harness.nodes.signals import train\nimport os, torch.run", None),
        (
            "run/session.py",
            "from harness.commands import merge\nfrom ..nodes import board\nfrom harness.folder import train",
            None,
        ),
        ("__init__.py", "from harness.nodes import signals\nfrom harness.run.session import train", None),
    ],
)
def test_an_import_that_runs_upwards_is_found(tmp_path, file, source, expected):
    """Of a small house in which two imports run as they should."""
    package = tmp_path / "harness"
    house = {"nodes/board.py": "from harness.nodes import signals", "folder.py": "from harness import configs", file: source}
    house = dict.fromkeys(("configs.py", "rehearsal/tiny.py", "commands/merge.py", "nodes/signals.py"), "") | house
    house = dict.fromkeys(("start/launch.py", "run/session.py", "__init__.py"), "") | house
    for name, text in house.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).with_name("__init__.py").touch()
        (package / name).write_text(f"{text}\n\n\ndef train():\n    pass\n")
    found = violations(package)
    assert any(expected in line for line in found) if expected else not found, found


@pytest.mark.parametrize("path", sorted(HARNESS.rglob("*.py")), ids=lambda path: module(path, HARNESS))
def test_a_module_is_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= 200


@pytest.mark.parametrize("name", sorted(LEVELS.keys() - {"ground", "roof"}))
def test_a_room_says_in_one_sentence_when_its_lines_run(name):
    assert re.fullmatch(r'"""[A-Z]([^.!?\n]|[.!?](?! ))*\."""\n', (HARNESS / name / "__init__.py").read_text("utf-8"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_two_names(path):
    taken = {name for _, name in imports(path, HARNESS)}
    assert taken == {"harness.parse", "harness.train"}
