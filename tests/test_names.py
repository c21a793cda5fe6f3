"""Every name of harness and planner that they, tests and benchmarks use exists."""

import ast
import importlib

import pytest
from conftest import ROOT

FOLDERS = ("recipes/harness", "recipes/planner", "tests", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def modules_of(tree: ast.AST) -> dict[str, str]:
    """The modules of harness and planner that a file imports, by the names that it gives them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("harness", "planner"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                path = ROOT / "recipes" / name.replace(".", "/")
                if path.is_dir() or path.with_suffix(".py").is_file():
                    found[alias.asname or alias.name] = name
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_attributes_of_modules_exist(path):
    tree = ast.parse(path.read_text("utf-8"))
    modules = modules_of(tree)
    local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules.keys() - local:
            module = importlib.import_module(modules[node.value.id])
            assert hasattr(module, node.attr), f"line {node.lineno}: {node.value.id}.{node.attr}"
