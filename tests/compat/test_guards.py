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


def uses_of_libraries(source: str) -> list[str]:
    """What only `compat` and the planner may do: what a file sets or deletes in a library, and the private names that it uses.

    The standard library counts for private names only: programs set `sys.argv`. Private names of any object count but `self`,
    `cls` and `super()`: it can be an object of a library.
    """
    nodes = list(ast.walk(ast.parse(source)))
    imported, used, changed = {}, [], []

    def full_name(node: ast.AST) -> str:
        """`torch.nn.Module` for what a name or an attribute of one refers to; "" if it is not imported."""
        first, dot, rest = ast.unparse(node).partition(".")
        return f"{imported[first]}{dot}{rest}" if first in imported and re.fullmatch(r"[\w.]*", rest) else ""

    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            used += [module + alias.name for alias in node.names]
            for alias in node.names:
                name = alias.name if alias.asname or module else alias.name.split(".")[0]
                imported[alias.asname or name] = module + name
    for node in nodes:
        if isinstance(node, ast.Attribute):
            full = full_name(node)
            used += [full or node.attr] * (ast.unparse(node.value) not in ("self", "cls", "super()"))
            changed += [full] * (not isinstance(node.ctx, ast.Load))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            changed.append(full_name(node.args[0]))
    private = [name for name in used if re.search(r"(^|\.)_(?!_)", name) and name not in DOCUMENTED]
    found = [name for name in private if not name.startswith("harness.")]
    return found + [name for name in changed if name and name.split(".")[0] not in {"harness", *sys.stdlib_module_names}]


@pytest.mark.parametrize("path", OUTSIDE, ids=relative)
def test_no_other_file_changes_a_library(path):
    assert not uses_of_libraries(path.read_text("utf-8"))


@pytest.mark.parametrize("target", ["trl.trainer.sft_trainor:pack_dataset", "transformers:Trainer.log(self, logs)"])
def test_library_of_another_version_is_an_error(error_of, target):
    """A module, a name or a parameter that it does not have: the message names it, and the function is not called."""
    calls = []

    def needs_it():
        calls.append(target)

    message = error_of(guards.changes(target)(needs_it))
    library = target.partition(":")[0].partition(".")[0]
    assert f"{importlib.metadata.version(library)} has no {target.replace(':', '.')}" in message and not calls
