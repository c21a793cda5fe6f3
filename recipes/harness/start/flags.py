"""The flags of a recipe, read from source files without importing torch: a misspelt flag or --help is answered at once.

The real parser in `harness/start/arguments.py` checks values and types later.
"""

import argparse
import ast
import difflib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from harness.instead import INSTEAD, RENAMED
from harness.messages import UserError, exit_on_user_error, print_once

# The files of the dataclasses whose fields become flags.
SOURCES = {
    "transformers": ["training_args.py"],
    "trl": ["trainer/base_config.py", "trainer/sft_config.py", "trainer/model_config.py", "scripts/utils.py"],
    "harness": ["data/script_arguments.py"],
}
NO_FLAGS = ("DatasetConfig", "DatasetMixtureConfig")  # classes in these files that no recipe gives to `parse`
# Where other classes are that a recipe can give to `parse`, such as DPOConfig and Seq2SeqTrainingArguments.
OTHER_CONFIGS = {"transformers": "training_args*.py", "trl": "**/*_config.py"}
PAGES = {
    "SFTConfig": "https://huggingface.co/docs/trl/sft_trainer#trl.SFTConfig",
    "DPOConfig": "https://huggingface.co/docs/trl/dpo_trainer#trl.DPOConfig",
    "RewardConfig": "https://huggingface.co/docs/trl/reward_trainer#trl.RewardConfig",
    "TrainingArguments": "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments",
}
NOT_FLAGS = ("dataset_formats",)  # arguments of `parse` itself
OF_CONFIG = ("deepspeed", "fsdp", "fsdp_config")  # flags for what the Accelerate config says here
COMMANDS = ("tiny", "plan", "preview", "prepare", "debug")  # of launch.sh, which come before the recipe


def known_flags(recipe: Path) -> set[str]:
    """Names of all dataclass fields that a recipe's flags can come from, including its own classes."""
    for package in ("torch", "datasets", "accelerate", "peft", "numpy", *SOURCES):
        spec = importlib.util.find_spec(package)
        if spec and spec.submodule_search_locations is None:
            raise UserError(f"{spec.origin} hides the package {package}: rename it, or take its folder out of PYTHONPATH")
    files = [recipe]
    for package, names in SOURCES.items():
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise UserError(f"{package} is not installed: {sys.executable} -m pip install -r requirements.txt")
        files += [Path(spec.submodule_search_locations[0], name) for name in names]
    _check_source(recipe)
    files += files_of_imports(recipe)
    fields = {"config", "help"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in NO_FLAGS:
                fields |= fields_of_class(node).keys()
    return fields


def files_of_imports(recipe: Path) -> list[Path]:
    """The files with classes of arguments that a recipe imports: of transformers and TRL, and modules next to the recipe."""
    tree, files = ast.parse(recipe.read_text("utf-8")), []
    words = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for package, pattern in OTHER_CONFIGS.items():
        spec = importlib.util.find_spec(package)  # --help needs no environment
        for file in Path(spec.submodule_search_locations[0]).glob(pattern) if spec else ():
            if words & set(re.findall(r"^class (\w+)", file.read_text("utf-8"), re.MULTILINE)):
                files.append(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (file := recipe.parent / f"{node.module}.py").is_file():
            files.append(file)
    return files


def fields_of_class(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    """The fields of a dataclass that become flags, by name."""
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)]
    return {field.target.id: field for field in fields if "init=False" not in ast.unparse(field)}


def _check_source(recipe: Path) -> None:
    """Raises UserError for a recipe with a syntax error, or one that calls `parse` and never `train`."""
    try:
        tree = ast.parse(recipe.read_text("utf-8"))
    except SyntaxError as error:
        raise UserError(f"{recipe.name}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise UserError(f"{recipe.name} is not a Python file: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            name = node.module or ", ".join(alias.name for alias in node.names)
            raise UserError(
                f"{recipe.name}, line {node.lineno}: {ast.unparse(node)}: a recipe is not part of a package: import {name} "
                "without the dot, it is found next to the recipe"
            )
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}
    # `from harness import train as …`
    renamed = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}
    if {"parse", "harness.parse"} & names and not {"train", "harness.train"} & (names | renamed):
        raise UserError(
            f"{recipe.name} calls parse() but never train(): its last line must be train(trainer), with `train` from `harness`; "
            "trainer.train() would neither resume nor save the model"
        )


def check_flags(recipe: Path, words: list[str], more: Iterable[str] = ()) -> None:
    """Raises UserError, with the nearest known flag, if one of `words` is a flag that does not exist. `more`: known names."""
    check_passwords(words)
    check_names(words, known_flags(recipe) | set(more))


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


def value_of(name: str, words: list[str], recipe: Path | None = None) -> str:
    """What the flags `words` set an argument to, as text; without the flag, the recipe's constant; else ""."""
    constants = [value.value for value in recipe_values(recipe, name) if isinstance(value, ast.Constant)] if recipe else []
    default = str(constants[-1]) if constants else ""
    return _parse_one(name, words, default)[0]


