"""The flags a recipe takes, read from source files: no torch, a tenth of a second.

Importing transformers takes seconds; a misspelt flag or `--help` should not.
The real parser (`harness.start.arguments`) still has the last word, on values and types.
"""

import ast
import difflib
import importlib.util
import re
import sys
from pathlib import Path

from harness.launched import fail, say

# Where the dataclasses live whose fields become flags.
SOURCES = {
    "transformers": ["training_args.py"],
    "trl": ["trainer/base_config.py", "trainer/sft_config.py", "trainer/model_config.py", "scripts/utils.py"],
    "harness": ["data.py"],
}
# Words people arrive with, and what they are called today.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "max_seq_length": "max_length",
    "tokenizer": "processing_class in the recipe",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps, where a number below 1 is a share",
}


def known(recipe: Path) -> set[str]:
    """Names of all dataclass fields a recipe's flags can come from, its own classes included."""
    for package in ("torch", "datasets", "accelerate", "peft", "numpy", *SOURCES):
        found = importlib.util.find_spec(package)
        if found and found.submodule_search_locations is None:
            fail(f"{found.origin} hides the package {package}: give it another name, or take its folder out of PYTHONPATH")
    files = [recipe]
    for package, names in SOURCES.items():
        spec = importlib.util.find_spec(package)
        if spec is None:
            fail(f"{package} is not installed in this Python: pip install -r requirements.txt")
        files += [Path(spec.submodule_search_locations[0], name) for name in names]
    try:
        words = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(ast.parse(recipe.read_text("utf-8")))}
    except SyntaxError as error:
        fail(f"{recipe.name}, line {error.lineno}: {error.msg}")
    except ValueError as error:
        fail(f"{recipe.name} is no Python file: {error}")
    if "parse" in words and "train" not in words:
        fail(f"{recipe.name} calls parse() and never train(): its last line hands the trainer to train(trainer)")
    return {"config", "help"} | {
        field.target.id
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def check(recipe: Path, flags: list[str]):
    """Fails with the nearest real flag when one of `flags` is not a flag."""
    names = known(recipe)
    for flag in flags:
        if not flag.startswith("--"):
            continue
        name = flag[2:].split("=")[0].replace("-", "_")
        if name == "tiny":
            fail("--tiny comes first: ./launch.sh --tiny RECIPE CONFIG")
        if name in RENAMED:
            fail(f"--{name} is now --{RENAMED[name]}")
        if name not in names and name.removeprefix("no_") not in names:
            fail(unknown(f"--{name}", [f"--{known_name}" for known_name in names]))


def unknown(flag: str, known_flags: list[str]) -> str:
    """The message for an unknown flag."""
    near = difflib.get_close_matches(flag, known_flags, n=1)
    advice = f"did you mean {near[0]}?" if near else "--help shows what the recipe sets"
    return f"unknown flag {flag}: {advice}"


def help_text(recipe: Path) -> str:
    """The recipe's docstring and the numbers it sets, with the comments beside them."""
    source = recipe.read_text("utf-8")
    tree = ast.parse(source)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "parse"]
    # Source lines such as `max_length=1024,  # why`, so that the comments come along.
    lines = [line.strip() for call in calls for line in ast.get_source_segment(source, call).splitlines()]
    numbers = ""
    for name, value, why in re.findall(r"^(?!takes=)(\w+)=(.*?),(?:\s*(# .*))?$", "\n".join(lines), re.MULTILINE):
        flag = f"--{name} " + value.strip("[]").strip('"')
        numbers += f"    {flag:<52} {why}".rstrip() + "\n"
    return (
        f"{ast.get_docstring(tree)}\n\nWhat it sets, and any flag may change:\n\n{numbers}\n"
        "Every other field of SFTConfig or TrainingArguments, of TRL's ModelConfig and ScriptArguments is a flag too:\n"
        "    https://huggingface.co/docs/trl/sft_trainer#trl.SFTConfig\n"
        "    https://huggingface.co/docs/trl/script_utils\n"
    )


if __name__ == "__main__":
    say(help_text(Path(sys.argv[1])))
