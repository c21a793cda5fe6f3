"""`Run`: how a recipe was started, and what its processes can use. `StartedRecipe`: the recipe that runs in this process.

`parse` makes the `Run` in steps: where the process was started it gets recipe, config and processes, once the flags are read the
device, and at the end of `parse` what the GPUs support. Nothing changes it afterwards. What a run uses is in `trainer.args`.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator
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
    no_flash: str = ""  # why an implementation that is installed cannot be used, "" if there is no problem
    no_triton: str = ""  # why TRL's loss cannot use Triton, "" if it can
    problem: str = ""  # why the GPU itself cannot be used at the moment (it is full or busy, for example), "" if it can


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
    # Of a run that trains.
    lock: FileLock | None = None  # of the output directory, which the first process holds until the run ends
    profile: bool = False
    repository: Any = None  # to which the model is uploaded, a `harness.run.publishing.Repository`
    asked_accumulation_steps: int | None = None  # the gradient_accumulation_steps that were asked for
    seen: Any = None  # of its rows, a `harness.run.prompts.SeenRows`

    @property
    def is_sharded(self) -> bool:
        return self.any_config or self.config.is_fsdp

    @property
    def default_output_dir(self) -> str:
        """`outputs/RECIPE`, for a rehearsal `outputs/tiny/RECIPE`."""
        return str(Path("outputs", "tiny" if self.tiny else "") / Path(self.recipe).stem)


class RecipeStopped(BaseException):
    """Ends a recipe of which a command needs no more. Not an Exception, so that a recipe does not catch it."""


def stop(recipe: "StartedRecipe") -> None:
    raise RecipeStopped


@dataclass
class StartedRecipe:
    """A recipe that runs in this process, for training or for a command that needs what it parses or builds."""

    run: Run
    # Called by `parse` with the values of all arguments, before it makes objects of them.
    on_flags: Callable[[Run, argparse.Namespace], Run] = lambda run, values: run
    # Called at the end of `parse`: checks the arguments, and changes them and the process as the run or command needs it.
    on_arguments: Callable[[Run, Any], Run] = lambda run, arguments: run
    on_train: Callable[["StartedRecipe"], None] = stop  # called by `train`
    arguments: tuple[Any, Any, Any] | None = None  # what `parse` returns, once it has read them
    trainer: Any = None  # what `train` was called with


def rehearsal_hint(recipe: str, config: AccelerateConfig) -> str:
    """The end of messages about machines that cannot run the config."""
    own = (PROJECT / "recipes", PROJECT / "accelerate_configs")
    files = [(path, Path(path).resolve()) for path in (recipe, config.path)]
    names = [shlex.quote(file.stem if file.parent in own else path) for path, file in files]
    return f"Rehearse it here with a tiny model and dataset: ./launch.sh --tiny {' '.join(names)}"


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
