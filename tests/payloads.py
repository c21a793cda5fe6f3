"""Harmless code where none should run: it writes its name into a file `ran` in the folder that it is for."""

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
