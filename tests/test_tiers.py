"""The mark `unit` keeps its promise: a test that imports torch fails, whichever way it does."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.unit

TESTS = """
import importlib, subprocess, sys
import pytest

@pytest.mark.unit
def test_import():
    importlib.import_module("torch")

@pytest.mark.unit
def test_import_in_a_process():
    subprocess.run([sys.executable, "-c", "import torch"], check=True)

@pytest.mark.unit
def test_launch(launch, tmp_path):
    process = launch("--merge", tmp_path / "run")
    assert process.returncode == 2
    process = launch("--preview", "--tiny", "qwen2_chat", "--output_dir", tmp_path / "run")
    assert process.returncode == 0

@pytest.mark.unit
def test_right():
    assert importlib.util.find_spec("torch")
"""


def test_import_of_torch_fails(request):
    file = ROOT / f"tests/test_of_tiers_{os.getpid()}.py"
    file.write_text(TESTS)
    request.addfinalizer(file.unlink)
    command = [sys.executable, "-m", "pytest", file, "-m", "unit", "-q", "-p", "no:cacheprovider"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "3 failed, 1 passed" in process.stdout, process.stdout + process.stderr


def test_fixtures_that_import_torch_are_refused(request):
    file = ROOT / f"tests/test_of_tiers_{os.getpid()}.py"
    file.write_text("import pytest\n\n@pytest.mark.unit\ndef test_run(rehearse):\n    pass\n")
    request.addfinalizer(file.unlink)
    process = subprocess.run([sys.executable, "-m", "pytest", file, "-q"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode and "has the mark `unit`, and a fixture that imports torch" in process.stdout + process.stderr
