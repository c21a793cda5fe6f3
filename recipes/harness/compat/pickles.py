"""Reads pickles with a list of what they may use."""

import pickle
from collections.abc import Callable
from pickle import _Unpickler as PythonUnpickler
from typing import Any, ClassVar


class Refused(Exception):
    """The name of what a file would call."""


class CheckedUnpickler(PythonUnpickler):
    """Unpickles what only uses allowed names, and runs no code.

    A pickle can also set attributes, such as the methods of an allowed class. Only the methods of Python's own unpickler can be
    overridden; the one in C does the same. Checked with: Python 3.11, 3.12 and 3.13.
    """

    dispatch: ClassVar = dict(PythonUnpickler.dispatch)

    def __init__(self, file: Any, is_allowed: Callable[[str, str], bool]) -> None:
        super().__init__(file)
        self.is_allowed = is_allowed  # (module, name) -> whether a pickle may use it

    def load_build(self) -> None:
        target = self.stack[-2]
        if not self.is_allowed(type(target).__module__, type(target).__name__):
            raise Refused(f"attributes of {target!r:.100}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if self.is_allowed(module, name):
            return super().find_class(module, name)
        raise Refused(f"{module}.{name}")
