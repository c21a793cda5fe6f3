"""What a person types after RECIPE: the message for a flag that does not exist, and --help of a recipe."""

import ast
import dataclasses
import difflib
import json
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from harness.instead import INSTEAD, RENAMED
from harness.messages import UserError

PAGES = {
    "SFTConfig": "https://huggingface.co/docs/trl/sft_trainer#trl.SFTConfig",
    "DPOConfig": "https://huggingface.co/docs/trl/dpo_trainer#trl.DPOConfig",
    "TrainingArguments": "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments",
}
OF_CONFIG = ("deepspeed", "fsdp", "fsdp_config")  # flags for what the Accelerate config says here
COMMANDS = ("tiny", "plan", "preview", "prepare", "debug")  # of launch.sh, which come before the recipe


def check_names(words: Iterable[str], names: Collection[str]) -> None:
    """Raises UserError if one of `words` is a flag that is not in `names`, with what to use instead or the nearest known flag."""
    for word in words:
        if not word.startswith("--"):
            continue
        name = word[2:].split("=")[0].replace("-", "_")
        if name in COMMANDS and name not in names:
            raise UserError(f"--{name} comes first: ./launch.sh --{name} RECIPE{' CONFIG' if name == 'tiny' else ''}")
        if name in OF_CONFIG:
            raise UserError(f"--{name}: the config says how a run is sharded: pass a config: ./launch.sh lists them")
        if name in INSTEAD and name not in names:
            raise UserError(f"--{name}: {INSTEAD[name]}")
        if name in RENAMED:
            raise UserError(f"--{name} is now --{RENAMED[name]}")
        if name not in names and name.removeprefix("no_") not in names:
            raise UserError(unknown_flag(f"--{name}", [f"--{known}" for known in names]))


def check_passwords(words: list[str]) -> None:
    """Raises UserError if one of `words` is a URL with a password, a token, or a signature in its query."""
    if any(re.search(r"://([^/@:]*:[^@]*|[^/@:]{20,})@|[?&](sig|signature|token|key|X-Amz-[A-Za-z]*)=", word) for word in words):
        raise UserError(
            "a URL with a password would be shown in the process list: leave it out, and set the variables that its storage "
            "reads, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with its program"
        )


def unknown_flag(flag: str, known: list[str]) -> str:
    """The message for an unknown flag."""
    near = difflib.get_close_matches(flag, known, n=1)
    return f"unknown flag {flag}: " + (f"did you mean {near[0]}?" if near else "--help lists what the recipe sets")


def help_text(recipe: Path, config_class: type, values: dict[str, Any]) -> str:
    """The docstring of a recipe, and the values that it passes to `parse`, as flags that can be pasted."""
    from harness.data.script_arguments import ScriptArguments  # here, because it imports torch

    # The docstring of a copied recipe still names the original in its commands.
    command = r"(launch\.sh (?:--(?:tiny|plan|preview|prepare|test) )?)\w+(?![\w./])"
    docstring = ast.get_docstring(ast.parse(recipe.read_text("utf-8"))) or f"{recipe.name} has no docstring."
    docstring = re.sub(command, rf"\g<1>{recipe.stem}", docstring)
    own = [
        field
        for cls in config_class.__mro__
        if dataclasses.is_dataclass(cls) and not cls.__module__.startswith(("transformers.", "trl."))
        for field in dataclasses.fields(cls)
        if field.name in cls.__annotations__ and field.name not in values
    ]
    of_project = [
        f"# --{field.name}  {field.metadata['help']}"
        for field in dataclasses.fields(ScriptArguments)
        if field.name in ScriptArguments.__annotations__ and field.name not in values
    ]
    of_project.append("# --max_restarts  How often to start again after a crash, default 0.")
    flags = {
        f"What {recipe.name} sets, with the reasons there": [as_flag(name, value) for name, value in values.items()],
        "Flags of this recipe's own": [f"{as_flag(f.name, f.default)}  {f.metadata.get('help', '')}".strip() for f in own],
        "Other flags of this project": of_project,
    }
    lists = "".join(f"{title}:\n\n    " + "\n    ".join(lines) + "\n\n" for title, lines in flags.items() if lines)
    base = next((cls.__name__ for cls in config_class.__mro__ if cls.__name__ in PAGES), "TrainingArguments")
    return (
        f"{docstring}\n\n{lists}Every other field of {base}, of TRL's ModelConfig and ScriptArguments is a flag too:\n"
        f"    {PAGES[base]}\n    https://huggingface.co/docs/trl/script_utils\n"
    )


def as_flag(name: str, value: Any) -> str:
    """`--learning_rate 2e-05` for a value of 2e-5; for a value that no flag can have, a comment."""
    if value is None or value is dataclasses.MISSING:
        return f"# --{name}"
    words = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, dict):
        words = [json.dumps(value)]
    return f"--{name} {shlex.join(map(str, words))}"
