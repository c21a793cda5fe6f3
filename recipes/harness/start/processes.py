"""`accelerate launch` without its own tracebacks: what a process printed stands alone, and one line says how it ended."""

import logging
import os
import signal
import sys

from harness.launched import Launched
from harness.nodes.network import LOST
from harness.nodes.signals import OUT_OF_TIME, SIGNALS, die_with_parent, handle


def main():
    import psutil
    from accelerate.commands.launch import main as accelerate_launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.pop("PYTHONSAFEPATH", None)  # a recipe may import what lies beside it

    def pass_on(number, frame):
        children = psutil.Process().children()
        for child in children:
            child.send_signal(number)
        if not children:
            sys.exit(128 + number)

    # torchrun would kill the processes 30 s after a SIGTERM; they leave by themselves once their checkpoint is written.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    handle(pass_on)
    # How each process ended is said below, in one line.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        accelerate_launch()
    except (KeyboardInterrupt, SignalException) as stopped:
        number = getattr(stopped, "sigval", signal.SIGINT)
        if number != signal.SIGINT:  # Ctrl-C reaches the processes too, and the first of them says where it stopped
            name = signal.Signals(number).name
            print(f"Stopped by {name}. The same command goes on from the newest checkpoint.", file=sys.stderr)
        sys.exit(128 + number)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        if -failure.exitcode in SIGNALS:
            print(f"Stopped by {signal.Signals(-failure.exitcode).name} before the training began.", file=sys.stderr)
        elif code not in {2, LOST, OUT_OF_TIME, *(128 + number for number in SIGNALS)}:  # those have said why, in one line
            print(f"error: process {rank} failed first (exit code {code}); see what it printed above", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    if Launched.from_environment().nodes > 1:
        die_with_parent()  # the launcher, which watches over the nodes; on one node there is only the user's shell
    main()
