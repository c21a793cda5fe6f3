"""What `train` needs to know besides the trainer that a recipe has built."""

from dataclasses import dataclass, field

from harness.configs import AccelerateConfig


@dataclass
class RunSettings:
    """What the command line and launch.sh said about a run, for `harness.run.session.train`."""

    config: AccelerateConfig = field(default_factory=AccelerateConfig)
    processes: int = 0  # on all nodes; 0 if no config says how many
    tiny: bool = False  # a rehearsal
    is_locked: bool = True  # launch.sh holds the lock of the output directory
    separate_disks: bool = False  # every node has an output directory of its own, and --mirror has all files
    profile: bool = False
    mirror: str | None = None  # URL
    dataset_weights: dict[str, float] | None = None  # of a mixture: the share of each dataset, by its label
    asked_accumulation_steps: int | None = None  # the gradient_accumulation_steps that were asked for
