"""Lists every change to a library with the attributes it needs, and checks them in the installed versions.

    PYTHONPATH=recipes .venv/bin/python tests/compat/list_changes.py

Exits with code 1 if an attribute is missing or has another signature.
"""

import importlib
import sys
from pathlib import Path

HARNESS = Path(__file__).resolve().parents[2] / "recipes/harness"


def load_all() -> list:
    """Imports every module with changes; returns them."""
    sys.path.insert(0, str(HARNESS.parent))
    for path in sorted((HARNESS / "compat").glob("*.py")):
        importlib.import_module(f"harness.compat.{path.stem}")
    importlib.import_module("harness.plan.fakes")
    return importlib.import_module("harness.compat.guards").CHANGES


def main() -> int:
    problems = 0
    for change in load_all():
        print(f"\n{change.module}.{change.name}: {change.doc.splitlines()[0]}")
        for target in change.targets:
            problem = target.problem()
            problems += bool(problem)
            print(f"  FAILED  {problem}" if problem else f"  ok      {target.module}:{target.attribute}")
    print(f"\n{len(load_all())} changes, {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
