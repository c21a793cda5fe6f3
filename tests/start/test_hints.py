"""A flag of another program is answered with what does the same here."""

import re

from harness import instead
from harness.start.flags import check_names

import pytest
from conftest import ROOT
from known_flags import known_flags

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", [*instead.INSTEAD, *instead.RENAMED])
def test_hint(error_of, name):
    """The flags that it names exist, and the variables are on a page."""
    message = error_of(check_names, [f"--{name}", "1"], known_flags())
    hint = message.removeprefix(f"--{name}")
    assert message.startswith(f"--{name}") and "did you mean" not in hint
    assert set(re.findall(r"--(\w+)", hint)) <= known_flags()
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert all(variable in pages for variable in re.findall(r"[A-Z]{3,}[A-Z_]+", hint))
