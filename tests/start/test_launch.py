"""launch.sh: names and paths of recipes and configs, and what arrives at the recipe."""

import json
import runpy
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import NoReturn

import harness
from harness import launched
from harness.runs import RecipeStopped, Run
from harness.start import arguments, flags

import pytest
from conftest import CONFIGS, RECIPES, ROOT

RECIPE, CONFIG = "qwen2_fineweb_edu", "1x3090_offload"


def test_lists_every_recipe_and_config(launch):
    start = time.monotonic()
    listing = launch().stdout
    assert time.monotonic() - start < 0.3 * 5  # 0.01 s on an idle machine, more during tests
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


@pytest.fixture
def pasted(monkeypatch):
    """The arguments of a recipe, and its arguments when all flags that its help shows are passed."""

    def call(recipe: Path) -> list[list[dict]]:
        called = []

        def record(config_class: type, dataset_formats: object = (), **defaults: object) -> NoReturn:
            called.append((config_class, defaults))
            raise RecipeStopped

        monkeypatch.setattr(harness, "parse", record)
        with pytest.raises(RecipeStopped):
            runpy.run_path(str(recipe), run_name="__main__")
        shown = [line for line in flags.help_text(recipe, called[0][0], called[0][1]).splitlines() if line.startswith("    --")]
        assert {line.split()[0] for line in shown} >= {f"--{name}" for name in called[0][1] if called[0][1][name] is not None}
        read = []
        for words in ([], shlex.split("\n".join(shown), comments=True)):
            monkeypatch.setattr(sys, "argv", [str(recipe), "--output_dir", "any", "--use_cpu", "--bf16", "false", *words])
            config_class, values = called[0]
            of_flags, given = arguments.read_values(Run(str(recipe)), config_class, values)
            _, parts = arguments.make_arguments(Run(str(recipe), given=given), of_flags, config_class, (), values)
            read.append([{name: value for name, value in vars(part).items() if name not in NO_FLAGS} for part in parts])
        return read

    return call


NO_FLAGS = ("distributed_state",)  # of the argument objects


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_flags_in_help_can_be_pasted(pasted, recipe):
    """They are what the recipe sets, lists too."""
    without, with_all = pasted(recipe)
    assert with_all == without


@pytest.fixture
def elsewhere(tmp_path):
    """A recipe that prints its arguments, and a config, in a folder whose name needs quoting."""
    folder = tmp_path / "a b'c;d $(touch owned)"
    folder.mkdir()
    (folder / "neighbour.py").write_text("NAME = 'neighbour'\n")
    recipe = folder / "my recipe.py"
    recipe.write_text("import json, sys\nimport neighbour\nprint(json.dumps(sys.argv))\nsys.exit(0)\n")
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


def test_numbers_are_written_completely_or_not_at_all(tmp_path):
    launched.write_number(tmp_path / "code", 74)
    launched.write_number(tmp_path / "code", 1)  # the first one counts
    launched.write_number(tmp_path / "missing/code", 1)
    assert launched.read_number(tmp_path / "code") == 74
    assert launched.read_number(tmp_path / "missing/code") is None
