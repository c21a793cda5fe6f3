"""The arguments of --plan, and its --help.

`python3 -m planner.arguments plan WORD…` checks the words, or prints the help. It needs the standard library only.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.commands.parsers import CommandParser, add_json, add_recipe
from harness.messages import UserError, exit_on_user_error

CardNumbers = tuple[str, float, float, float]  # name, GB, TFLOPS, GB/s
CARD_FORMAT = "expected NAME=GB,TFLOPS,GB/s with three numbers above 0, for example --card A4000=16,77,448"
CONFIG_ENDINGS = (".yaml", ".yml")


@dataclasses.dataclass
class PlanArguments:
    recipe: Path = Path()
    start: bool = False  # start the run with what was chosen
    tiny: bool = False
    json: bool = False
    picture: bool = False  # also draw plan.png
    cards: list[CardNumbers] = dataclasses.field(default_factory=list)
    machine: str | None = None  # of --for
    configs: list[str] = dataclasses.field(default_factory=list)
    flags: list[str] = dataclasses.field(default_factory=list)  # of the recipe


def plan() -> CommandParser:
    parser = CommandParser("plan", "Forecasts whether a run fits, on which GPUs, and how long it takes; or chooses its config.")
    add_recipe(parser)
    parser.usage = f"{parser.prog} RECIPE [CONFIG] [options] [--flag value …]"
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)  # of ./launch.sh RECIPE, not for --plan
    parser.add_argument(
        "--for",
        dest="machine",
        metavar="MACHINE",
        help='choose the config for this machine: "2x3090,64GB"',
    )
    parser.add_argument(
        "--card",
        dest="cards",
        metavar="NAME=GB,TFLOPS,GB/s",
        type=read_card,
        action="append",
        help="a GPU that is not known: memory, dense 16-bit TFLOPS, memory bandwidth",
    )
    parser.add_argument("--picture", action="store_true", help="also draw the memory of a step, plan.png (takes longer)")
    add_json(parser)
    return parser


def read_arguments(words: Sequence[str]) -> PlanArguments:
    """`words`: [--start] [--tiny] RECIPE CONFIG…, as launch.sh passes them, then the flags of --plan and of the recipe."""
    arguments = plan().read(words, PlanArguments())
    rest = arguments.flags
    count = next((number for number, word in enumerate(rest) if not word.endswith(CONFIG_ENDINGS)), len(rest))
    arguments.configs = rest[:count]
    arguments.flags = rest[count:]
    return arguments


def read_card(text: str) -> CardNumbers:
    """A card that is not in `cards.CARDS`. Raises UserError unless it has a name and three numbers."""
    name, _, values = text.rpartition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if not name.strip() or len(numbers) != 3 or not all(0 < number < math.inf for number in numbers):
        raise UserError(f"--card is {text!r}, {CARD_FORMAT}")
    return name.strip(), *numbers


if __name__ == "__main__":
    with exit_on_user_error():
        read_arguments(sys.argv[2:])
