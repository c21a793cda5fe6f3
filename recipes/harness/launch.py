"""Checks a run in one process, then becomes `accelerate launch`. Called by launch.sh.

python -m harness.launch [--tiny] RECIPE.py CONFIG.yaml [--flag value …]
"""

import os
import runpy
import shlex
import sys
import warnings
from pathlib import Path

from harness import checks, configs, flags
from harness.launched import Checked, Launched, fail


def main(tiny: bool, recipe: str, config_path: str, *arguments: str):
    if "--help" in arguments or "-h" in arguments:
        return print(flags.help_text(Path(recipe)))
    flags.check(Path(recipe), list(arguments))
    config = configs.read(config_path)
    launched = Launched(recipe=recipe, config=config_path, processes=config["num_processes"], tiny=tiny)
    _hardware(config, launched)
    checks.versions()

    environment = dict(os.environ)  # before transformers writes its own settings into it
    environment.pop("PYTHONSAFEPATH", None)  # a recipe may import what lies beside it
    sys.path.insert(0, str(Path(recipe).parent))
    launched.checking = True
    os.environ.update(launched.to_environment())
    sys.argv = [recipe, *arguments]
    try:
        runpy.run_path(recipe, run_name="__main__")
        fail(f"{Path(recipe).name} ended without calling parse(): is it a recipe?")
    except Checked:
        launched.checking = False
    environment |= launched.to_environment()
    if tiny:
        environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # accelerate gives every process one thread; an optimizer on the CPU (offload) needs every core.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // launched.processes)))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_path]
    command += ["--num_machines", "1", "--main_process_port", "0"]
    os.execve(sys.executable, [*command, recipe, *arguments], environment)


def _hardware(config: dict, launched: Launched):
    """Sets `on_cpu`, or fails when the machine cannot run `config`."""
    name = Path(launched.config).name
    wanted = f"{config['num_machines']} machine(s) with {launched.processes // config['num_machines']} GPU(s)"
    if not launched.tiny and config["num_machines"] > 1:
        fail(f"{name} is for {wanted} each. {_rehearsal(launched)}")
    if launched.tiny:
        config["num_machines"] = 1  # every process on this machine
    if checks.gpus(config):
        return checks.bf16(config, name)
    if not launched.tiny:
        fail(f"{name} is for {wanted}, this machine has fewer. {_rehearsal(launched)}")
    launched.on_cpu = True


def _rehearsal(launched: Launched) -> str:
    names = " ".join(shlex.quote(Path(path).stem) for path in (launched.recipe, launched.config))
    return f"Rehearse it here, on tiny stand-ins: ./launch.sh --tiny {names}"


def _cores() -> int:
    """Physical cores this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(psutil.cpu_count(logical=False) or usable, usable)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    is_tiny = sys.argv[1] == "--tiny"
    main(is_tiny, *sys.argv[1 + is_tiny :])
