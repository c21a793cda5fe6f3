"""Imports of the harness run downwards only, without circles. Recipes use its public names only; it does not know the planner."""

import ast
import functools
import re
from pathlib import Path

import harness

import pytest
from conftest import RECIPES, ROOT

pytestmark = pytest.mark.unit

HARNESS = ROOT / "recipes/harness"
# From the bottom to the top. A module may import from its own level and from those before it.
LEVELS = [
    ["signals", "launched", "messages", "instead", "restarts", "torchvision_operators"],
    ["compat", "batches", "exchange"],
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


def module_name(path: Path, package: Path) -> str:
    """The dotted name of a file, for example `harness.start.flags`."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level(name: str) -> int | None:
    """The place in LEVELS of a module, by the folder or the shared module that it is."""
    parts = name.split(".")
    part = parts[1] if len(parts) > 1 else parts[0]
    return next((number for number, parts in enumerate(LEVELS) if part in parts), None)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def imports(path: Path, package: Path):
    """Line and full dotted name of whatever a file imports from the package, wherever in it the statement stands."""
    here = module_name(path, package).split(".")
    base = here if path.name == "__init__.py" else here[:-1]
    for node in nodes_of(path):
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


def module_of(name: str, modules: dict[str, Path]) -> str | None:
    """The module that `name` is, or the one that defines it; None if there is neither."""
    if name in modules:
        return name
    parent, _, member = name.rpartition(".")
    nodes = nodes_of(modules[parent]) if parent in modules else []
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return parent if member in defined else None


def violations(package: Path) -> list[str]:
    """`file:line imports X, which …` for every import that is wrong."""
    modules = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    found, edges = [], {}
    for importer, path in modules.items():
        if level(importer) is None:
            found.append(f"{path.relative_to(package)}:1 is not in LEVELS")
            continue
        for line, name in imports(path, package):
            target = module_of(name, modules)
            where = f"{path.relative_to(package)}:{line} imports {target or name}, which"
            if target is None:
                found.append(f"{where} does not exist")
            elif (level(target) or 0) > level(importer):
                found.append(f"{where} is above it")
            else:
                edges.setdefault(importer, []).append((target, where))

    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        seen.add(start)
        return start == goal or any(reaches(t, goal, seen) for t, _ in edges.get(start, []) if t not in seen)

    circles = [where for name, targets in edges.items() for target, where in targets if reaches(target, name, set())]
    return found + [f"{where} imports it in turn" for where in circles]


def test_imports_run_downwards():
    assert not violations(HARNESS)


def test_the_harness_does_not_know_the_planner():
    """No module imports it, wherever the statement stands, and none names it."""
    words = [f"{path.name}: {line}" for path in HARNESS.rglob("*.py") for line in path.read_text("utf-8").splitlines()]
    assert not [line for line in words if re.search(r"\bplanner\b", line)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_uses_the_public_names(path):
    used = {name for _, name in imports(path, HARNESS)}
    assert {"harness.parse", "harness.train"} <= used <= {f"harness.{name}" for name in harness.__all__}
