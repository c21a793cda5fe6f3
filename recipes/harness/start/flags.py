"""--help of a recipe."""

import ast
import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any


def help_text(recipe: Path, config_class: type, script_class: type, values: dict[str, Any]) -> str:
    """The docstring of a recipe, and the values that it passes to `parse`, as flags that can be pasted."""
    # The docstring of a copied recipe still names the original in its commands.
    command = r"(launch\.sh (?:--(?:tiny|plan|preview|prepare|test) )?)\w+(?![\w./])"
    docstring = ast.get_docstring(ast.parse(recipe.read_text("utf-8"))) or f"{recipe.name} has no docstring."
    docstring = re.sub(command, rf"\g<1>{recipe.stem}", docstring)
    set_here = [as_flag(name, value) for name, value in values.items()]
    own = []
    for cls in (*config_class.__mro__, script_class):
        if dataclasses.is_dataclass(cls) and not cls.__module__.startswith(("transformers.", "trl.")):
            for name, field in cls.__dataclass_fields__.items():
                if name in cls.__annotations__ and name not in values:
                    own.append(f"# --{name}  {field.metadata.get('help', '')}".rstrip())
    own.append("# --max_restarts  How often to start again after a crash, default 0.")
    new_line = "\n    "
    return (
        f"{docstring}\n\nWhat {recipe.name} sets, with the reasons there:\n\n    {new_line.join(set_here)}\n\n"
        f"Flags of this recipe and this project:\n\n    {new_line.join(own)}\n\n"
        f"Every other field of {config_class.__name__}, ModelConfig and ScriptArguments is a flag too:\n"
        "    https://huggingface.co/docs/trl and https://huggingface.co/docs/transformers/main_classes/trainer\n"
    )


def as_flag(name: str, value: Any) -> str:
    """`--learning_rate 2e-05` for a value of 2e-5; for a value that no flag can have, a comment."""
    if value is None or value is dataclasses.MISSING:
        return f"# --{name}"
    words = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, dict):
        words = [json.dumps(value)]
    return f"--{name} {shlex.join(map(str, words))}"
