"""What the launcher tells the processes of a run that it starts, and how they tell it that the run has ended.

torch's elastic agent starts all processes again when one of them has failed, if restarts are left. That is right after a crash,
and wrong after a message to the user, or after a signal. So a process whose end is final writes its exit code into a folder that
the launcher has made, and a process that is started again ends at once.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch reads the second one if there is no first one
GROWING = "expandable_segments:True"  # of PYTORCH_ALLOC_CONF: less fragmentation of GPU memory

VARIABLE = "HARNESS_LAUNCHED"  # the environment variable with the JSON of `Launched`
# Names in the folder: a process has begun; the code for the shell; the number of a signal that the launcher got. The numbers are
# targets of links: a link is written completely or not at all, and needs no space on a disk that is full.
STARTED = "started"
EXIT_CODE = "exit_code"
STOPPED = "stopped"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
OUT_OF_TIME = 75  # exit code after SIGUSR1 when there is a checkpoint: start the run again (EX_TEMPFAIL)


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


def end_run(code: int | None, fails: bool = False) -> NoReturn:
    """Ends a process whose run ends: all processes have agreed on it, and each of them calls this.

    `code`: None if another process has failed, which exits with a code of its own. `fails`: that process is on another node.
    With 0, torch's agent would wait 300 s for the agent there; on its own node, with another code, kill it before its message.
    """
    if code is None:
        code = 3 if fails else 1  # 3 is LOST: the launcher of this node prints nothing
    else:
        record_end(code)
    sys.exit(0 if _launched and not fails else code)


def _exit_quietly(number: int, frame: FrameType | None) -> None:
    record_end(128 + (last_signal() or number))
    os._exit(128 + number)


Handler = Callable[[int, FrameType | None], None] | signal.Handlers

_last_signal = 0  # a signal reaches the whole process, so its number is kept per process


def last_signal() -> int:
    """The number of the last signal that was recorded, 0 if there was none."""
    return _last_signal


def record_signal(number: int, frame: FrameType | None = None) -> None:
    """A signal handler that only records the signal. `run/stopping.py` stops all processes after the same step."""
    global _last_signal
    _last_signal = number


def set_signal_handler(handler: Handler) -> None:
    """Sets the handler of all of SIGNALS."""
    for number in SIGNALS:
        signal.signal(number, handler)


def set_interrupt_handler(handler: Handler) -> None:
    """Sets the handler of Ctrl-C, unless it is ignored, as a shell does for jobs in the background."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent is killed, so that it does not keep GPUs and the output directory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent was killed before the call above
            os._exit(128 + signal.SIGKILL)


def own_allocator_settings() -> str:
    """How the user makes PyTorch allocate memory, "" if that is left to this project."""
    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), GROWING)
    if settings == GROWING:
        return ""
    return settings
