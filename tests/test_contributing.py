"""The house is as CONTRIBUTING.md describes it, and what it asks for is what runs when a change comes in."""

import ast
import re
import subprocess

from harness.start import checks

import yaml
from conftest import ROOT

HARNESS = ROOT / "recipes/harness"
LISTING = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
LISTED = dict(re.findall(r"^ *([\w.]+)/ +(.*)$", LISTING, re.MULTILINE))  # a folder and what is said of it


def test_the_listing_has_every_room_with_its_sentence():
    rooms = {path.parent.name: ast.get_docstring(ast.parse(path.read_text())) for path in HARNESS.rglob("__init__.py")}
    assert len(rooms) > 1
    assert {room: LISTED[room] for room in rooms} == {room: text.splitlines()[0] for room, text in rooms.items()}


def test_the_listing_has_every_folder_and_the_ground():
    folders = {path.parts[-2] for path in ROOT.glob("*/*") if path.is_file() and path.parent.name[0] != "."}
    assert folders - {"outputs"} <= LISTED.keys()
    assert set(re.findall(r"\w+\.py", LISTING)) == {path.name for path in HARNESS.glob("*.py")} - {"__init__.py"}


def test_the_workflow_runs_what_must_pass():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"].values()
    assert ".".join(map(str, checks.TESTED_PYTHON)) in job["container"]["image"]
    assert all(re.search(r"@v\d+$", step["uses"]) for step in job["steps"] if "uses" in step)
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    assert ".ci/run" in [script.split()[-1] for script in scripts] and "./launch.sh --test" in (ROOT / ".ci/run").read_text()
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)
