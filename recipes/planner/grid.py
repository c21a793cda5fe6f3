"""The combinations of config, micro-batch and activation checkpointing to choose from for a machine."""

import dataclasses
import math
from typing import Any, NamedTuple

from harness import configs
from harness.configs import AccelerateConfig
from harness.messages import UserError
from harness.runs import GpuFeatures, Run
from planner.cards import Card
from planner.machines import Machine


class Option(NamedTuple):
    """One combination of the grid."""

    config: str  # path
    micro_batch: int | None  # None: not changed
    checkpointing: bool | None  # None: not changed
    is_compiled: bool = False

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
        if self.is_compiled:
            words += ["--torch_compile", "true"]
        return words


class Grid(NamedTuple):
    processes: int  # on all nodes
    settings: dict[tuple[str, bool | None], list[Option]]  # options by rising micro-batch
    common_flags: list[str]  # that every option needs on this machine
    defaults: tuple[int | None, bool | None]  # micro-batch and checkpointing of the recipe
    nodes: int = 1
    idle: str = ""  # which GPUs of the machine stay idle, and what would use them
    no_triton: str = ""  # why TRL's loss cannot use Triton on this machine

    def run(self, recipe: str, config: str) -> Run:
        return Run(recipe, configs.read(config), self.processes, self.nodes, gpu=GpuFeatures([], no_triton=self.no_triton))


def given_flags(words: list[str]) -> set[str]:
    """The names of the flags among `words`: torch_compile for --torch_compile, --torch-compile and --no_torch_compile."""
    names = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    return {name.removeprefix("no_") for name in names}


def make_grid(values: dict[str, Any], machine: Machine, paths: list[str], words: list[str]) -> Grid:
    """The combinations to choose from. What a flag sets is not changed. Raises UserError if no config is for the machine.

    `values`: see `values_of_recipe`; `words`: the flags.
    """
    is_4bit = values["load_in_4bit"]
    given = given_flags(words)
    rows = values["global_batch_size"]
    default = values["per_device_train_batch_size"]
    is_open = rows is not None and not given & {"per_device_train_batch_size", "gradient_accumulation_steps", "config"}
    smallest = 1 if is_open else default
    gpus = machine.gpus
    while rows and gpus > 1 and rows % (machine.nodes * gpus * smallest):
        gpus -= 1
    processes = machine.nodes * gpus
    idle = ""
    if gpus < machine.gpus:
        unit = machine.nodes * machine.gpus * smallest
        idle = (
            f"{machine.gpus - gpus} of {machine.gpus} GPUs will be idle, because {machine.gpus} do not divide the {rows} rows of "
            f"a step: --global_batch_size {math.ceil(rows / unit) * unit} uses all"
        )
    if rows and rows % (processes * smallest):
        raise UserError(f"--for: {rows} rows cannot be divided among {machine.nodes} nodes: pass another --global_batch_size")
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
        raise UserError(f"no config is for {machine.name}: copy the most similar one, change it, and pass its path")
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
        if config.num_machines > 1 and nodes == 1:
            continue
        if config.use_cpu:
            continue
        if config.mixed_precision == "no" and not is_4bit:
            continue
        if config.mixed_precision == "fp16" and card.bf16:
            continue
        if processes == 1 and config.num_processes > 1:
            continue
        if processes > 1 and config.distributed_type == "NO":
            continue
        # A 4-bit model computes in the dtype it is loaded in, with FSDP's bf16 and without.
        precision = "no" if is_4bit and config.is_fsdp and config.mixed_precision == "bf16" else config.mixed_precision
        kind = str(dataclasses.replace(config, path="", num_processes=0, num_machines=0, mixed_precision=precision))
        kinds.setdefault(kind, []).append(config)

    def distance(config: AccelerateConfig) -> tuple[bool, int]:
        return is_4bit and config.mixed_precision != "no", abs(config.num_processes - processes)

    nearest = [min(alike, key=distance) for alike in kinds.values()]
    return [config.path for config in sorted(nearest, key=distance)]  # of equally fast ones, the first is chosen
