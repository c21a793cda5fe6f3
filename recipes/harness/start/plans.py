"""The plan of a run, from the command that made it to the run: `--plan`, or `./launch.sh RECIPE` when it chose the config.

It is kept in $HF_HOME/plans. At the start of the run that it is about, it is copied into the output directory as plan.json, with
which the run compares itself at its end.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from harness.contexts import Context
from harness.folder import write_json
from harness.run.forecast import PLAN
from harness.start.flags import without


def plan_file(context: Context, arguments: list[str]) -> Path:
    """Where the plan of a run is kept: by recipe, config, number of processes and nodes, and the flags, in any order."""
    from huggingface_hub.constants import HF_HOME

    recipe, config = Path(context.recipe), Path(context.config.path)
    arguments = without("output_dir", arguments)  # a plan is the same without it
    starts = [place for place, word in enumerate(arguments) if word.startswith("--")]
    flags = sorted(arguments[start:end] for start, end in itertools.pairwise([*starts, len(arguments)]))
    digest = hashlib.sha256(json.dumps([context.processes, context.nodes, flags]).encode())
    for path in (recipe, config):
        digest.update(path.read_bytes())
    return Path(HF_HOME, "plans", f"{recipe.stem}-{config.stem}-{digest.hexdigest()[:16]}-plan.json")


def keep_plan(plan: dict[str, Any], context: Context, arguments: list[str]) -> None:
    """Writes a plan to where the run finds it. A folder that cannot be written is no error."""
    file = plan_file(context, arguments)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, plan)


def copy_plan(context: Context, arguments: list[str], output_dir: Path) -> None:
    """Copies the plan of a run, if there is one, into its folder, and deletes that of an earlier start."""
    (output_dir / PLAN).unlink(missing_ok=True)
    if not context.tiny:
        with contextlib.suppress(OSError):  # mostly: there is none
            shutil.copyfile(plan_file(context, arguments), output_dir / PLAN)
