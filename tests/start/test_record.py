"""What the folder of a run says about its starts: values that are not defaults, without secrets."""

import argparse
from dataclasses import dataclass, field
from enum import StrEnum

from harness.runs import Run
from harness.start import claim
from harness.start.claim import settings_of, without_secrets

import pytest
from conftest import ROOT

TOKEN = "hf_" + "a1B2" * 9


class Kind(StrEnum):
    A = "a"


@dataclass
class Arguments:
    rate: float = 1e-3
    steps: int = -1
    kind: Kind = Kind.A
    names: list[str] = field(default_factory=list)
    options: dict | str | None = None
    disable_tqdm: bool = False
    computed: int = field(default=0, init=False)


def settings(**values):
    defaults = {"rate": 1e-3, "steps": -1, "kind": "a", "names": [], "options": None, "disable_tqdm": True}
    return settings_of(argparse.Namespace(**defaults | values), (Arguments,))


def test_values_that_are_not_defaults():
    assert settings() == {} and settings(names=["a"]) == settings(names="a")  # TRL reads both alike
    found = settings(steps=4, rate=0.1, names=["a", "b"], options='{"b": [1, 2]}')
    assert list(found.items()) == [("names", ["a", "b"]), ("options", {"b": [1, 2]}), ("rate", 0.1), ("steps", 4)]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (f"load {TOKEN}", "load hidden"),
        ({"token": "abc", "revision": "v1", "eos_token": "</s>"}, {"token": "hidden", "revision": "v1", "eos_token": "</s>"}),
        (
            {"storage": {"api_key": "k", "secret": "s", "password": "p"}},
            {"storage": dict.fromkeys(("api_key", "secret", "password"), "hidden")},
        ),
        (["s3://me:pass@host/rows"], ["s3://host/rows"]),
        ("https://host/rows.jsonl?X-Amz-Signature=abc", "https://host/rows.jsonl"),
        ("--key my-secret-value", "--key env:SERVICE_KEY"),
        ("--url 'https://me:pass@host/x?sig=a' \"b\" s3://you:word@b c@d", "--url 'https://host/x' \"b\" s3://b c@d"),
        (3, 3),
    ],
)
def test_no_secret_is_recorded(monkeypatch, value, written):
    monkeypatch.setenv("SERVICE_KEY", "my-secret-value")
    assert without_secrets(value) == written


def test_command(monkeypatch):
    context = Run(str(ROOT / "recipes/qwen2_chat.py"), tiny=True)
    context.config.path = "/mine/two gpus.yaml"
    monkeypatch.setattr("sys.argv", [context.recipe, "--run_name", f"a {TOKEN}"])
    assert claim.command_of(context).endswith("qwen2_chat.py --run_name 'a hidden'")
    monkeypatch.setattr(claim, "launched", lambda: True)
    assert claim.command_of(context) == "./launch.sh --tiny qwen2_chat '/mine/two gpus.yaml' --run_name 'a hidden'"
