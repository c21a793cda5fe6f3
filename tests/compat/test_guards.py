"""Every change to a library is declared and checked against the installed versions; only two packages and RunTrainer make any."""

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

from harness.compat import guards
from harness.compat.guards import Change
from harness.run import trainer

import list_changes
import pytest
from conftest import ROOT
from transformers import Trainer

HARNESS, PLANNER = ROOT / "recipes/harness", ROOT / "recipes/planner"
CHANGES = sorted(list_changes.load_all(), key=lambda change: (change.module, change.name))
COMPAT = [path for path in sorted((HARNESS / "compat").glob("*.py")) if path.stem not in ("__init__", "guards")]
OUTSIDE = [path for path in sorted(HARNESS.rglob("*.py")) if path.relative_to(HARNESS).parts[0] != "compat"]
DOCUMENTED = {"os._exit", "_replace"}  # public although they begin with an underscore; the second one of named tuples


def name_of(change: Change) -> str:
    return f"{change.module.removeprefix('harness.')}.{change.name}"


def relative(path: Path) -> str:
    return path.relative_to(HARNESS).as_posix()


@pytest.mark.parametrize("change", CHANGES, ids=name_of)
def test_change_is_intact_in_installed_versions(change):
    assert change.targets
    assert not [problem for problem in map(guards.problem_of_target, change.targets) if problem]


def decorated(path: Path) -> set[str]:
    """The functions of a file that have the decorator `changes`."""
    functions = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    return {
        function.name
        for function in functions
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "changes"
    }


def test_all_changes_are_listed():
    """Each public function of `compat` is one, and there are none outside of `compat` and the planner but RunTrainer's."""
    found = set()
    for path in (*HARNESS.rglob("*.py"), *PLANNER.rglob("*.py")):
        module = ".".join(path.relative_to(HARNESS.parent).with_suffix("").parts)
        found |= {(module, name) for name in decorated(path)}
        if path in COMPAT:
            functions = {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}
            assert {name for name in functions if not name.startswith("_")} == decorated(path)
    assert {(change.module, change.name) for change in CHANGES} == found
    elsewhere = {name for name in found if not name[0].startswith(("harness.compat.", "planner."))}
    assert elsewhere == {("harness.run.trainer", "add_overrides")}


def test_methods_of_the_trainer_are_declared():
    """All methods of transformers that RunTrainer replaces, and the private ones that it calls."""
    declared = {target.partition("(")[0] for target in trainer.add_overrides.change.targets}
    tree = ast.parse(Path(trainer.__file__).read_text("utf-8"))
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    replaced = {name for cls in (trainer.RunTrainer, trainer.TrainerPrecision) for name in vars(cls)}
    names = {name for name in called | replaced if callable(vars(Trainer).get(name)) and not name.endswith("__")}
    documented = {"compute_loss", "create_scheduler", "evaluation_loop", "prediction_step"}  # as to be overridden
    assert {f"transformers:Trainer.{name}" for name in names - documented} == declared


# What only `compat` and the planner may do: set an attribute of a library, and use a private name of one.


class LibraryUse(ast.NodeVisitor):
    """Finds what a file sets or deletes in a library, and the private names that it uses.

    The standard library counts for private names only: programs set `sys.argv`. Private names of any object count but `self`,
    `cls` and `super()`: it can be an object of a library.
    """

    def __init__(self, source: str) -> None:
        self.imported: dict[str, str] = {}  # name in this file: full name
        self.found: list[str] = []
        tree = ast.parse(source)
        for node in ast.walk(tree):  # first all imports: a function can use a name that is imported further down
            self.read_import(node)
        self.visit(tree)

    def read_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                full = alias.name if alias.asname else alias.name.split(".")[0]
                self.imported[alias.asname or full] = full
                self.check_private(node, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.check_private(node, f"{node.module}.{alias.name}")

    def full_name(self, node: ast.AST) -> str | None:
        """`torch.nn.Module` for what a name or an attribute of one refers to; None if it is not imported."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self.full_name(node.value)):
            return f"{owner}.{node.attr}"
        return None

    def check_private(self, node: ast.AST, name: str) -> None:
        is_private = any(re.match(r"_(?!_)", part) for part in name.split("."))
        if is_private and not name.startswith("harness.") and name not in DOCUMENTED:
            self.found.append(f"line {node.lineno} uses {name}")

    def check_set(self, node: ast.AST, name: str) -> None:
        library = name.split(".")[0]
        if library != "harness" and library not in sys.stdlib_module_names:
            self.found.append(f"line {node.lineno} sets {name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        source = self.full_name(node.value)
        for target in node.targets:
            if source and isinstance(target, ast.Name):
                self.imported[target.id] = source
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self.full_name(node):
            self.check_private(node, name)
            if not isinstance(node.ctx, ast.Load):
                self.check_set(node, name)
        elif ast.unparse(node.value) not in ("self", "cls", "super()"):
            self.check_private(node, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if getattr(node.func, "id", "") in ("setattr", "delattr") and (owner := self.full_name(node.args[0])):
            self.check_set(node, f"{owner}.{ast.unparse(node.args[1])}")
        self.generic_visit(node)


@pytest.mark.parametrize("path", OUTSIDE, ids=relative)
def test_no_other_file_changes_a_library(path):
    assert not LibraryUse(path.read_text("utf-8")).found


@pytest.mark.parametrize("target", ["trl.trainer.sft_trainor:pack_dataset", "transformers:Trainer.log(self, logs)"])
def test_library_of_another_version_is_an_error(error_of, target):
    """A module, a name or a parameter that it does not have: the message names it, and the function is not called."""
    calls = []

    def needs_it():
        calls.append(target)

    message = error_of(guards.changes(target)(needs_it))
    library = target.partition(":")[0].partition(".")[0]
    assert f"{importlib.metadata.version(library)} has no {target.replace(':', '.')}" in message and not calls
