"""The workflows and the action of the repository: their shell steps are run here, or at least read by bash."""

import re
import shutil
import subprocess

import pytest
import yaml
from conftest import ROOT, slow
from local_hub import serve

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
ACTION = yaml.safe_load((ROOT / ".github/actions/rehearse/action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "name" in step}
JOBS = {f"{workflow}-{name}": job for workflow, content in WORKFLOWS.items() for name, job in content["jobs"].items()}


@pytest.mark.parametrize("steps", [ACTION["runs"]["steps"], *(job["steps"] for job in JOBS.values())], ids=["action", *JOBS])
def test_steps_are_pinned_and_valid_bash(steps):
    for step in steps:
        assert re.search(r"@v\d+$", step.get("uses", "@v1")) or step["uses"] == "./.github/actions/rehearse"
        subprocess.run(["bash", "-n", "-c", step.get("run", "")], check=True)


def test_workflow_runs_all_tests():
    job = JOBS["tests-tests"]
    assert "3.11" in job["container"]["image"]
    commands = [step["run"].split()[-1] for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands and "./launch.sh --test" in (ROOT / ".ci/run").read_text()


def test_workflow_uses_the_action():
    step = JOBS["tests-rehearse"]["steps"][-1]
    assert step["uses"] == "./.github/actions/rehearse" and step["with"].keys() <= ACTION["inputs"].keys()
    assert (ROOT / f"recipes/{step['with']['recipe']}.py").is_file()
    assert (ROOT / f"accelerate_configs/{step['with']['config']}.yaml").is_file()


@pytest.fixture
def run_step(environment, tmp_path):
    """Runs a step of the action as GitHub does. The recipe is a file elsewhere, with a space in its path."""
    recipe, temp = tmp_path / "my recipe.py", tmp_path / "temp"
    shutil.copy(ROOT / "recipes/qwen2_fineweb_edu.py", recipe)
    temp.mkdir()
    variables = {
        "GITHUB_ACTION_PATH": str(ROOT / ".github/actions/rehearse"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "RUNNER_TEMP": str(temp),
        "RECIPE": str(recipe),
        "CONFIG": "1x3090",
    }

    def call(name: str, **more: str) -> subprocess.CompletedProcess:
        assert STEPS[name]["env"].keys() == {"RECIPE", "CONFIG", "FLAGS"}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]]
        everything = environment | variables | more
        return subprocess.run(command, cwd=tmp_path, env=everything, capture_output=True, text=True, timeout=300)

    return call


@slow
def test_action_rehearses_kills_resumes_and_plans(run_step, tmp_path):
    process = run_step("Rehearse, kill, resume", FLAGS="--max_steps 12 --max_length 64 --eval_strategy no")
    assert process.returncode == 0 and not process.stderr, process.stdout + process.stderr
    with serve(ROOT / "tests/published") as hub:
        # The model of the rehearsal, which is simulated faster than the recipe's.
        flags = f"--model_name_or_path {tmp_path}/temp/rehearsal --max_length 64"
        process = run_step("Plan", FLAGS=flags, HF_ENDPOINT=hub.url)
    assert process.returncode == 0, process.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert re.search(r"## Rehearsal of .*my recipe\.py with 1x3090, killed and resumed\n+\| run ", summary), summary
    assert re.search(r"## Plan\n\n```\n(.*\n)*.*GPU memory", summary), summary


def test_action_shows_why_a_rehearsal_cannot_start(run_step):
    process = run_step("Rehearse, kill, resume", FLAGS="--max_steeps 12")
    assert process.returncode == 1 and "error: unknown flag --max_steeps" in process.stdout, process.stdout
