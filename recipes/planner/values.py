"""The values of a recipe's arguments, with some flags, as the recipe's own parser reads them. Nothing is loaded."""

import argparse
from dataclasses import dataclass, field
from typing import Any

from harness.configs import AccelerateConfig
from harness.contexts import Context, RecipeStopped
from harness.start.recipes import run_recipe


@dataclass
class AskedValues(Context):
    """Ends a recipe as soon as its parser has read the values."""

    values: dict[str, Any] = field(default_factory=dict)

    def before_arguments(self, values: argparse.Namespace) -> None:
        self.values = dict(vars(values))
        raise RecipeStopped


def values_of_recipe(recipe: str, flags: list[str]) -> dict[str, Any]:
    """All values by name. activation_checkpointing is None if neither recipe nor flags set it: then the config does."""
    asked = AskedValues(recipe, AccelerateConfig(activation_checkpointing=None), on_cpu=True)
    run_recipe(asked, flags)
    return asked.values
