"""Python files of the working directory do not run instead of the modules that launch.sh and the harness import."""

import pytest
from payloads import ran, write_modules

RECIPE, CONFIG = "qwen2_fineweb_edu", "1x3090"
COMMANDS = ["", "--help", "qwen2_finewebedu 1x3090", f"{RECIPE} 1x309", f"--tiny {RECIPE} {CONFIG} --max_stepps 3"]
COMMANDS += [
    "--report no_run",
    f"{RECIPE} --help",
    *(f"--{name} {RECIPE} --max_stepps" for name in ("preview", "prepare", "plan")),
]


@pytest.mark.unit
@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_the_working_directory_do_not_run(launch, tmp_path, command):
    """Also with an empty entry in PYTHONPATH, which is the working directory."""
    write_modules(tmp_path)
    process = launch(*command.split(), cwd=tmp_path, PYTHONPATH=f":{tmp_path / 'other'}::")
    assert process.returncode == (0 if command.endswith("--help") or not command else 2), process.stdout + process.stderr
    assert ran(tmp_path) == []
