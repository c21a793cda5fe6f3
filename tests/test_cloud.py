"""SkyPilot can read the task in cloud/; the commands of docs/ start recipes that exist, on the machines of their configs."""

import json
import re
import shlex
import subprocess
from typing import Any

from harness import configs

import pytest
from conftest import ROOT, slow
from known_flags import known_flags

pytestmark = slow  # installs SkyPilot

TASK = ROOT / "cloud/train.yaml"
DOCS = (ROOT / "docs/several-machines.md").read_text()
COMMANDS = [shlex.split(line) for line in DOCS.splitlines() if line.startswith("sky jobs launch")]
READ = """
import json, sys
import sky, yaml
from sky.client.cli import command

tasks = []
for given in json.loads(sys.argv[2]):
    task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), env_overrides=list(given.items()))
    (resources,) = task.resources
    tasks.append({
        "autostop": resources.autostop_config and resources.autostop_config.to_yaml_config(),
        "controller": sky.jobs.constants.CONTROLLER_AUTOSTOP, "has max_hourly_cost": hasattr(resources, "max_hourly_cost"),
        "run": task.run, "setup": task.setup, "envs": task.envs,
        "storage": {path: [store.name, store.mode.value] for path, store in task.storage_mounts.items()},
        "options": [name for option in command.jobs_launch.params for name in [*option.opts, *option.secondary_opts]],
    })
print(json.dumps(tasks))
"""


def options_of(command: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The flags of a command, and its --env."""
    flags, variables = {}, {}
    words = iter(command[4:])
    for word in words:
        if word == "--env":
            name, _, value = next(words).partition("=")
            variables[name] = value
        else:
            flags[word] = "" if word == "--no-use-spot" else next(words)
    return flags, variables


@pytest.fixture(scope="module")
def tasks(sky_python, tmp_path_factory) -> list[dict[str, Any]]:
    """The task of each command, and then the one with its defaults, as SkyPilot reads it."""
    variables = {"HOME": str(tmp_path_factory.mktemp("home")), "PATH": "/usr/bin:/bin"}
    given = [options_of(command)[1] for command in COMMANDS]
    given.append({"BUCKET": "some-bucket", "RECIPE": "qwen2_chat", "CONFIG": "1x3090"})
    process = subprocess.run(
        [sky_python, "-c", READ, TASK, json.dumps(given)], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def words_of_line(script: str, envs: dict[str, str]) -> list[str]:
    """The words of the only line of a shell script that starts launch.sh."""
    (line,) = [line for line in script.splitlines() if "./launch.sh" in line]
    return subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], env=envs, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_command_fits_its_config(number, tasks):
    flags, variables = options_of(COMMANDS[number])
    task = tasks[number]
    assert flags.keys() <= set(task["options"])
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    words = words_of_line(task["run"], {name: str(value) for name, value in task["envs"].items()})
    place = words.index("./launch.sh")
    recipe, config, *rest = words[place + 1 :]
    assert (ROOT / f"recipes/{recipe}.py").is_file()
    assert {word[2:] for word in rest if word.startswith("--")} <= known_flags()
    settings = configs.read(str(ROOT / f"accelerate_configs/{config}.yaml"))
    nodes, gpus = int(flags.get("--num-nodes", 1)), int(flags["--gpus"].partition(":")[2])
    assert (nodes, nodes * gpus) == (settings.num_machines, settings.num_processes)
    (mounted,) = task["storage"]
    assert rest[rest.index("--output_dir") + 1] == f"{mounted}/{recipe}"
    # With MOUNT_CACHED a node would see the files of other nodes late.
    assert task["storage"][mounted][0] == variables["BUCKET"] and (nodes == 1 or task["storage"][mounted][1] == "MOUNT")
    needed = re.search(r"(\d+) GB of host memory", (ROOT / f"recipes/{recipe}.py").read_text())
    assert not needed or int(flags["--memory"].rstrip("+")) > int(needed[1])
    assert words[: place - 1] == ["timeout", "--signal=TERM", "--kill-after=10m"]
    assert subprocess.run([*words[:place], "true"]).returncode == 0, "not options of timeout"


def test_task_ends_by_itself(tasks):
    """Runs and installations have a time limit, and idle machines are deleted after the times that docs/ has."""
    task = tasks[-1]
    assert task["envs"]["HOURS"] == "8" and "Default: 8" in DOCS
    assert task["storage"]["/checkpoints"] == ["some-bucket", "MOUNT"]
    setup = words_of_line(task["setup"], {})
    assert setup[1:3] == ["timeout", "30m"] and setup[-2:] == ["./launch.sh", "--install"]
    assert task["autostop"] == {"idle_minutes": 10, "down": True, "wait_for": "jobs"}
    assert task["controller"]["idle_minutes"] == 10 and task["has max_hourly_cost"]  # as in docs/
