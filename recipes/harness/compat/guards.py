"""Checks a library before it is changed, and the one private name of Python itself.

`python tests/compat/list_changes.py` lists all changes and checks the libraries."""

import atexit
import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from harness.messages import UserError

P, R = ParamSpec("P"), TypeVar("R")


@dataclass(frozen=True)
class Target:
    """An attribute of a library: `module:Class.attribute`, for a function with the names of its parameters, `module:f(a, b)`."""

    module: str
    attribute: str
    parameters: tuple[str, ...] | None  # None: not a function, or any signature will do

    @classmethod
    def read(cls, text: str) -> "Target":
        module, attribute, parameters = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.*)\))?", text).groups()
        names = None if parameters is None else tuple(name.strip() for name in parameters.split(",") if name.strip())
        return cls(module, attribute, names)

    def problem(self) -> str:
        """What is different in the installed version, "" if nothing is."""
        library = self.module.split(".")[0]
        try:
            found = functools.reduce(getattr, self.attribute.split("."), importlib.import_module(self.module))
        except (ImportError, AttributeError):
            return f"{_version(library)} has no {self.module}.{self.attribute}"
        if self.parameters is None:
            return ""
        names = tuple(inspect.signature(found).parameters)
        if names != self.parameters:
            different = f"{self.module}.{self.attribute}({', '.join(names)})"
            return f"{_version(library)} has {different}, expected ({', '.join(self.parameters)})"
        if getattr(found, "__module__", library).split(".")[0] not in (library, "harness"):
            return f"{_version(library)} has no {self.module}.{self.attribute} of its own"  # it is inherited from another library
        return ""


@contextlib.contextmanager
def expected_names() -> Iterator[None]:
    """For imports of private names at the top of a module. Raises UserError if one is missing."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").split(".")[0]
        raise UserError(f"{_version(library)}: {error.msg}: install the versions of requirements.txt") from error


def _version(library: str) -> str:
    if library in sys.stdlib_module_names:
        return f"Python {sys.version.split()[0]}"
    try:
        return f"{library} {importlib.metadata.version(library)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{library} (not installed)"


@dataclass(frozen=True)
class Change:
    """A function of this package and what it changes or uses of a library."""

    name: str  # of the function
    module: str
    doc: str
    targets: tuple[Target, ...]

    def problem(self) -> str:
        return next((problem for target in self.targets if (problem := target.problem())), "")


def changes(*targets: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declares what a function changes or uses of a library. The first call checks it and raises UserError if it is different."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """The function with the check before its first call; its attribute `change` is for the listing and its test."""
        change = Change(function.__name__, function.__module__, function.__doc__ or "", tuple(map(Target.read, targets)))
        checked = False

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal checked
            if not checked:
                if problem := change.problem():
                    raise UserError(
                        f"{problem}, which {change.name} in {change.module.replace('.', '/')}.py needs: "
                        "install the versions of requirements.txt"
                    )
                checked = True
            return function(*args, **kwargs)

        guarded.change = change
        return guarded

    return decorate


@changes("atexit:_run_exitfuncs")
def run_exit_handlers() -> None:
    """Runs what was registered with `atexit`.

    multiprocessing ends its processes with `os._exit`, which leaves these functions out. Trackers such as wandb finish a run
    in them.
    Upstream: python/cpython#83856, fixed in Python 3.13.
    Checked with: Python 3.11, 3.12 and 3.13.
    Remove when: Python 3.13 is the oldest supported version.
    """
    atexit._run_exitfuncs()
