"""Writes constraints.txt: the installed versions of all packages that requirements.txt brings along.

    .venv/bin/python tests/start/write_constraints.py

PyTorch pins NVIDIA's packages and Triton itself; which of them it needs differs between its builds, so they are left out.
"""

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
HEADER = """\
# Versions of the packages that requirements.txt brings along, so that an installation next year is the one that was tested.
# Made by tests/start/write_constraints.py.
"""


def required() -> list[Requirement]:
    """The lines of requirements.txt."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text("utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def brought_along() -> dict[str, str]:
    """Name and installed version of every package that another one requires, without those of requirements.txt."""
    found, queue = {}, required()
    own = {canonicalize_name(requirement.name) for requirement in queue}
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        distribution = importlib.metadata.distribution(name)
        if name not in own and name in found:
            continue
        if name not in own:
            found[name] = distribution.version.split("+")[0]
        for text in distribution.requires or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            is_needed = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
            if is_needed and canonicalize_name(needed.name) not in own and not is_of_pytorch(needed.name):
                queue.append(needed)
    return dict(sorted(found.items()))


def is_of_pytorch(name: str) -> bool:
    return canonicalize_name(name).startswith(("nvidia-", "cuda-", "triton"))


def content() -> str:
    return HEADER + "".join(f"{name}=={version}\n" for name, version in brought_along().items())


if __name__ == "__main__":
    (ROOT / "constraints.txt").write_text(content(), "utf-8")