def is_true(name: str, words: list[str], recipe: Path | None = None) -> bool:
    """Whether the flags `words` set a boolean argument; without the flag, whether the recipe does."""
    return value_of(name, words, recipe).lower() in ("yes", "true", "t", "y", "1")  # as transformers reads them


def without(name: str, words: list[str]) -> list[str]:
    """`words` without a flag and its value."""
    return _parse_one(name, words, "")[1]


def _parse_one(name: str, words: list[str], default: str) -> tuple[str, list[str]]:
    """The value of one flag, "true" for one without a value, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const="true", default=default)
    found, rest = parser.parse_known_args(words)
    return getattr(found, name), rest


def recipe_values(recipe: Path, name: str) -> list[ast.expr]:
    """What a recipe passes to `parse` for an argument."""
    calls = calls_of_parse(ast.parse(recipe.read_text("utf-8")))
    return [keyword.value for call in calls for keyword in call.keywords if keyword.arg == name]


def calls_of_parse(tree: ast.Module) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in ("parse", "harness.parse")]


def help_text(recipe: Path) -> str:
    """The docstring of a recipe, and what it sets, as flags that can be pasted, with the comments of the source."""
    _check_source(recipe)
    source = recipe.read_text("utf-8")
    tree = ast.parse(source)
    lines, sets, config_class = [], set(), "SFTConfig"
    for call in calls_of_parse(tree):
        sets |= {keyword.arg for keyword in call.keywords}
        config_class = ast.unparse(call.args[0]) if call.args else config_class
        text = ast.get_source_segment(source, call).splitlines()
        shown = [keyword for keyword in call.keywords if keyword.arg and keyword.arg not in NOT_FLAGS]  # not **values
        for number, line in enumerate(text):
            of_line = [_as_flag(keyword) for keyword in shown if keyword.lineno - call.lineno == number]
            if of_line:
                comment = re.search(r"  (# .*)", line)
                lines += [f"    {flag}" for flag in of_line[:-1]]
                lines.append(f"    {of_line[-1]:<52} {comment[1] if comment else ''}".rstrip())
            elif line.strip().startswith("# "):
                lines += ["", f"    {line.strip()}"]
    settings = "\n".join(lines).strip("\n")
    # The docstring of a copied recipe still names the original in its commands.
    command = r"(launch\.sh (?:--(?:tiny|plan|preview|prepare|test) )?)\w+(?![\w./])"
    docstring = re.sub(command, rf"\g<1>{recipe.stem}", ast.get_docstring(tree) or f"{recipe.name} has no docstring.")
    own = "\n".join(own_flags(recipe, sets))
    return (
        f"{docstring}\n\nWhat the recipe sets, as flags with which you can change it:\n\n{settings}\n\n"
        + (f"Flags of this recipe's own:\n\n{own}\n\n" if own else "")
        + f"Every other field of {config_class.rpartition('.')[2]}, of TRL's ModelConfig and ScriptArguments is a flag too:\n"
        f"    {PAGES.get(config_class.rpartition('.')[2], PAGES['TrainingArguments'])}\n"
        "    https://huggingface.co/docs/trl/script_utils\n"
    )


def own_flags(recipe: Path, sets: set[str]) -> list[str]:
    """A line for each flag that a class in the recipe or next to it adds, with its default and its help; not those in `sets`."""
    lines = []
    for file in (recipe, *(file for file in files_of_imports(recipe) if file.parent == recipe.parent)):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            is_dataclass = isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list)
            for name, field in fields_of_class(node).items() if is_dataclass else ():
                if name in sets:
                    continue
                arguments = {key.arg: key.value for key in getattr(field.value, "keywords", [])}
                default = arguments.get("default", field.value)
                flag = f"--{name} {ast.unparse(field.annotation)}"
                if isinstance(default, ast.Constant):
                    flag = _as_flag(ast.keyword(name, default))
                metadata = arguments.get("metadata")
                pairs = zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ()
                texts = [value.value for key, value in pairs if ast.unparse(key) == "'help'" and isinstance(value, ast.Constant)]
                comment = f"# {texts[0]}" if texts else ""
                lines.append(f"    {flag:<52} {comment}".rstrip())
    return lines


def _as_flag(keyword: ast.keyword) -> str:
    """`--learning_rate 2e-05` for `learning_rate=2e-5`; for a value that no flag can have, a comment."""
    try:
        value = ast.literal_eval(keyword.value)
    except ValueError:
        return f"# {keyword.arg}: {ast.unparse(keyword.value)}"
    if value is None:
        return f"# {keyword.arg}: None"
    words = [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
    if isinstance(value, dict):
        words = [json.dumps(value)]
    return f"--{keyword.arg} {shlex.join(words)}"


if __name__ == "__main__":
    with exit_on_user_error():
        print_once(help_text(Path(sys.argv[1])))
