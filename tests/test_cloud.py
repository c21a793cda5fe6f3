"""The SkyPilot tasks are ones that SkyPilot reads, and start what is there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from harness import configs
from harness.start import flags

import pytest
from conftest import ROOT

SKYPILOT = "skypilot==0.14.1"
TASKS = sorted((ROOT / "cloud").glob("*.yaml"))
READ = """
import json, sys
import sky, yaml
given = {"env_overrides": [("BUCKET", "some-bucket")], "secrets_overrides": [("HF_TOKEN", "some-token")]}
task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), **given)
(resources,) = task.resources
print(json.dumps({
    "nodes": task.num_nodes, "accelerators": resources.accelerators, "spot": resources.use_spot, "memory": resources.memory,
    "run": task.run, "setup": task.setup, "storage": {path: [s.name, s.mode.value] for path, s in task.storage_mounts.items()},
}))
"""


@pytest.fixture(scope="session")
def sky_python(tmp_path_factory) -> Path:
    """SkyPilot in an environment of its own; its packages are not ours."""
    folder = tmp_path_factory.mktemp("sky")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", SKYPILOT], check=True)
    return folder / "bin/python"


def test_there_are_tasks():
    assert {task.stem for task in TASKS} == {"gpt2_xl_wikitext", "llama31_8b_lora"}


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_task_is_read_and_fits_its_config(sky_python, path, tmp_path):
    variables = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    process = subprocess.run([sky_python, "-c", READ, path], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    task = json.loads(process.stdout.splitlines()[-1])
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    (words,) = [shlex.split(line) for line in task["run"].replace("\\\n", " ").splitlines() if "./launch.sh" in line]
    recipe, config, *rest = words[words.index("./launch.sh") + 1 :]
    assert recipe == path.stem
    flags.check(ROOT / f"recipes/{recipe}.py", rest)
    settings = configs.read(str(ROOT / f"accelerate_configs/{config}.yaml"))
    (gpus,) = task["accelerators"].values()
    assert (task["nodes"], task["nodes"] * gpus) == (settings["num_machines"], settings["num_processes"])
    (mounted,) = task["storage"]
    assert rest[rest.index("--output_dir") + 1].startswith(f"{mounted}/") and task["storage"][mounted] == ["some-bucket", "MOUNT"]
    if recipe == "gpt2_xl_wikitext":
        assert task["spot"] and task["accelerators"] == {"T4": 1} and re.match(r"32", str(task["memory"]))
