"""The arguments of launch.sh's commands, and their --help, except --plan.

`python3 -m harness.commands.parsers COMMAND WORD…` checks the words, or prints the help. It needs the standard library only, so
that launch.sh can call it before anything is installed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.messages import UserError, exit_on_user_error


class CommandParser(argparse.ArgumentParser):
    """Parses the words after `./launch.sh --COMMAND`. Wrong usage is a UserError."""

    has_recipe = False

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"./launch.sh --{command}", description=description, allow_abbrev=False)

    def read(self, words: Sequence[str], namespace: Any = None) -> Any:
        """The values of the arguments. Of a command with a RECIPE, `flags` are the words that are flags of the recipe."""
        if not self.has_recipe:
            return self.parse_intermixed_args(words, namespace)
        values, values.flags = self.parse_known_args(words, namespace)
        return values

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def folder(text: str) -> Path:
    """A folder that exists: another name would be looked for on the Hub, which takes long."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


def existing(text: str) -> Path:
    """A file or folder that exists: it is opened only once a model is loaded."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return Path(text)


def chat() -> CommandParser:
    parser = CommandParser("chat", "Chats with the model of a finished run; also a QLoRA adapter, without a merge.")
    parser.add_argument("run", metavar="RUN", type=folder, help="the output directory of a finished run")
    parser.add_argument("--max_new_tokens", metavar="N", type=int, default=512, help="the longest answer, default %(default)s")
    parser.add_argument(
        "--system", metavar="TEXT", help="the system message; without the flag that of the training rows, if all have the same"
    )
    parser.add_argument(
        "--image", metavar="FILE", type=existing, action="append", help="an image to ask about; also several times"
    )
    return parser


def merge() -> CommandParser:
    parser = CommandParser("merge", "Merges an adapter into its base model, or a sharded checkpoint into one model.")
    parser.epilog = "To upload it: .venv/bin/hf upload OWNER/NAME OUT"
    parser.add_argument("run", metavar="RUN", type=folder, help="the folder of a run or of a checkpoint")
    parser.add_argument("out", metavar="OUT", nargs="?", help="the folder to write, default RUN/merged")
    parser.add_argument(
        "--original_weights",
        action="store_true",
        help="add an adapter that was trained on 4-bit weights to the original ones, as a server does that loads these with it",
    )
    return parser


def prepare() -> CommandParser:
    parser = CommandParser("prepare", "Downloads everything a run needs; afterwards it trains without internet.")
    add_recipe(parser)
    return parser


def preview() -> CommandParser:
    parser = CommandParser("preview", "Shows the rows as the model will see them, and which tokens count in the loss.")
    add_recipe(parser)
    add_json(parser)
    return parser


def report() -> CommandParser:
    parser = CommandParser("report", "Compares finished runs with each other.")
    parser.add_argument("paths", metavar="RUN", type=folder, nargs="+", help="output directories of runs")
    add_json(parser)
    return parser


def verify() -> CommandParser:
    parser = CommandParser("verify", "Compares what was trained with what is saved, merged or quantized.")
    parser.add_argument("run", metavar="RUN", type=folder, help="the output directory of a finished run")
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        type=existing,
        help="the folder of a model, or a GGUF file that was made of it; default RUN/merged if it exists",
    )
    add_json(parser)
    return parser


def add_recipe(parser: CommandParser) -> None:
    """Adds RECIPE. What the parser does not know are flags of the recipe."""
    parser.has_recipe = True
    parser.usage = f"{parser.prog} [--tiny] RECIPE [options] [--flag value …]"
    parser.epilog = "All other flags are those of the recipe: ./launch.sh RECIPE --help"
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="the name or path of a recipe")
    parser.add_argument("--tiny", action="store_true", help="use the tiny model and dataset of a rehearsal")


def add_json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


PARSERS = {parser.__name__: parser for parser in (chat, merge, prepare, preview, report, verify)}

if __name__ == "__main__":
    with exit_on_user_error():
        PARSERS[sys.argv[1]]().read(sys.argv[2:])
