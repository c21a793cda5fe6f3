"""SkyPilot can read the tasks in cloud/; they start recipes that exist, and end by themselves."""

import json
import re
import shlex
import subprocess

from harness import configs
from harness.start.flags import check_names

import pytest
from conftest import ROOT
from known_flags import known_flags

TASKS = sorted((ROOT / "cloud").glob("*.yaml"))
DOCS = (ROOT / "docs/several-machines.md").read_text()
READ = """
import json, sys
import sky, yaml
given = {"env_overrides": [("BUCKET", "some-bucket")], "secrets_overrides": [("HF_TOKEN", "some-token")]}
tasks = {}
for path in sys.argv[1:]:
    task = sky.Task.from_yaml_config(yaml.safe_load(open(path)), **given)
    (resources,) = task.resources
    tasks[path] = {
        "autostop": resources.autostop_config and resources.autostop_config.to_yaml_config(),
        "controller": sky.jobs.constants.CONTROLLER_AUTOSTOP, "has max_hourly_cost": hasattr(resources, "max_hourly_cost"),
        "nodes": task.num_nodes, "accelerators": resources.accelerators, "spot": resources.use_spot, "memory": resources.memory,
        "disk": resources.disk_size, "run": task.run, "setup": task.setup,
        "storage": {path: [store.name, store.mode.value] for path, store in task.storage_mounts.items()},
    }
print(json.dumps(tasks))
"""


@pytest.fixture(scope="module")
def tasks(sky_python, tmp_path_factory) -> dict[str, dict]:
    """Path to task, as SkyPilot reads it."""
    variables = {"HOME": str(tmp_path_factory.mktemp("home")), "PATH": "/usr/bin:/bin"}
    process = subprocess.run([sky_python, "-c", READ, *TASKS], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def line_with(script: str, word: str) -> list[str]:
    """The words of the only line of a shell script that has `word` in it."""
    (words,) = [shlex.split(line) for line in script.replace("\\\n", " ").splitlines() if word in line]
    return words


def recipe_text(recipe: str) -> str:
    return (ROOT / f"recipes/{recipe}.py").read_text()


def test_there_are_tasks():
    assert {task.stem for task in TASKS} == {
        "gpt2_xl_wikitext",
        "llama31_8b_lora",
        "llama31_70b_qlora",
        "llama31_70b_qlora_one_gpu",
    }


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_task_is_read_and_fits_its_config(tasks, path):
    task = tasks[str(path)]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    words = line_with(task["run"], "./launch.sh")
    recipe, config, *rest = words[words.index("./launch.sh") + 1 :]
    assert recipe == path.stem.removesuffix("_one_gpu")
    check_names(rest, known_flags())
    settings = configs.read(str(ROOT / f"accelerate_configs/{config}.yaml"))
    (gpus,) = task["accelerators"].values()
    assert (task["nodes"], task["nodes"] * gpus) == (settings.num_machines, settings.num_processes)
    (mounted,) = task["storage"]
    assert rest[rest.index("--output_dir") + 1].startswith(f"{mounted}/")
    # With MOUNT_CACHED a node would see the files of other nodes late.
    assert task["storage"][mounted] == ["some-bucket", "MOUNT_CACHED" if task["nodes"] == 1 else "MOUNT"]
    if recipe == "gpt2_xl_wikitext":
        assert task["spot"] and task["accelerators"] == {"T4": 1} and re.match(r"32", str(task["memory"]))
    if recipe == "llama31_70b_qlora":  # as much host memory and disk as its recipe says, and more
        sizes = re.findall(r"(\d+) GB of host memory and (\d+) GB of disk", path.read_text())
        assert re.search(rf"{sizes[0][0]} GB of host memory", recipe_text(recipe))
        host, disk = map(int, sizes[0])
        assert task["spot"] and float(task["memory"].rstrip("+")) > host and task["disk"] > disk + 50


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_task_ends_by_itself(tasks, path):
    """Runs and installations have a time limit, and idle machines are deleted, runs after the times that docs/ has."""
    task = tasks[str(path)]
    words = line_with(task["run"], "./launch.sh")
    run = words[words.index("timeout") : words.index("./launch.sh")]
    assert {"--signal=TERM", "--kill-after=10m"} < set(run)
    setup = line_with(task["setup"], "./launch.sh")
    setup = setup[setup.index("timeout") :]
    assert setup[-2:] == ["./launch.sh", "--install"]
    for limit in (run, setup[:2]):
        assert subprocess.run([*limit, "true"]).returncode == 0, "not options of timeout"
    assert re.search(rf"^\| .* \| `{path.name}` \| .* \| {run[-1].removesuffix('h')} hours \|$", DOCS, re.MULTILINE)
    assert task["autostop"] == {"idle_minutes": 10, "down": True, "wait_for": "jobs"}
    assert task["controller"]["idle_minutes"] == 10 and task["has max_hourly_cost"]  # as in docs/
