"""What the folder of a run says about its starts: the command, the settings that are not defaults, when, where, with what.

run.json has what must be equal at every start, and the settings. starts.json has an entry for each start.
"""

import argparse
import dataclasses
import datetime
import enum
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness import folder
from harness.contexts import Context
from harness.launched import launched

PROJECT = Path(__file__).resolve().parents[3]
SECRET_VARIABLE = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD)$")
SECRET_KEY = re.compile(r"((^|hf_|hub_|auth_|access_)token|key|secret|password)$", re.IGNORECASE)  # of a dict
OFF = (None, False, "", "no", [])  # the parser changes some into others
NOT_RECORDED = ("disable_tqdm", "data", "asked", "parsed", "defaults")


def plain(value: Any) -> Any:
    """A value of an argument as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str) and value.startswith("{"):  # the JSON of a flag
        try:
            return plain(json.loads(value))
        except ValueError:
            return value
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set):
        return plain(next(iter(value))) if len(value) == 1 else [plain(part) for part in value]  # as TRL reads a list of one
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def without_secrets(value: Any) -> Any:
    """A plain value without tokens and passwords: those of environment variables become `env:NAME`."""
    if isinstance(value, dict):
        hidden = {name: "hidden" for name in value if SECRET_KEY.search(name) and isinstance(value[name], str)}
        return {name: without_secrets(part) for name, part in value.items()} | hidden
    if isinstance(value, list):
        return [without_secrets(part) for part in value]
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items():
        if SECRET_VARIABLE.search(name) and len(secret) > 7:
            value = value.replace(secret, f"env:{name}")
    value = re.sub(r"\bhf_[A-Za-z0-9]{30,}", "hidden", value)
    value = re.sub(r"(://)[^/@\s]+@", r"\1", value)  # name and password
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", value)  # the signature of a URL


def asked_values(
    values: argparse.Namespace, classes: tuple[type, ...], sources: dict[str, Collection[str]]
) -> dict[str, dict[str, Any]]:
    """The values that are not defaults, by where they come from.

    `sources`: the names of the arguments that a source sets; of those that name an argument, the first one wins.
    """
    asked: dict[str, dict[str, Any]] = {}
    for name, default in defaults_of(classes).items():
        value = plain(getattr(values, name, default))
        # Of an argument such as bf16 or completion_only_loss, None means that other arguments decide.
        is_off = value in OFF and default in OFF and not (value is False and default is None)
        if value != default and not is_off and name not in NOT_RECORDED:
            source = next((source for source, names in sources.items() if name in names), "other")
            asked.setdefault(source, {})[name] = without_secrets(value)
    return asked


def defaults_of(classes: tuple[type, ...]) -> dict[str, Any]:
    """The default of every argument."""
    fields = [field for cls in classes for field in dataclasses.fields(cls) if field.init]
    return {
        field.name: plain(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
        for field in fields
    }


def settings_of(asked: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `asked_values` returned, without the sources, sorted by name."""
    merged = {name: value for values in asked.values() for name, value in values.items()}
    return dict(sorted(merged.items()))


def values_of(*objects: Any) -> dict[str, Any]:
    """All values of argument objects."""
    names = {field.name: part for part in objects for field in dataclasses.fields(part) if field.name not in NOT_RECORDED}
    return {name: without_secrets(plain(getattr(part, name))) for name, part in names.items()}


def command_of(context: Context) -> str:
    """The command line of this start."""
    words = [Path(sys.executable).name, *sys.argv]
    if launched():
        files = [Path(context.recipe), Path(context.config.path)]
        names = [file.stem if file.resolve().is_relative_to(PROJECT) else str(file) for file in files]
        words = ["./launch.sh", *(["--tiny"] if context.tiny else []), *names, *sys.argv[1:]]
    return without_secrets(shlex.join(words))


def record_start(context: Context, output_dir: Path, asked: dict[str, dict[str, Any]]) -> None:
    """Adds this start to starts.json."""
    from harness.run.results import versions  # imports torch

    checkpoint = folder.newest_complete_checkpoint(output_dir)
    start = {
        "started": datetime.datetime.now().isoformat(timespec="seconds"),
        "host": platform.node(),
        "command": command_of(context),
        "working_directory": str(Path.cwd()),
        "processes": context.processes,
        "nodes": context.nodes,
        "resumes": checkpoint.name if checkpoint else None,
        "asked": asked,
        "versions": versions(),
    }
    starts = folder.read_starts(output_dir)
    folder.write_json(output_dir / folder.STARTS, {"starts": [*starts, start]})
