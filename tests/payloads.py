"""Harmless code where none should run: it writes its name into a file `ran` in the folder that it is for."""

import json
from pathlib import Path

# Of the standard library and of other packages, as the harness, launch.sh and their libraries import them.
MODULES = ("ast", "datasets", "difflib", "ensurepip", "json", "pip", "random", "runpy", "shlex", "torch", "venv", "yaml")


def source(folder: Path, name: str) -> str:
    return f"open({str(folder / 'ran')!r}, 'a').write({name + chr(10)!r})\n"


def write_modules(folder: Path) -> None:
    """A file for each of MODULES."""
    for name in MODULES:
        (folder / f"{name}.py").write_text(source(folder, f"{name}.py"))


def ran(folder: Path) -> list[str]:
    """The names of what ran."""
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


def write_model_with_code(folder: Path, target: Path) -> None:
    """A model of an architecture that transformers does not have: files in `folder` define it, and write into `target`."""
    folder.mkdir(exist_ok=True, parents=True)
    classes = {"AutoConfig": "code_of_model.Config", "AutoModelForCausalLM": "code_of_model.Model"}
    config = {"model_type": "of_its_own", "architectures": ["Model"], "auto_map": classes}
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code_of_model.Tokenizer", None]}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    names = "\nclass {0}(transformers.{1}):\n    pass\n"
    bases = {"Config": "PretrainedConfig", "Model": "PreTrainedModel", "Tokenizer": "PreTrainedTokenizerFast"}
    code = "import transformers\n" + "".join(names.format(*item) for item in bases.items())
    (folder / "code_of_model.py").write_text(source(target, "model") + code)
