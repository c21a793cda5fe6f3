"""Private names of Python's standard library."""

from harness.compat.guards import changes


@changes("atexit:_run_exitfuncs")
def run_exit_handlers() -> None:
    """Runs what was registered with `atexit`.

    multiprocessing ends its processes with `os._exit`, which leaves these functions out. Trackers such as wandb finish a run
    in them.
    Upstream: python/cpython#83856, fixed in Python 3.13.
    Checked with: Python 3.11, 3.12 and 3.13.
    Remove when: Python 3.13 is the oldest supported version.
    """
    import atexit

    atexit._run_exitfuncs()
