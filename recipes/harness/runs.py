"""`Run`: how a recipe was started, and what its processes can use. `StartedRecipe`: the recipe that runs in this process.

`parse` makes the `Run` in steps: where the process was started it gets recipe, config and processes, once the flags are read the
device and what they say, and at the end of `parse` what the GPUs support. Each step makes a copy with more, and none changes
it after `parse`. What a run uses is in `trainer.args`.
"""

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.configs import AccelerateConfig

from filelock import FileLock

PROJECT = Path(__file__).resolve().parents[2]
_started: "StartedRecipe | None" = None  # in this process


class GpuFeatures(NamedTuple):
    """What the GPUs of a run support."""

    attention: list[str]  # the implementations that can be used, besides those of transformers
    no_triton: str = ""  # why TRL's loss cannot use Triton, "" if it can


NO_FEATURES = GpuFeatures([])


@dataclass(frozen=True)
class Run:
    """How a recipe was started, and what its processes can use."""

    recipe: str  # path
    config: AccelerateConfig = field(default_factory=AccelerateConfig)
    processes: int = 0  # on all nodes; 0 if no config says how many
    nodes: int = 1
    tiny: bool = False  # a rehearsal: tiny model and dataset
    trains: bool = False  # the output directory and its checkpoints are those of this run; False in commands
    any_config: bool = False  # a command without a config: checked as if sharded, which every other config allows too
    on_cpu: bool = False  # computes and shards on CPU: a rehearsal without enough GPUs, a command that needs none, or --use_cpu
    gpu: GpuFeatures = NO_FEATURES
    # What follows from the values of the arguments.
    given: frozenset[str] = frozenset()  # names of the arguments that the user passed
    values: argparse.Namespace | None = None  # of all arguments, before others follow from them
    data: Any = None  # which rows are read, a `harness.data.reading.DataSettings`
    profile: bool = False
    repository: Any = None  # to which the model is uploaded, a `harness.run.saving.Repository`
    # Of a run that trains.
    lock: FileLock | None = None  # of the output directory, which the first process holds until the run ends

    @property
    def is_sharded(self) -> bool:
        return self.any_config or self.config.is_fsdp


@dataclass
class UncutRows:
    """What `tokenize` keeps of rows before it cuts and packs them: packed rows have no messages."""

    prompt: dict[str, Any] = field(default_factory=dict)  # what prompt.json says about the rows
    conversations: list[dict[str, Any]] = field(default_factory=list)  # the first ones for evaluation, with their tokens
    tokens: Any = None  # of the training rows, a Dataset or a stream; None: the recipe does not call `tokenize`


class RecipeStopped(BaseException):
    """Ends a recipe of which a command needs no more. Not an Exception, so that a recipe does not catch it."""


@dataclass
class StartedRecipe:
    """A recipe that runs in this process. There is a subclass for each thing that recipes are run for: training, and commands.

    The recipe's `parse` and `train` call its methods, in this order.
    """

    run: Run
    arguments: tuple[Any, Any, Any] | None = None  # what `parse` returns, once it has read them
    trainer: Any = None  # what `train` was called with
    uncut: UncutRows = field(default_factory=UncutRows)

    def choose_device(self) -> None:
        """Called when the values of all arguments are read, before objects are made of them."""

    def prepare(self) -> None:
        """Called at the end of `parse`: checks the arguments, and changes them and the process as the run or command needs it."""

    def train(self) -> None:
        """Called by `train` with the trainer in `self.trainer`. A command needs no more of the recipe."""
        raise RecipeStopped


def rehearsal_hint(recipe: str, config: AccelerateConfig) -> str:
    """The end of messages about machines that cannot run the config."""
    return f"Rehearse it here with a tiny model and dataset: ./launch.sh --tiny {shlex.join([recipe, config.path])}"


def started() -> StartedRecipe | None:
    """The recipe of this process; None before `parse` in a recipe that was started to train."""
    return _started


def set_started(recipe: StartedRecipe | None) -> None:
    """Sets the recipe for the rest of this process."""
    global _started
    _started = recipe


@contextmanager
def running(recipe: StartedRecipe) -> Iterator[None]:
    """Within this block `parse`, `load` and `train` are those of `recipe`. `RecipeStopped` ends the block."""
    before = started()
    set_started(recipe)
    try:
        yield
    except RecipeStopped:
        pass
    finally:
        set_started(before)
