"""What was chosen for a machine: as the command that does the same by hand, and as `--json` prints it."""

import math
import shlex
from pathlib import Path
from typing import Any

from harness import configs
from planner import memory, roofline, summary
from planner.choose import Candidate, compared_seconds
from planner.grid import Grid, Option
from planner.machines import Machine
from planner.simulation import Simulation

UNSURE = 2  # a step can take so many times as long as its forecast
SIGNAL = 300  # seconds before the time limit, of --signal in launch.sh
SAVING = 60  # seconds to write a checkpoint; assumed


def shown_flags(option: Option, grid: Grid) -> list[str]:
    """The flags of the command that does the same by hand, without those that change nothing."""
    micro_batch, checkpointing = grid.defaults
    if checkpointing is None:
        checkpointing = configs.read(option.config).activation_checkpointing
    if option.micro_batch == micro_batch:
        option = option._replace(micro_batch=None)
    if option.checkpointing == checkpointing:
        option = option._replace(checkpointing=None)
    return [*option.flags, *grid.common_flags]


def signal_seconds(step: float) -> int:
    """Seconds before the time limit at which SLURM must send SIGUSR1, 0 if what launch.sh asks for is early enough.

    `step`: forecast seconds of a step. After the signal, a run finishes up to two steps and writes a checkpoint.
    """
    needed = 2 * UNSURE * step + SAVING
    return 0 if needed <= SIGNAL else 60 * math.ceil(needed / 60)


def command_line(recipe: str, machine: Machine, candidate: Candidate, arguments: list[str], grid: Grid) -> str:
    """The command that does by hand what was chosen."""
    config = configs.read(candidate.option.config)
    words = ["./launch.sh", recipe, config.name, *arguments, *shown_flags(candidate.option, grid)]
    if grid.nodes > 1:
        gpus = grid.processes // grid.nodes
        options = ["--nodes", str(grid.nodes), "--gpus-per-node", str(gpus)]
        if signal := signal_seconds(compared_seconds(machine.card, candidate.simulation)):
            options += ["--signal", f"USR1@{signal}"]
        return shlex.join(["sbatch", *options, "launch.sh", *words[1:]])
    count = "" if grid.processes == config.num_processes else f"NPROC_PER_NODE={grid.processes} "
    return count + shlex.join(words)


def describe(
    recipe: str, machine: Machine, grid: Grid, candidates: list[Candidate], arguments: list[str]
) -> list[dict[str, Any]]:
    """The choice and the runners-up as `--json` prints them: time in seconds, memory in GB (1e9 bytes)."""
    rows = []
    for candidate in candidates:
        option = candidate.option
        simulation = candidate.simulation
        peak = simulation.peak.bytes
        rows.append(
            {
                "command": command_line(recipe, machine, candidate, arguments, grid),
                "config": Path(option.config).stem,
                "processes": grid.processes,
                "micro_batch": simulation.micro_batch,
                "flags": shown_flags(option, grid),
                "step_seconds": round(candidate.seconds, 3),
                "slower": round(max(0.0, candidate.seconds / candidates[0].seconds - 1), 3),
                "gpu_gb": summary.gb(peak + memory.reserve(simulation, peak, machine.card)),
                "host_gb": summary.gb(memory.needed_host_memory(simulation)),
            }
        )
    return rows


def on_machine(machine: Machine, simulation: Simulation) -> dict[str, Any]:
    """Time on the machine itself; "hours" is None if the number of steps is not known."""
    card = machine.card
    seconds = compared_seconds(card, simulation)
    tokens = simulation.tokens * simulation.accumulation * simulation.processes
    return {
        "machine": machine.name,
        "gpu": card.name,
        "on_machine": {
            "step_seconds": round(seconds, 3),
            "generating_seconds": round(roofline.generating_seconds(card, simulation), 3),
            "tokens_per_second": round(tokens / seconds),
            "hours": round(simulation.max_steps * seconds / 3600, 6) if simulation.max_steps > 0 else None,
            "has_disk": memory.disk_space(simulation) <= machine.disk,
            "signal_seconds": signal_seconds(seconds),
        },
    }
