"""Checks a run in one process, then becomes `accelerate launch`. Called by launch.sh:

`python -m harness.launch [--tiny] RECIPE.py CONFIG.yaml [--flag value …]`, or
`python -m harness.launch [--tiny] --quantize RECIPE.py [--flag value …]`.
"""

import itertools
import os
import runpy
import shlex
import sys
import warnings
from pathlib import Path

from harness import checks, configs, flags
from harness.launched import Checked, Launched, fail


def main(options: list[str], recipe: str, *arguments: str):
    launched = Launched(recipe=recipe, tiny="--tiny" in options, quantize="--quantize" in options)
    if not launched.quantize:
        launched.config, *arguments = arguments
    if "--help" in arguments or "-h" in arguments:
        return print(flags.help_text(Path(recipe)))
    flags.check(Path(recipe), list(arguments))
    if launched.quantize:
        launched.on_cpu = True  # layer by layer in host RAM; a GPU need not be there
    else:
        config = configs.read(launched.config)
        launched.processes = config["num_processes"]
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
    if launched.quantize:
        return None
    environment |= launched.to_environment()
    if launched.tiny:
        environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # accelerate gives every process one thread; an optimizer on the CPU (offload) needs every core, a rehearsal only one.
    threads = 1 if launched.on_cpu else max(1, _cores() // launched.processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("LOGLEVEL", "ERROR")  # torchrun's: it warns about every signal it passes on
    command = [sys.executable]
    if config["distributed_type"] == "NO":
        # One process that sees several GPUs would be given nn.DataParallel by transformers.
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    else:
        environment["PYTHONSAFEPATH"] = "1"  # for accelerate's own process; spawn.py takes it back for the recipe
        command += ["-m", "harness.spawn", "--config_file", launched.config, "--num_machines", "1", "--main_process_port", "0"]
    os.execve(sys.executable, [*command, recipe, *arguments], environment)


def _hardware(config: dict, launched: Launched):
    """Sets `on_cpu`, or fails when the machine cannot run `config`."""
    name = Path(launched.config).name
    machines, gpus = config["num_machines"], launched.processes // config["num_machines"]
    wanted = f"{gpus} GPU{'s' * (gpus > 1)}"
    if not launched.tiny and machines > 1:
        fail(f"{name} is for {machines} machines with {wanted} each, this is one. {_rehearsal(launched)}")
    if launched.tiny:
        config["num_machines"], gpus = 1, launched.processes  # every process on this machine
    if checks.gpu_count() >= gpus:
        return checks.bf16(config, name)
    if not launched.tiny:
        fail(f"{name} needs {wanted}, and this machine has {checks.gpu_count() or 'none'}. {_rehearsal(launched)}")
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
    options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
    main(options, *sys.argv[1 + len(options) :])
