"""A recipe for test_plain_launchers.py: the checks of the first process take longer than an all-reduce may."""

import functools
import runpy
import time
from pathlib import Path
from typing import Any

from harness.nodes import network
from harness.start import recipes

recipes.check_all_reduce = functools.partial(network.check_all_reduce, seconds=4)
claim_run = recipes.claim_run


def claim_slowly(*args: Any) -> recipes.Claim:
    time.sleep(8)
    return claim_run(*args)


recipes.claim_run = claim_slowly
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
