"""What `train` needs to know besides the trainer that a recipe has built."""

from dataclasses import dataclass, field
from typing import Any

from harness.configs import AccelerateConfig
from harness.run.publishing import Repository


@dataclass
class RunSettings:
    """What the command line and launch.sh said about a run, for `harness.run.session.train`."""

    config: AccelerateConfig = field(default_factory=AccelerateConfig)
    processes: int = 0  # on all nodes; 0 if no config says how many
    tiny: bool = False  # a rehearsal
    identity: dict[str, Any] | None = None  # the content of run.json, if this process is to lock the output directory
    profile: bool = False
    repository: Repository | None = None  # to which the model is uploaded
    prompt: dict[str, Any] = field(default_factory=dict)  # the content of prompt.json
    conversations: list[dict[str, Any]] = field(default_factory=list)  # the first ones for evaluation, with their tokens
    asked_accumulation_steps: int | None = None  # the gradient_accumulation_steps that were asked for
