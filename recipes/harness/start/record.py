"""What run.json says about a start: the settings that are not defaults, and the command. Without tokens and passwords."""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from harness.launched import launched
from harness.runs import PROJECT, Run

SECRET_VARIABLE = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD)$")
# In JSON, with its value.
SECRET_KEY = re.compile(r'("(?:(?:hf_|hub_|auth_|access_)?token|[^"]*(?:key|secret|password))": )"[^"]*"', re.IGNORECASE)


def plain(value: Any) -> Any:
    """A value of an argument as JSON has it; a list of one is what it contains, as TRL reads it."""
    if isinstance(value, str) and value.startswith("{"):  # the JSON of a flag
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return json.loads(json.dumps(value, default=str))


def without_secrets(value: Any) -> Any:
    """A plain value without tokens and passwords: those of environment variables become `env:NAME`."""
    text = SECRET_KEY.sub(r'\1"hidden"', json.dumps(value))
    for name, secret in os.environ.items():
        if SECRET_VARIABLE.search(name) and len(secret) > 7:
            text = text.replace(secret, f"env:{name}")
    text = re.sub(r"\bhf_[A-Za-z0-9]{30,}", "hidden", text)
    text = re.sub(r"(://)[^/@\s\"]+@", r"\1", text)  # name and password
    return json.loads(re.sub(r"(https?://[^\s?\"]*)\?[^\s\"'\\]*", r"\1", text))  # the signature of a URL


def settings_of(values: argparse.Namespace, classes: tuple[type, ...]) -> dict[str, Any]:
    """The values of arguments that are not defaults, sorted by name. `classes`: those of the arguments."""
    found = {}
    for field in (field for cls in classes for field in dataclasses.fields(cls) if field.init):
        default = plain(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
        value = plain(getattr(values, field.name, default))
        if value != default and field.name != "disable_tqdm":
            found[field.name] = value
    return without_secrets(dict(sorted(found.items())))


def command_of(run: Run) -> str:
    """The command line of this start."""
    words = [Path(sys.executable).name, *sys.argv]
    if launched():
        files = [Path(run.recipe), Path(run.config.path)]
        names = [file.stem if file.resolve().is_relative_to(PROJECT) else str(file) for file in files]
        words = ["./launch.sh", *(["--tiny"] if run.tiny else []), *names, *sys.argv[1:]]
    return without_secrets(shlex.join(words))


def digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
