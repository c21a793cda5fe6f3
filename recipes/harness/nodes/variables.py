"""Whole numbers from environment variables."""

import os
import re

from harness.messages import UserError


def integer_from_environment(variable: str, default: int | None = None, least: int = 1) -> int:
    """A whole number from the environment; the default is not checked."""
    value = os.environ.get(variable)
    if value is None and default is not None:
        return default
    if not re.fullmatch(r"\d{1,9}", value or "") or int(value) < least:
        raise UserError(f"{variable} is {value!r}, expected a whole number, {least} or more")
    return int(value)


def seconds_to_wait() -> int:
    """How long the nodes wait for one that starts late."""
    return integer_from_environment("NODE_WAIT", 600)
