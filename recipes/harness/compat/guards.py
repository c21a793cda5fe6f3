"""Checks a library before it is changed.

`python tests/compat/list_changes.py` lists all changes and checks the libraries."""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from harness.messages import UserError

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class Change:
    """A function of this package and what it changes or uses of a library."""

    name: str  # of the function
    module: str
    doc: str
    targets: tuple[str, ...]  # `module:Class.attribute`, or with the names of the parameters `module:function(a, b)`


def changes(*targets: str) -> Callable[[F], F]:
    """Declares what a function changes or uses of a library. Its first call raises UserError if the library is different."""

    def decorate(function: F) -> F:
        """The function with the check before its first call; its attribute `change` is for the listing and its test."""

        @functools.cache
        def check_library() -> None:
            if problem := next(filter(None, map(problem_of_target, targets)), ""):
                raise UserError(
                    f"{problem}, which {function.__name__} in {function.__module__.replace('.', '/')}.py needs: install the "
                    "versions of requirements.txt"
                )

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            check_library()
            return function(*args, **kwargs)

        guarded.change = Change(function.__name__, function.__module__, function.__doc__ or "", targets)
        return guarded

    return decorate


def problem_of_target(target: str) -> str:
    """What is different in the installed version, "" if nothing is."""
    path, _, parameters = target.partition("(")
    module, attribute = path.split(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        if not parameters or ", ".join(inspect.signature(found).parameters) == parameters[:-1]:
            return ""
        attribute += f"({parameters}"
    except (ImportError, AttributeError):
        pass
    return f"{_version(module.split('.')[0])} has no {module}.{attribute}"


@contextlib.contextmanager
def expected_names() -> Iterator[None]:
    """For imports of private names at the top of a module. Raises UserError if one is missing."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").split(".")[0]
        raise UserError(f"{_version(library)}: {error.msg}: install the versions of requirements.txt") from error


def _version(library: str) -> str:
    try:
        return f"{library} {importlib.metadata.version(library)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{library} (not installed)"
