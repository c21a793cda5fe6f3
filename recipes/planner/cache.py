"""Simulations that are kept in $HF_HOME/plans, so that a second choice need not repeat them."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from harness.folder import read_json, write_json
from harness.messages import DamagedFile
from harness.runs import Run
from planner.ledger import Counts, Peak
from planner.simulation import Simulation

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes")  # whose versions a simulation depends on


def cached_simulation(path: Path) -> Simulation | None:
    """What `keep_simulation` wrote, None if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        simulation = simulation_of(read_json(path))
    except (DamagedFile, OSError, TypeError, LookupError, AttributeError):  # such as a field that is not of this version
        return None
    return simulation if simulation.peaks and simulation.hull else None


def simulation_of(fields: dict[str, Any]) -> Simulation:
    """A simulation from its fields as JSON."""
    for key in ("peaks", "host_peaks"):
        fields[key] = {moment: Peak(**peak) for moment, peak in fields[key].items()}
    for key in ("step", "token"):
        fields[key] = Counts(**fields[key])
    return Simulation(**fields)


def keep_simulation(path: Path, simulation: Simulation) -> None:
    """Writes a simulation without its curve. A cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(simulation) | {"curve": []})


def cache_path(run: Run, words: list[str]) -> Path:
    """The file of a simulation: by recipe, config, flags and the YAML file among them, a local model's config, code, versions."""
    from huggingface_hub.constants import HF_HOME

    files = [Path(run.recipe), Path(run.config.path), *sorted(Path(__file__).resolve().parents[1].rglob("*.py"))]
    for word in words:
        path = Path(word.split("=")[-1])
        files.append(path if path.suffix in (".yaml", ".yml") else path / "config.json")
    versions = [importlib.metadata.version(package) for package in PACKAGES]
    digest = hashlib.sha256(json.dumps([run.processes, run.nodes, bool(run.gpu.no_triton), *words, *versions]).encode())
    for path in files:
        if path.is_file():
            digest.update(path.read_bytes())
    return Path(HF_HOME, "plans", f"{files[0].stem}-{files[1].stem}-{digest.hexdigest()[:16]}.json")
