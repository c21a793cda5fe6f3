"""What the launcher tells the processes of a run that it starts, and how they tell it that the run has ended.

torch's elastic agent starts all processes again when one of them has failed, if restarts are left. That is right after a crash,
and wrong after a message to the user, or after a signal. So a process whose end is final writes its exit code into a folder that
the launcher has made, and a process that is started again ends at once.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from harness.signals import exit_with_parent, last_signal, set_interrupt_handler

VARIABLE = "HARNESS_LAUNCHED"  # the environment variable with the JSON of `Launched`
# Names in the folder: a process has begun; the code for the shell; the number of a signal that the launcher got. The numbers are
# targets of links: a link is written completely or not at all, and needs no space on a disk that is full.
STARTED = "started"
EXIT_CODE = "exit_code"
STOPPED = "stopped"


@dataclasses.dataclass(frozen=True)
class Launched:
    """How the launcher was called."""

    config: str  # path of the Accelerate config
    tiny: bool  # a rehearsal
    nodes: int
    launcher: int  # its process
    folder: str  # for EXIT_CODE and STOPPED

    def variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


_launched: Launched | None = None


def launched() -> Launched | None:
    """None in a process that something else has started: torchrun, `accelerate launch`, python, another command."""
    return _launched


def begin() -> None:
    """What a process of a run does before its imports. Ends it if the run has ended."""
    global _launched
    if VARIABLE not in os.environ:
        return
    _launched = Launched(**json.loads(os.environ.pop(VARIABLE)))  # programs that the recipe starts are none of its processes
    exit_with_parent(_launched.launcher)
    folder = Path(_launched.folder)
    with contextlib.suppress(OSError):
        (folder / STARTED).touch()
    if read_number(folder / EXIT_CODE) is not None:
        os._exit(0)
    if (number := read_number(folder / STOPPED)) is not None:
        os._exit(128 + number)
    set_interrupt_handler(_exit_quietly)


def end_of_imports() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again, which the harness turns into an exit code."""
    if _launched:
        set_interrupt_handler(signal.default_int_handler)


def record_end(code: int) -> None:
    """Makes `code` the exit code of the run, unless it has one. No process is started again afterwards."""
    if _launched:
        write_number(Path(_launched.folder, EXIT_CODE), code)


def has_ended() -> bool:
    """Whether a process of this node has recorded the end of the run."""
    return _launched is not None and read_number(Path(_launched.folder, EXIT_CODE)) is not None


def write_number(path: Path, number: int) -> None:
    """Writes a number for the launcher and its processes, unless there is one. If it cannot, the run ends without it."""
    with contextlib.suppress(OSError):
        path.symlink_to(str(number))


def read_number(path: Path) -> int | None:
    """A number that was written, None if there is none."""
    if path.is_symlink():
        return int(path.readlink().name)
    return None


def end_run(code: int | None) -> NoReturn:
    """Ends a process whose run ends: all processes have agreed on it, and each of them calls this.

    `code`: None if another process has failed, which exits with a code of its own.
    """
    if code is None:
        sys.exit(0 if _launched else 1)
    record_end(code)
    sys.exit(0 if _launched else code)


def _exit_quietly(number: int, frame: FrameType | None) -> None:
    record_end(128 + (last_signal() or number))
    os._exit(128 + number)
