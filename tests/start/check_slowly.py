"""A recipe for test_plain_launchers.py: the checks of the first process take longer than an all-reduce may."""

import functools
import runpy
import time
from pathlib import Path
from typing import Any

from harness.nodes import network
from harness.start import training

training.check_all_reduce = functools.partial(network.check_all_reduce, seconds=4)
check_and_claim_run = training.check_and_claim_run


def check_slowly(*args: Any) -> dict[str, Any]:
    time.sleep(8)
    return check_and_claim_run(*args)


training.check_and_claim_run = check_slowly
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
