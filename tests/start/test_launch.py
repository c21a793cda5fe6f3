"""launch.sh: names and paths of recipes and configs, and what arrives at the recipe."""

import argparse
import json
import shlex
import shutil

from harness.start import flags

import pytest
from conftest import CONFIGS, RECIPES, ROOT

RECIPE, CONFIG = "qwen2_fineweb_edu", "1x3090_offload"


def test_lists_every_recipe_and_config(launch):
    listing = launch().stdout
    assert RECIPES and CONFIGS
    for file in RECIPES + CONFIGS:
        first = file.read_text().split("\n")[0].strip('"# ')
        assert any(line.split() == [file.stem, *first.split()] for line in listing.splitlines())


def test_variables_of_other_launchers_are_ignored(launch, tmp_path):
    """A shell or a pod can have them. With RANK=2 no message would be printed, with WORLD_SIZE=4 the run would wait."""
    process = launch("--tiny", RECIPE, "1x3090", "--max_lenght", "5", cwd=tmp_path, RANK="2", LOCAL_RANK="2", WORLD_SIZE="4")
    assert process.returncode == 2 and "--max_lenght" in process.stderr.splitlines()[-1]


def test_help_shows_what_the_recipe_sets(launch):
    shown = launch(RECIPE, "--help").stdout
    for name in ("column_map", "max_samples", "text_rows", "profile", "max_restarts"):  # which TRL's pages do not have
        assert f"--{name}  " in shown
    assert "Continued pretraining of Qwen2-0.5B" in shown and "\n    --learning_rate 2e-05\n" in shown


@pytest.mark.parametrize("value", [2e-5, 3, True, "a b's", ["q_proj", "k proj"], {"min_lr": 1e-6}, None])
def test_flags_in_help_can_be_pasted(value):
    """They set what the recipe sets, lists too; `None` is a comment."""
    parser = argparse.ArgumentParser()
    kind = json.loads if isinstance(value, dict) else (lambda word: word == "True") if value is True else type(value)
    many = {"nargs": "+"} if isinstance(value, list) else {"type": kind}
    parser.add_argument("--name", **many)
    shown = flags.as_flag("name", value)
    assert parser.parse_args(shlex.split(shown, comments=True)).name == value


@pytest.fixture
def elsewhere(tmp_path):
    """A recipe that prints its arguments, and a config, in a folder whose name needs quoting."""
    folder = tmp_path / "a b'c;d $(touch owned)"
    folder.mkdir()
    (folder / "neighbour.py").write_text("NAME = 'neighbour'\n")
    recipe = folder / "my recipe.py"
    program = "subprocess.run([sys.executable, '-c', 'import datasets'], check=True)\n"
    lines = f"import json, subprocess, sys\nimport datasets, neighbour\n{program}print(json.dumps(sys.argv))\nsys.exit(0)\n"
    recipe.write_text(lines)
    config = folder / "my config.yaml"
    shutil.copy(ROOT / "accelerate_configs/1x3090.yaml", config)
    (tmp_path / "datasets.py").write_text("raise RuntimeError('a file in the working directory was imported')\n")
    return recipe, config


def test_paths_and_values_arrive_unchanged(launch, tmp_path, elsewhere):
    recipe, config = (path.relative_to(tmp_path) for path in elsewhere)
    values = ["--output_dir", "x y", "--run_name", 'it\'s "quoted"; $(touch owned) `touch owned` \\ *']
    process = launch("--tiny", recipe, config, *values, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [str(tmp_path / recipe), *values]
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "x:1"}, "x:1"), ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, None)],
)
def test_allocator_is_set_before_python_starts(launch, tmp_path, given, expected):
    """Importing PEFT starts CUDA, which reads the variable then."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import sys\nprint(open('/proc/self/environ').read())\nsys.exit(0)\n")
    process = launch("--tiny", recipe, CONFIG, **given)
    variables = dict(line.partition("=")[::2] for line in process.stdout.strip().split("\0"))
    assert variables.get("PYTORCH_ALLOC_CONF") == expected


def test_locale_and_optimization_of_the_shell_do_not_count(launch, tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "recipes/qwen2_chat.py").read_text())
    rows = tmp_path / "caf\u00e9.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "\u00fc {n}", "completion": "\u2603"}}' for n in range(9)), "utf-8")
    shell = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONOPTIMIZE": "2"}
    process = launch("--preview", "--tiny", "./mine.py", "--dataset_name", rows, cwd=tmp_path, **shell)
    assert process.returncode == 0 and "\u2603" in process.stdout, process
