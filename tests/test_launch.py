"""launch.sh: names and paths, one line per error, installation, what arrives at the recipe."""

import json
import shutil
import subprocess
import sys
import time

import pytest
from conftest import CONFIGS, RECIPES, ROOT

RECIPE, CONFIG = "qwen2_fineweb_edu", "1x3090_offload"


def is_one_line(process, *words):
    assert process.returncode == 2, process.stdout + process.stderr
    assert process.stderr.count("\n") == 1 and process.stderr.startswith("error: "), process.stderr
    assert not process.stdout
    for word in words:
        assert word in process.stderr


def test_lists_every_recipe_and_config(launch):
    start = time.monotonic()
    listing = launch().stdout
    assert time.monotonic() - start < 0.3 * 5  # machines that run tests are loaded; on its own it takes 0.01 s
    assert RECIPES and CONFIGS
    for file in RECIPES + CONFIGS:
        first = file.read_text().split("\n")[0].strip('"# ')
        assert any(line.split() == [file.stem, *first.split()] for line in listing.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen", "1x3090"], ["no recipe", "'qwen'", "mean qwen2_chat?", RECIPE]),
        ([RECIPE, "1x309"], ["no config", "mean 1x3090?", "4gpu_full_shard"]),
        ([RECIPE], ["which config", "1x3090"]),
        (["--tiny"], ["RECIPE"]),
        (["--tinny", RECIPE, "1x3090"], ["--tinny"]),
        ([RECIPE, "1x3090", "--learning_rte", "1"], ["--learning_rte", "mean --learning_rate?"]),
        ([RECIPE, "1x3090", "--tiny"], ["comes first"]),
        ([RECIPE, "1x3090", "--max_seq_length", "512"], ["now --max_length"]),
        ([RECIPE, CONFIG], ["needs 1 GPU", f"./launch.sh --tiny {RECIPE} {CONFIG}"]),
        ([RECIPE, "4gpu_full_shard"], ["needs 4 GPUs", f"./launch.sh --tiny {RECIPE} 4gpu_full_shard"]),
        (["--tiny", RECIPE, CONFIG, "--model_name_or_path", "some/unknown-llama"], ["some/unknown-llama", "cannot be reached"]),
        ([RECIPE, "--tiny", CONFIG], ["comes first"]),
        (["--tiny", RECIPE, CONFIG, "--learning_rate", "high"], ["--learning_rate", "high"]),
        (["--tiny", RECIPE, CONFIG, "--dataset_text_field", "body"], ["no column 'body'", "fineweb-edu", "text"]),
        (["--tiny", "llama31_70b_qlora", "2x3090_qlora", "--bnb_4bit_quant_storage", "uint8"], ["uint8", "float32"]),
        (["--quantize", RECIPE], ["--load_in_4bit"]),
        (["--merge"], ["RUN"]),
        (["--merge", "nowhere"], ["nowhere", "not a folder"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_writes_nothing(launch, tmp_path, arguments, words):
    process = launch(*arguments, cwd=tmp_path)
    is_one_line(process, *words)
    assert "hf_secret" not in process.stderr
    assert not (tmp_path / "outputs" / RECIPE).exists() and not (tmp_path / "outputs/tiny" / RECIPE).exists()


def test_a_misspelt_flag_is_answered_without_torch(launch, tmp_path):
    """`-X importtime` lists what Python imports on the way to the message."""
    process = launch(RECIPE, "1x3090", "--learning_rte", "1", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.split("|")[-1].strip() for line in process.stderr.splitlines() if "|" in line}
    assert "harness.start.flags" in imported
    assert not imported & {"torch", "transformers", "trl", "accelerate", "datasets"}


def test_help_shows_the_recipe_and_its_numbers(launch):
    shown = launch(RECIPE, "--help").stdout
    assert "Continued pretraining of Qwen2-0.5B" in shown
    assert "--learning_rate 2e-5" in shown and "# with --use_peft ten times as much" in shown


@pytest.fixture
def elsewhere(tmp_path):
    """A recipe and a config that lie in a folder with an awkward name, and print what arrives."""
    folder = tmp_path / "a b'c;d $(touch owned)"
    folder.mkdir()
    (folder / "neighbour.py").write_text("NAME = 'neighbour'\n")
    recipe = folder / "my recipe.py"
    recipe.write_text("import json, sys\nimport neighbour\nprint(json.dumps(sys.argv))\nsys.exit(0)\n")
    config = folder / "my config.yaml"
    shutil.copy(ROOT / "accelerate_configs/1x3090.yaml", config)
    (tmp_path / "datasets.py").write_text("raise RuntimeError('a file of the folder one stands in was imported')\n")
    return recipe, config


def test_paths_and_values_arrive_as_they_are(launch, tmp_path, elsewhere):
    recipe, config = elsewhere
    values = ["--output_dir", "x y", "--run_name", 'it\'s "quoted"; $(touch owned) `touch owned` \\ *']
    process = launch("--tiny", recipe, config, *values, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [str(recipe), *values]
    assert not list(tmp_path.rglob("owned"))


def test_relative_paths(launch, tmp_path, elsewhere):
    recipe, config = (path.relative_to(tmp_path) for path in elsewhere)
    process = launch("--tiny", recipe, config, cwd=tmp_path)
    assert json.loads(process.stdout) == [str(tmp_path / recipe)]


def test_a_file_that_is_no_recipe(launch, tmp_path):
    (tmp_path / "none.py").write_text("pass\n")
    is_one_line(launch("--tiny", "none.py", "1x3090", cwd=tmp_path), "none.py", "parse()")


@pytest.fixture
def clone(tmp_path, environment):
    """A copy of the launcher that needs no packages, and a call of it that may install."""
    folder = tmp_path / "a clone"
    (folder / "recipes").mkdir(parents=True)
    (folder / "accelerate_configs").mkdir()
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "launch.sh", folder)
    shutil.copytree(ROOT / "recipes/harness", folder / "recipes/harness")
    (folder / "requirements.txt").write_text("# nothing\n")

    def call(*arguments, **variables):
        env = {name: value for name, value in environment.items() if name != "PYTHON"} | variables
        return subprocess.run([folder / "launch.sh", *arguments], env=env, capture_output=True, text=True, timeout=120)

    return folder, call


def test_installs_once_and_again_when_requirements_change(clone):
    folder, call = clone
    installs = "Installing requirements.txt"
    assert installs in call("--test").stderr
    python = folder / ".venv/bin/python"
    assert python.exists()
    assert installs not in call("--test").stderr
    (folder / "requirements.txt").write_text("# something else\n")
    assert installs in call("--test").stderr
    # An installation that was cut short, at either of its two steps, is finished by the next call.
    (folder / ".venv/requirements.installed").unlink()
    python.unlink()
    assert installs in call("--test").stderr and python.exists()


def test_an_installation_that_fails_says_how_to_go_on(clone):
    folder, call = clone
    (folder / "requirements.txt").write_text("./no-such-package\n")
    process = call("--test")
    assert process.returncode == 2 and "the same command again" in process.stderr.splitlines()[-1]
    assert not (folder / ".venv/requirements.installed").exists()


def test_python_of_the_user_installs_nothing(clone):
    folder, call = clone
    bare = shutil.copy(sys.executable, folder / "bare python")
    call("--test", PYTHON=str(bare))
    assert not (folder / ".venv").exists()
    is_one_line(call("--test", PYTHON="/no/python"), "PYTHON=/no/python")
