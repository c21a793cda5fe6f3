"""The values of a recipe's arguments, with some flags, as the recipe's own parser reads them. Nothing is loaded."""

import argparse
from typing import Any

from harness.configs import AccelerateConfig
from harness.runs import RecipeStopped, Run, StartedRecipe
from harness.start.recipes import run_recipe


def values_of_recipe(recipe: str, flags: list[str]) -> dict[str, Any]:
    """All values by name. activation_checkpointing is None if neither recipe nor flags set it: then the config does."""
    found: dict[str, Any] = {}

    def keep_values(run: Run, values: argparse.Namespace) -> Run:
        found.update(vars(values))
        raise RecipeStopped

    run = Run(recipe, AccelerateConfig(activation_checkpointing=None))
    run_recipe(StartedRecipe(run, on_flags=keep_values), flags)
    return found
