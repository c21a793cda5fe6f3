"""launch.sh: names and paths, one line per error, what arrives at the recipe."""

import json
import shutil
import time

import pytest
from conftest import CONFIGS, RECIPES, ROOT, is_one_line

RECIPE, CONFIG = "qwen2_fineweb_edu", "1x3090_offload"


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
        (["--tiny", RECIPE, CONFIG, "--model_name_or_path", "nobody/knows-llama"], ["nobody/knows-llama", "cannot be reached"]),
        ([RECIPE, "--tiny", CONFIG], ["comes first"]),
        (["--tiny", RECIPE, CONFIG, "--dataset_text_field", "body"], ["no column 'body'", "fineweb-edu", "text"]),
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


def test_a_recipe_with_a_syntax_error(launch, tmp_path):
    (tmp_path / "typo.py").write_text("import harness\ndef main(:\n")
    is_one_line(launch("--tiny", "typo.py", "1x3090", cwd=tmp_path), "typo.py, line 2: invalid syntax")


def test_a_file_that_is_no_recipe(launch, tmp_path):
    (tmp_path / "none.py").write_text("pass\n")
    is_one_line(launch("--tiny", "none.py", "1x3090", cwd=tmp_path), "none.py", "parse()")
