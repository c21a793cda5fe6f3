"""What launch.sh decided, carried to every process in one environment variable."""

import dataclasses
import json
import os
import sys

VARIABLE = "RECIPE_LAUNCH"


node = ""  # "node 2: " in the launcher of any node but the first


class Checked(BaseException):
    """Raised by `parse` when the run was only to be checked: everything is in order. Carries the training arguments."""


@dataclasses.dataclass
class Launched:
    """How this process was started. The defaults describe `python recipe.py`, without launch.sh."""

    recipe: str = ""  # path of the recipe
    config: str = ""  # path of the Accelerate YAML
    processes: int = 0  # over all nodes
    nodes: int = 1
    tiny: bool = False  # tiny stand-ins for model and data
    on_cpu: bool = False  # too few GPUs: shard on CPU
    command: str = ""  # "prepare" or "preview": the recipe runs up to its trainer, whose model holds nothing
    attention: str = ""  # what the launcher found this machine's GPUs can have; "" leaves it to transformers
    torch_loss: str = ""  # why TRL's loss cannot use Triton here
    plan: bool = False  # simulate: the model's config.json is all there is of it
    checking: bool = False  # stop once the arguments are known to be good

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def from_environment(cls) -> "Launched":
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))


def fail(message: str):
    """Ends the process with one line on stderr and exit code 2. Other ranks stay silent."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {node}{' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def say(message: str):
    """Prints on the first rank, or in the launcher of the first node, only."""
    if os.environ.get("RANK", "0") == "0" and not node:
        try:
            print(message, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read has gone; the run goes on
