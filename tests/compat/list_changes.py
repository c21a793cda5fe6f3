"""Lists every change to a library with the attributes it needs, and checks them in the installed versions.

    PYTHONPATH=recipes .venv/bin/python tests/compat/list_changes.py

Exits with code 1 if an attribute is missing or has another signature.
"""

import importlib
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def load_all() -> list:
    """Imports every module that may have changes; returns these."""
    sys.path.insert(0, str(RECIPES))
    names = [
        f"{package}.{path.stem}"
        for package in ("harness.compat", "planner")
        for path in sorted((RECIPES / package.replace(".", "/")).glob("*.py"))
    ]
    modules = [importlib.import_module(name) for name in [*names, "harness.run.trainer"]]
    values = [value for module in modules for value in vars(module).values()]
    functions = [value for value in values if hasattr(value, "change") and not isinstance(value, type)]
    return list({(function.change.module, function.change.name): function.change for function in functions}.values())


def main() -> int:
    problems = []
    from harness.compat.guards import problem_of_target

    for change in load_all():
        print(f"\n{change.module}.{change.name}: {change.doc.splitlines()[0]}")
        for target in change.targets:
            problems.append(problem_of_target(target))
            print(f"  FAILED  {problems[-1]}" if problems[-1] else f"  ok      {target.partition('(')[0]}")
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
