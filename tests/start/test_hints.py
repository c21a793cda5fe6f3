"""A flag of another program or an earlier version is answered with what does the same here."""

import re

from harness import instead
from harness.start import flags

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit
RECIPE = ROOT / "recipes/qwen2_chat.py"


@pytest.mark.parametrize("name", [*instead.INSTEAD, *instead.RENAMED])
def test_hint(error_of, name):
    """The flags that it names exist, and the variables are on a page."""
    message = error_of(flags.check_flags, RECIPE, [f"--{name}", "1"])
    hint = message.removeprefix(f"--{name}")
    assert message.startswith(f"--{name}") and "did you mean" not in hint
    assert set(re.findall(r"--(\w+)", hint)) <= flags.known_flags(RECIPE)
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert all(variable in pages for variable in re.findall(r"[A-Z]{3,}[A-Z_]+", hint))
