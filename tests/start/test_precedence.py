"""Which source sets an argument, where several do: see the top of `harness/start/arguments.py`."""

import os
import sys

from harness.configs import AccelerateConfig
from harness.runs import Run
from harness.start import arguments
from harness.start.arguments import DEFAULTS, make_arguments, read_values
from harness.start.environment import LEFT_TO_ARGUMENTS

import pytest
import yaml
from trl import SFTConfig

NAME = "my/dataset"
CONFIG = {"path": "c.yaml", "mixed_precision": "bf16", "activation_checkpointing": True}


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Reads the arguments from these sources; returns all three argument objects as one dictionary, and "given"."""

    def call(flags=(), file=None, tiny=False, recipe=None, config=None, **variables) -> dict:
        monkeypatch.setattr(os, "environ", dict(os.environ) | variables)
        words = ["recipe.py", *flags]
        if file:
            (tmp_path / "arguments.yaml").write_text(yaml.safe_dump(file))
            words += ["--config", str(tmp_path / "arguments.yaml")]
        monkeypatch.setattr(sys, "argv", words)
        recipe = {"dataset_name": NAME} | (recipe or {})
        run = Run("recipe.py", AccelerateConfig(**(config or {})), tiny=tiny, on_cpu=True)
        run, parsed = make_arguments(read_values(run, SFTConfig, recipe), SFTConfig, (), recipe)
        return {name: value for part in reversed(parsed) for name, value in vars(part).items()} | {"given": run.given}

    return call


def test_all_sources(read, monkeypatch):
    """Each source, together with all that it overrides: library, project, Accelerate config, recipe, rehearsal, file, flag."""
    found = [read()["seed"]]
    monkeypatch.setitem(DEFAULTS, "seed", 1)
    found.append(read()["seed"])
    of_config = arguments.values_of_config
    monkeypatch.setattr(arguments, "values_of_config", lambda config: of_config(config) | {"seed": 2})
    found.append(read()["seed"])
    recipe = {"seed": 3}
    found.append(read(recipe=recipe)["seed"])
    monkeypatch.setitem(arguments.tiny.VALUES, "seed", 4)
    found.append(read(recipe=recipe, tiny=True)["seed"])
    found.append(read(recipe=recipe, tiny=True, file={"seed": 5})["seed"])
    found.append(read(recipe=recipe, tiny=True, file={"seed": 5}, flags=["--seed", "6"])["seed"])
    assert found == [SFTConfig.seed, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, {"save_total_limit": 2, "ddp_find_unused_parameters": False, "logging_nan_inf_filter": False}),
        ({"config": CONFIG}, {"bf16": True, "fp16": False, "activation_checkpointing": True}),
        ({"config": {"path": "c.yaml", "mixed_precision": "fp16"}}, {"bf16": False, "fp16": True}),
        ({"recipe": {"push_to_hub": True}}, {"push_to_hub": False}),  # the trainer itself uploads nothing
        ({"config": CONFIG, "recipe": {"bf16": False}}, {"bf16": False, "activation_checkpointing": True}),
        (
            {"tiny": True, "recipe": {"max_steps": 9, "learning_rate": 1e-5, "weight_decay": 0.5, "global_batch_size": 64}},
            {"max_steps": 30, "learning_rate": 1e-2, "weight_decay": 0.5, "global_batch_size": None},
        ),
        ({"config": CONFIG, "flags": ["--bf16", "false"]}, {"bf16": False, "activation_checkpointing": True}),
        ({"recipe": {"dataset_name": [NAME], "dataset_config": "own"}}, {"dataset_config": "own"}),
    ],
)
def test_precedence(read, sources, expected):
    found = read(**sources)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("flag", "expected"), [("true", "bf16"), ("false", "no")])
def test_flag_sets_the_precision_of_accelerate(read, flag, expected):
    assert read(["--bf16", flag], config=CONFIG, **LEFT_TO_ARGUMENTS)["mixed_precision"] == expected


RECIPE_DATASET = {"dataset_config": "en", "dataset_train_split": "a", "dataset_test_split": "b"}
LIBRARY_DATASET = {"dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test"}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, RECIPE_DATASET),
        ({"flags": ["--dataset_name", NAME]}, RECIPE_DATASET),
        ({"flags": ["--dataset_name", "other"]}, LIBRARY_DATASET),
        ({"file": {"dataset_name": "other", "dataset_config": "fr"}}, LIBRARY_DATASET | {"dataset_config": "fr"}),
        ({"flags": ["--dataset_train_split", "c"]}, RECIPE_DATASET | {"dataset_train_split": "c"}),
    ],
)
def test_another_dataset_has_its_own_config_and_splits(read, sources, expected):
    """Those of the recipe are for the recipe's dataset."""
    found = read(recipe=RECIPE_DATASET, **sources)
    assert {name: found[name] for name in expected} == expected


def test_given_arguments(read):
    """Those of flags, in any spelling, and those of the file of --config; not what the Accelerate config sets."""
    flags = ["--max-steps", "5", "--bf16=false", "--no_dataloader_pin_memory"]
    found = read(
        flags, config=CONFIG | {"activation_checkpointing_offload": True}, file={"seed": 3}, recipe={"learning_rate": 1e-5}
    )
    assert found["given"] == {"max_steps", "bf16", "dataloader_pin_memory", "seed"} and not found["dataloader_pin_memory"]
    assert found["activation_checkpointing"] and found["activation_checkpointing_kwargs"] == {"offload": True}
