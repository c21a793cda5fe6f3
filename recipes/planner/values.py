"""The values of a recipe's arguments, with some flags, as the recipe's own parser reads them. Nothing is loaded."""

from typing import Any

from harness.configs import AccelerateConfig
from harness.runs import RecipeStopped, Run, StartedRecipe
from harness.start.recipes import run_recipe


class ReadRecipe(StartedRecipe):
    """A recipe that runs until the values of its arguments are read."""

    def choose_device(self) -> None:
        raise RecipeStopped


def values_of_recipe(recipe: str, flags: list[str]) -> dict[str, Any]:
    """All values by name. activation_checkpointing is None if neither recipe nor flags set it: then the config does."""
    started = ReadRecipe(Run(recipe, AccelerateConfig(activation_checkpointing=None)))
    run_recipe(started, flags)
    return vars(started.run.values)
