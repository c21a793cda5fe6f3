"""Chooses for a machine: the config, micro-batch and activation checkpointing with which a recipe is the fastest by the plan.

The grid: the configs that the run can use there × activation checkpointing × every micro-batch that divides
`global_batch_size`. Left out are configs with which weights, gradients and optimizer states alone do not fit. Of each other
setting (a config with or without checkpointing) the smallest micro-batch is simulated first. From it follows a number of seconds
that none of its micro-batches can be below. Then the settings that could be the fastest are simulated with larger micro-batches,
until those that remain cannot be faster.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from harness import configs
from harness.configs import AccelerateConfig
from harness.contexts import Context
from harness.folder import DamagedFile, read_json, write_json
from harness.json_types import Types
from harness.messages import UserError
from harness.plan import memory, proposals, roofline, summary
from harness.plan.cards import GB, Card
from harness.plan.ledger import Counts, Peak
from harness.plan.machines import Machine, is_possible, usable_host, with_margin
from harness.plan.pages import print_progress
from harness.plan.roofline import middle_seconds
from harness.plan.simulation import Refused, Simulation

CLOSE = 1.3  # runners-up that could be within this factor of the fastest are simulated with larger micro-batches
SIGNAL = 300  # seconds before the time limit, of --signal in launch.sh
SAVING = 60  # seconds to write a checkpoint; assumed
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "bitsandbytes")  # whose versions a simulation depends on
PEAKS = dict[str, get_type_hints(Peak)]
CACHED: Types = get_type_hints(Simulation) | {"peaks": PEAKS, "host_peaks": PEAKS, "step": get_type_hints(Counts)}


class Option(NamedTuple):
    """One combination of the grid."""

    config: str  # path
    micro_batch: int | None  # None: not changed
    checkpointing: bool | None  # None: not changed

    @property
    def setting(self) -> tuple[str, bool | None]:
        return self.config, self.checkpointing

    @property
    def flags(self) -> list[str]:
        words = []
        if self.micro_batch is not None:
            words += ["--per_device_train_batch_size", str(self.micro_batch)]
        if self.checkpointing is not None:
            words += ["--activation_checkpointing", str(self.checkpointing).lower()]
        return words


class Candidate(NamedTuple):
    """An option that fits, with its simulation."""

    option: Option
    simulation: Simulation
    seconds: float  # of a step, the middle of the range


class Grid(NamedTuple):
    processes: int  # on all nodes
    settings: dict[tuple[str, bool | None], list[Option]]  # options by rising micro-batch
    common_flags: list[str]  # that every option needs on this machine
    defaults: tuple[int | None, bool | None]  # micro-batch and checkpointing of the recipe
    nodes: int = 1
    idle: str = ""  # which GPUs of the machine stay idle, and what would use them
    no_triton: str = ""  # why TRL's loss cannot use Triton on this machine

    def context(self, recipe: str, config: str) -> Context:
        return Context(recipe, configs.read(config), self.processes, self.nodes, on_cpu=True, no_triton=self.no_triton)


def make_grid(values: dict[str, Any], machine: Machine, paths: list[str], words: list[str]) -> Grid:
    """The combinations to choose from. What a flag sets is not changed. Raises UserError if no config is for the machine.

    `values`: see `values_of_recipe`; `words`: the flags.
    """
    is_4bit = values["load_in_4bit"]
    given = {word.split("=")[0].replace("-", "_").removeprefix("__").removeprefix("no_") for word in words if word[:2] == "--"}
    rows, default = values["global_batch_size"], values["per_device_train_batch_size"]
    is_open = rows is not None and not given & {"per_device_train_batch_size", "gradient_accumulation_steps", "config"}
    smallest = 1 if is_open else default
    gpus = machine.gpus
    while rows and gpus > 1 and rows % (machine.nodes * gpus * smallest):
        gpus -= 1
    processes, idle = machine.nodes * gpus, ""
    if gpus < machine.gpus:
        unit = machine.nodes * machine.gpus * smallest
        idle = (
            f"{machine.gpus - gpus} of {machine.gpus} GPUs will be idle, because {machine.gpus} do not divide the {rows} rows of "
            f"a step: --global_batch_size {math.ceil(rows / unit) * unit} uses all"
        )
    if rows and rows % (processes * smallest):
        raise UserError(f"--for: {machine.nodes} nodes cannot divide the {rows} rows of a step: pass another --global_batch_size")
    micro_batches = [default] if "per_device_train_batch_size" not in given and not is_open else [None]
    if is_open:
        per_process = rows // processes
        micro_batches = [size for size in range(1, per_process + 1) if per_process % size == 0]
    checkpointing = [None] if given & {"activation_checkpointing", "config"} else [False, True]
    settings = {}
    for path in configs_for(gpus, machine.nodes, machine.card, is_4bit, paths):
        for is_on in checkpointing:
            settings[path, is_on] = [Option(path, size, is_on) for size in micro_batches]
    if not settings:
        raise UserError(f"no config is for {machine.name}: copy the nearest one in accelerate_configs/ and name it")
    common = []
    if not machine.card.bf16 and not given & {"bf16", "fp16"} and not is_4bit:
        common = ["--bf16", "false", "--fp16", "true"]
        if values["use_peft"] and "dtype" not in given:
            common += ["--dtype", "float16"]
    return Grid(processes, settings, common, (default, values["activation_checkpointing"]), machine.nodes, idle)


def configs_for(gpus: int, nodes: int, card: Card, is_4bit: bool, paths: list[str]) -> list[str]:
    """Configs that so many nodes with `gpus` each can use. Of those that differ in these numbers only, the nearest is taken."""
    processes = nodes * gpus
    kinds: dict[str, list[AccelerateConfig]] = {}
    for path in paths:
        try:
            config = configs.read(path)
        except UserError:  # not a config that this project reads
            continue
        if config.is_hybrid and (config.replicas, config.shards) != (nodes, gpus):
            continue
        if (config.num_machines > 1 and nodes == 1) or (config.mixed_precision == "no" and not is_4bit):
            continue
        if config.mixed_precision == "fp16" and card.bf16:
            continue
        if (config.num_processes > 1) if processes == 1 else (config.distributed_type == "NO"):
            continue
        # A 4-bit model computes in the dtype it is loaded in, with FSDP's bf16 and without.
        precision = "no" if is_4bit and config.is_fsdp and config.mixed_precision == "bf16" else config.mixed_precision
        kind = str(dataclasses.replace(config, path="", num_processes=0, num_machines=0, mixed_precision=precision))
        kinds.setdefault(kind, []).append(config)

    def distance(config: AccelerateConfig) -> tuple[bool, int]:
        return is_4bit and config.mixed_precision != "no", abs(config.num_processes - processes)

    return [min(alike, key=distance).path for alike in kinds.values()]


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


def choose(
    machine: Machine,
    grid: Grid,
    simulate: Callable[[list[Option]], list[Simulation | Refused]],
    count: int = 3,
) -> tuple[list[Candidate], dict[Option, Simulation | Refused]]:
    """The fastest option and `count` - 1 runners-up, of other settings if there are any, and everything that was simulated.

    `simulate` simulates options side by side. Settings that can only be much slower are not simulated further, so a smaller or
    larger micro-batch of such a runner-up may be faster. No candidate: nothing fits.
    """
    simulations: dict[Option, Simulation | Refused] = {}

    def simulate_missing(options: list[Option]) -> None:
        new = [option for option in options if option not in simulations]
        simulations.update(zip(new, simulate(new), strict=True))

    # The config that keeps the least on a GPU comes first. It says how many parameters there are, and so what cannot fit.
    first = [options[0] for options in grid.settings.values()]
    saving = min((option.config for option in first), key=lambda path: not configs.read(path).offload_params)
    simulate_missing([option for option in first if option.config == saving])
    simulations |= too_large(machine, grid, simulations)
    simulate_missing(first)
    simulated = {setting: options for setting, options in grid.settings.items() if is_simulated(simulations[options[0]])}
    share = remaining_share(machine.card, simulated, simulations, simulate_missing)

    def candidates(setting: tuple[str, bool | None]) -> list[Candidate]:
        fitting = [option for option in simulated[setting] if is_possible(machine, simulations.get(option))]
        return [Candidate(option, simulations[option], middle_seconds(machine.card, simulations[option])) for option in fitting]

    def following(setting: tuple[str, bool | None]) -> Option | None:
        return next_option(machine, simulated[setting], simulations)

    def least_seconds(setting: tuple[str, bool | None]) -> float:
        known = min((candidate.seconds for candidate in candidates(setting)), default=math.inf)
        if following(setting) is None:
            return known
        options = simulated[setting]
        return min(known, bound(machine.card, simulations[options[0]], options[-1].micro_batch, share))

    while True:
        fastest = sorted(simulated, key=least_seconds)[:count]
        close = [setting for setting in fastest if least_seconds(setting) <= CLOSE * least_seconds(fastest[0])]
        unknown = [option for option in map(following, close) if option]
        if not unknown:
            break
        simulate_missing(unknown)
    every = sorted((candidate for setting in simulated for candidate in candidates(setting)), key=by_seconds)
    best_of_settings = {candidate.option.setting: candidate for candidate in reversed(every)}
    close = [candidate for candidate in best_of_settings.values() if candidate.seconds <= CLOSE * every[0].seconds]
    best = sorted(close, key=by_seconds)[:count]
    best += [candidate for candidate in every if candidate not in best][: count - len(best)]
    return sorted(best, key=by_seconds), simulations


def too_large(machine: Machine, grid: Grid, simulations: dict[Option, Simulation | Refused]) -> dict[Option, Refused]:
    """The first options of settings whose weights, gradients and optimizer states alone are too large for the GPU."""
    found = next(filter(is_simulated, simulations.values()), None)
    refused = {}
    for path, is_on in grid.settings if found else ():
        config = configs.read(path)
        least = memory.least_bytes(found, config, grid.processes)
        if least > with_margin(machine.card).memory:
            reason = f"weights, gradients and optimizer states alone need at least {least / GB:.1f} GB on each GPU"
            refused[grid.settings[path, is_on][0]] = Refused(found.recipe, config.name, reason)
    for config, reason in {(one.config, one.reason) for one in refused.values()}:
        print_progress(f"{config} is not simulated: {reason}.")
    return refused


def is_simulated(found: Simulation | Refused) -> bool:
    return isinstance(found, Simulation)


def by_seconds(candidate: Candidate) -> float:
    return candidate.seconds


def remaining_share(
    card: Card,
    settings: dict[tuple[str, bool | None], list[Option]],
    simulations: dict[Option, Simulation | Refused],
    simulate_missing: Callable[[list[Option]], None],
) -> float:
    """The share of the memory traffic of a step that remains if its micro-batch is the largest instead of the smallest.

    Measured on the fastest setting, whether it fits or not: slower ones keep more, so `bound` holds for them too. 0.0, with which
    it always holds, if the share is not known.
    """
    if not settings:
        return 0.0
    options = min(settings.values(), key=lambda options: middle_seconds(card, simulations[options[0]]))
    simulate_missing([options[-1]])
    smallest, largest = simulations[options[0]], simulations[options[-1]]
    if isinstance(largest, Refused) or not smallest.step.touched:
        return 0.0
    return min(1.0, largest.step.touched / smallest.step.touched)


def bound(card: Card, simulation: Simulation, largest: int | None, share: float) -> float:
    """Seconds that a step with no micro-batch up to `largest` is below, from the simulation of the smallest one."""
    times = (largest or simulation.micro_batch) / simulation.micro_batch
    moved = {kind: size / times for kind, size in simulation.step.moved.items()}
    step = dataclasses.replace(simulation.step, moved=moved, touched=share * simulation.step.touched)
    return middle_seconds(card, dataclasses.replace(simulation, step=step))


def next_option(machine: Machine, options: list[Option], simulations: dict[Option, Simulation | Refused]) -> Option | None:
    """The option of a setting to simulate next, None if the best one is known. The first of `options` is simulated."""
    card, last = with_margin(machine.card), options[-1]
    fitting = [option for option in options if is_possible(machine, simulations.get(option))]
    top = fitting[-1] if fitting else options[0]
    # If a step is one micro-batch, there are no gradients of earlier ones, so the largest micro-batch can need less memory.
    if last not in simulations and memory.fits(card, simulations[top], peak_of(last, top, None, simulations, is_alone=True)):
        return last
    if not fitting:
        return None
    too_large = [option for option in options if option in simulations and option > top]
    limit = too_large[0] if too_large else None
    between = [option for option in options[:-1] if option > top and (limit is None or option < limit)]
    likely = [option for option in between if memory.fits(card, simulations[top], peak_of(option, top, limit, simulations))]
    if likely:
        return likely[-1]
    # Attention over packed rows with a mask computes more the longer the rows are, so a smaller micro-batch can be faster.
    flops = [sum(simulations[option].step.flops.values()) for option in (options[0], top)]
    if flops[1] > 1.01 * flops[0]:
        place = options.index(min(fitting, key=lambda option: middle_seconds(machine.card, simulations[option])))
        neighbours = [option for option in options[max(0, place - 1) : place + 2] if option < top and option not in simulations]
        return neighbours[0] if neighbours else None
    return None


def peak_of(
    option: Option,
    known: Option,
    too_large: Option | None,
    simulations: dict[Option, Simulation | Refused],
    is_alone: bool = False,
) -> float:
    """The least that the peak of an option can be, in bytes, estimated from simulations of smaller and larger micro-batches.

    `is_alone`: the step of the option has one micro-batch.
    """
    estimates = []
    for other in (known, too_large):
        if other and isinstance(simulations[other], Simulation):
            times = option.micro_batch / other.micro_batch
            estimates.append(max(fixed + growing * times for fixed, growing in simulations[other].hull))
    smaller = max((other for other in simulations if other.setting == option.setting and other < known), default=None)
    larger = simulations[known]
    if smaller and isinstance(simulations[smaller], Simulation):  # the line through the two largest that fit
        slope = (larger.peak.bytes - simulations[smaller].peak.bytes) / (known.micro_batch - smaller.micro_batch)
        estimates.append(larger.peak.bytes + slope * (option.micro_batch - known.micro_batch))
    earlier_gradients = 2 * larger.peak.by_holder.get("gradients", 0) if is_alone else 0
    return min(estimates) - earlier_gradients


def signal_seconds(step: float) -> int:
    """Seconds before the time limit at which SLURM must send SIGUSR1, 0 if what launch.sh asks for is early enough.

    `step`: seconds of a step. After the signal, a run finishes up to two steps and writes a checkpoint.
    """
    needed = 2 * step + SAVING
    return 0 if needed <= SIGNAL else 60 * math.ceil(needed / 60)


def command_line(recipe: str, machine: Machine, candidate: Candidate, arguments: list[str], grid: Grid) -> str:
    """The command that does by hand what was chosen."""
    config = configs.read(candidate.option.config)
    words = ["./launch.sh", recipe, config.name, *arguments, *shown_flags(candidate.option, grid)]
    if grid.nodes > 1:
        gpus = grid.processes // grid.nodes
        options = ["--nodes", str(grid.nodes), "--gpus-per-node", str(gpus)]
        if signal := signal_seconds(roofline.step_seconds(machine.card, candidate.simulation)[1]):
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
        option, simulation = candidate.option, candidate.simulation
        peak = simulation.peak.bytes
        rows.append(
            {
                "command": command_line(recipe, machine, candidate, arguments, grid),
                "config": Path(option.config).stem,
                "processes": grid.processes,
                "micro_batch": simulation.micro_batch,
                "flags": shown_flags(option, grid),
                "step_seconds": [round(seconds, 3) for seconds in roofline.step_seconds(machine.card, simulation)],
                "slower": round(candidate.seconds / candidates[0].seconds - 1, 3),
                "gpu_gb": summary.gb(peak + memory.reserve(simulation, peak, machine.card)),
                "host_gb": summary.gb(memory.needed_host_memory(simulation)),
            }
        )
    return rows


def on_machine(machine: Machine, simulation: Simulation, price: float, within: float) -> dict[str, Any]:
    """Time and price on the machine itself; "in_time" is about the slow end of the range, and None without a time or steps."""
    best, worst = roofline.step_seconds(machine.card, simulation)
    tokens = simulation.tokens * simulation.accumulation * simulation.processes
    hours = [round(simulation.max_steps * seconds / 3600, 4) for seconds in (best, worst)] if simulation.max_steps > 0 else None
    return {
        "machine": machine.name,
        "gpu": machine.card.name,
        "on_machine": {
            "step_seconds": [round(best, 3), round(worst, 3)],
            "tokens_per_second": [round(tokens / worst), round(tokens / best)],
            "hours": hours,
            "price": [round(number * price * machine.gpus * machine.nodes, 2) for number in hours] if hours and price else None,
            "in_time": hours[1] <= within if hours and within else None,
            "has_disk": memory.disk_space(simulation) <= machine.disk,
            "signal_seconds": signal_seconds(worst),
        },
    }


def option_with_least_memory(machine: Machine, simulations: dict[Option, Simulation | Refused]) -> tuple[Option, Simulation]:
    """The option that needs least GPU memory, of those for which the host has enough, if there are any.

    Raises UserError, with the first reason, if every option was refused.
    """
    simulated = [(option, simulation) for option, simulation in simulations.items() if isinstance(simulation, Simulation)]
    if not simulated:
        raise UserError(next(refused.reason for refused in simulations.values() if isinstance(refused, Refused)))
    return min(simulated, key=lambda pair: (memory.needed_host_memory(pair[1]) > usable_host(machine), pair[1].peak.bytes))


def propose(
    machine: Machine, option: Option, simulation: Simulation, run: Callable[[str, list[str]], Simulation | Refused]
) -> list[dict[str, Any]]:
    """Changes of `option`, which does not fit the machine, that would make it fit. `run(config, flags)` simulates one."""

    def run_on_top(config: str, more: list[str]) -> Simulation | Refused:
        return run(config, [*option.flags, *more])

    card, host = with_margin(machine.card), usable_host(machine)
    return proposals.try_proposals(summary.make_plan(simulation), simulation, option.config, run_on_top, card, host)


def cached_simulation(path: Path) -> Simulation | None:
    """What `keep_simulation` wrote, None if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        fields = read_json(path, CACHED)
        peaks = {key: {moment: Peak(**peak) for moment, peak in fields[key].items()} for key in ("peaks", "host_peaks")}
        simulation = Simulation(**fields | peaks | {"step": Counts(**fields["step"])})
    except (DamagedFile, OSError, TypeError):  # such as a field that is not of this version
        return None
    return simulation if simulation.peaks and simulation.hull else None


def keep_simulation(path: Path, simulation: Simulation) -> None:
    """Writes a simulation without its curve. A cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(simulation) | {"curve": []})


def cache_path(context: Context, words: list[str]) -> Path:
    """The file of a simulation: by the recipe, the config, the flags, a local model's config, this code and the versions."""
    from huggingface_hub.constants import HF_HOME

    models = [Path(word.split("=")[-1], "config.json") for word in words]
    sources = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))
    recipe, config = Path(context.recipe), Path(context.config.path)
    digest = hashlib.sha256(json.dumps([context.processes, context.nodes, bool(context.no_triton), *words]).encode())
    for path in (recipe, config, *(path for path in models if path.is_file()), *sources):
        digest.update(path.read_bytes())
    for package in PACKAGES:
        digest.update(importlib.metadata.version(package).encode())
    return Path(HF_HOME, "plans", f"{recipe.stem}-{config.stem}-{digest.hexdigest()[:16]}.json")
