"""The flags of recipes, read from source files: importing the classes would take longer than the tests."""

import ast
import functools
import importlib.util
from pathlib import Path

from conftest import ROOT

FILES = {
    "transformers": ["training_args.py"],
    "trl": [
        "trainer/base_config.py",
        "trainer/sft_config.py",
        "trainer/dpo_config.py",
        "trainer/grpo_config.py",
        "trainer/distillation_config.py",
        "trainer/model_config.py",
        "scripts/utils.py",
    ],
}

OTHERS = ("DatasetConfig", "DatasetMixtureConfig")  # classes that no recipe gives to `parse`


@functools.cache
def known_flags() -> set[str]:
    """The names of the fields of all dataclasses that recipes of this project give to `parse`."""
    files = [ROOT / "recipes/harness/start/arguments.py"]
    for package, names in FILES.items():
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        files += [Path(folder, name) for name in names]
    classes = [
        node
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name not in OTHERS
    ]
    fields = [field for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return {field.target.id for field in fields} | {"config"}
