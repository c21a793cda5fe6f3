"""How a recipe was started: `Context`, and the one place where `parse` and `train` find it.

launch.sh starts recipes in five ways: to train, to check a run before its processes start, to preview rows, to download what a
run needs, to simulate it. Each is a subclass of `Context`, next to the command that makes it. A context is made where the command
line is read, and handed to the process that runs the recipe.
"""

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.configs import AccelerateConfig

PROJECT = Path(__file__).resolve().parents[2]
_current: "Context | None" = None  # of this process


class RecipeStopped(BaseException):
    """Ends a recipe whose context needs no more of it. Not an Exception, so that a recipe does not catch it."""


@dataclass
class Context:
    """One way of starting a recipe. A recipe's `parse` calls `before_arguments` and `prepare`, its `train` calls `built`."""

    recipe: str  # path
    config: AccelerateConfig = field(default_factory=AccelerateConfig)
    processes: int = 0  # on all nodes; 0 if no config says how many
    nodes: int = 1
    tiny: bool = False  # a rehearsal: tiny model and dataset
    on_cpu: bool = False  # computes and shards on CPU: a rehearsal without enough GPUs, a command that needs none, or --use_cpu
    # What this machine's GPUs support, see `harness.model.gpu_features.find_gpu_features`.
    attention: list[str] = field(default_factory=list)
    no_flash: str = ""  # why a FlashAttention that is installed cannot be used, "" if there is no problem
    gpu_problem: str = ""  # why the GPU itself cannot be used at the moment, "" if it can
    no_triton: str = ""  # why TRL's loss cannot use Triton here, "" if it can
    arguments: tuple[Any, Any, Any] | None = None  # what `parse` returns, once it has read them
    has_trained: bool = False  # it failed later than in a first step that the model refused

    is_simulated = False  # on fake tensors, at full size
    only_first_rows = False  # load only the first rows of each split
    is_training_run = False  # the output directory and its checkpoints are those of this run

    @property
    def is_sharded(self) -> bool:
        return self.config.is_fsdp

    @property
    def default_output_dir(self) -> str:
        """`outputs/RECIPE`, for a rehearsal `outputs/tiny/RECIPE`."""
        return str(Path("outputs", "tiny" if self.tiny else "") / Path(self.recipe).stem)

    @property
    def rehearsal_hint(self) -> str:
        return rehearsal_hint(self.recipe, self.config)

    def before_arguments(self, values: argparse.Namespace) -> None:
        """Called with the values of all arguments before objects are made of them: TrainingArguments connects the processes."""
        values.use_cpu = values.use_cpu or self.on_cpu

    def settings_of_checkpoint(self, output_dir: str) -> dict[str, Any]:
        """The settings of the checkpoint that a run continues, {} without one."""
        return {}

    def prepare(self, arguments: tuple[Any, Any, Any]) -> None:
        """Called at the end of `parse`: checks the arguments, and changes them and the process as this command needs it."""
        raise NotImplementedError

    def tokenized(self, trainer: Any, split: str, rows: Any, tokenized: Any) -> None:
        """Called by SFTTrainer with the rows of a split, and the same tokenized, before it truncates and packs them."""

    def built(self, trainer: Any) -> None:
        """Called by `train`."""
        raise NotImplementedError


@dataclass
class BuildingContext(Context):
    """For commands that run a recipe until it has built its trainer."""

    trainer: Any = None

    def built(self, trainer: Any) -> None:
        self.trainer = trainer
        raise RecipeStopped


def rehearsal_hint(recipe: str, config: AccelerateConfig) -> str:
    """The end of messages about machines that cannot run the config."""
    own = (PROJECT / "recipes", PROJECT / "accelerate_configs")
    files = [(path, Path(path).resolve()) for path in (recipe, config.path)]
    names = [shlex.quote(file.stem if file.parent in own else path) for path, file in files]
    return f"Rehearse it here with a tiny model and dataset: ./launch.sh --tiny {' '.join(names)}"


def current() -> Context | None:
    """The context of this process; None before `parse` in a recipe that was started without launch.sh."""
    return _current


def set_current(context: Context | None) -> None:
    """Sets the context for the rest of this process."""
    global _current
    _current = context


@contextmanager
def active(context: Context) -> Iterator[None]:
    """Within this block a recipe finds `context`. `RecipeStopped` ends the block."""
    before = current()
    set_current(context)
    try:
        yield
    except RecipeStopped:
        pass
    finally:
        set_current(before)
