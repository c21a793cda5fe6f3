"""The arguments of --plan, and its --help.

`python3 -m planner.arguments plan WORD…` checks the words, or prints the help. It needs the standard library only.
"""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.commands.arguments import CommandParser, add_json, add_recipe
from harness.messages import UserError, exit_on_user_error

CardNumbers = tuple[str, float, float, float]  # name, GB, TFLOPS, GB/s
CARD_FORMAT = "expected NAME=GB,TFLOPS,GB/s with three numbers above 0, for example --card A6000=48,155,768"
UNITS = {"m": 1 / 60, "h": 1, "d": 24}  # hours
CONFIG_ENDINGS = (".yaml", ".yml")


@dataclasses.dataclass
class PlanArguments:
    recipe: Path = Path()
    start: bool = False  # start the run with what was chosen
    tiny: bool = False
    json: bool = False
    prices: list[float] = dataclasses.field(default_factory=list)  # per GPU and hour; one, or one for each machine
    cards: list[CardNumbers] = dataclasses.field(default_factory=list)
    machines: str = ""  # of --for
    within: float = 0.0  # hours, 0 without the flag
    configs: list[str] = dataclasses.field(default_factory=list)
    flags: list[str] = dataclasses.field(default_factory=list)  # of the recipe

    def prices_of(self, count: int) -> list[float]:
        """The price for each of so many machines, 0 without one. Raises UserError unless there is one for all or for each."""
        prices = self.prices or [0.0]
        if len(prices) not in (1, count):
            raise UserError(f"--price_per_gpu_hour has {len(prices)} numbers for {count} machines: give one, or one for each")
        return prices * (count if len(prices) == 1 else 1)


def plan() -> CommandParser:
    parser = CommandParser("plan", "Forecasts whether a run fits, on which GPUs, and how long it takes; or chooses its config.")
    add_recipe(parser)
    parser.usage = f"{parser.prog} RECIPE [CONFIG] [options] [--flag value …]"
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)  # of ./launch.sh RECIPE, not for --plan
    parser.add_argument(
        "--for",
        dest="machines",
        metavar="MACHINES",
        type=read_machine_text,
        help='choose the config for these machines: "2x3090,64GB; 4xA100,nvlink"',
    )
    parser.add_argument("--within", metavar="TIME", type=read_hours, help="with --for: which machines finish in 12h, 90m or 2d")
    parser.add_argument(
        "--price_per_gpu_hour",
        dest="prices",
        metavar="N",
        type=read_prices,
        help='of several machines: "0.4; 1.5"',
    )
    parser.add_argument(
        "--card",
        dest="cards",
        metavar="NAME=GB,TFLOPS,GB/s",
        type=read_card,
        action="append",
        help="a GPU that is not known: memory, dense 16-bit TFLOPS, memory bandwidth",
    )
    add_json(parser)
    return parser


def read_arguments(words: Sequence[str]) -> PlanArguments:
    """`words`: [--start] [--tiny] RECIPE CONFIG…, as launch.sh passes them, then the flags of --plan and of the recipe."""
    arguments = plan().read(words, PlanArguments())
    rest = arguments.flags
    count = next((number for number, word in enumerate(rest) if not word.endswith(CONFIG_ENDINGS)), len(rest))
    arguments.configs, arguments.flags = rest[:count], rest[count:]
    if (arguments.within or len(arguments.prices) > 1) and not arguments.machines:
        raise UserError('--within and several prices are for the machines of --for: --for "1x4090; 2x3090"')
    if arguments.tiny and not arguments.start:
        raise UserError("--plan is about the full size: leave out --tiny")
    return arguments


def read_machine_text(text: str) -> str:
    if not text.strip():
        raise UserError('--for needs a machine, for example --for "2x3090,64GB"')
    return text


def read_prices(text: str) -> list[float]:
    """One positive number, or several with ";" between them."""
    prices = []
    for word in text.split(";"):
        try:
            price = float(word)
        except ValueError:
            price = 0.0
        if not 0 < price < math.inf:
            raise UserError(f"--price_per_gpu_hour is {word.strip()!r}, expected a number above 0")
        prices.append(price)
    return prices


def read_hours(text: str) -> float:
    """The hours of 12h, 90m, 2d or 12."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhd]?)", text.strip())
    if not match or not float(match[1]):
        raise UserError(f"--within is {text!r}, expected a time, for example 12h, 90m or 2d")
    return float(match[1]) * UNITS[match[2] or "h"]


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
