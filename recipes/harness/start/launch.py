"""Checks a run in one process, then becomes `accelerate launch`. Called by launch.sh:

`python -m harness.start.launch [--tiny] RECIPE.py CONFIG.yaml [--flag value …]`, or
`python -m harness.start.launch [--tiny] --quantize RECIPE.py [--flag value …]`.
"""

import hashlib
import itertools
import os
import runpy
import shlex
import sys
import warnings
from pathlib import Path

from harness import configs, launched
from harness.launched import Checked, Launched, fail
from harness.nodes import machines, signals, slurm
from harness.start import checks, flags


def main(options: list[str], recipe: str, *arguments: str):
    launch = Launched(recipe=recipe, tiny="--tiny" in options, quantize="--quantize" in options)
    if not launch.quantize:
        launch.config, *arguments = arguments
    if "--help" in arguments or "-h" in arguments:
        return print(flags.help_text(Path(recipe)))
    flags.check(Path(recipe), list(arguments))
    if launch.quantize:
        launch.on_cpu = True  # layer by layer in host RAM; a GPU need not be there
        _check(launch, arguments)
        return None
    config, nodes = configs.read(launch.config), machines.from_environment()
    _fit(config, nodes, launch)
    if nodes.is_allocation:
        sys.exit(slurm.run(nodes, sys.argv[1:]))
    if nodes.count == 1:
        _check(launch, arguments, config)
        command, environment = _command(launch, config)
        os.execve(sys.executable, [*command, recipe, *arguments], environment)

    from harness.nodes import network
    from harness.nodes.meeting import Meeting

    launched.node = f"node {nodes.rank}: " if nodes.rank else ""
    facts = {"command": shlex.join([*options, Path(recipe).stem, Path(launch.config).stem, *arguments])}
    facts["NPROC_PER_NODE"] = launch.processes // launch.nodes
    for path in (recipe, launch.config):
        facts[f"{Path(path).name} of digest"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
    signals.handle(lambda number, frame: sys.exit(128 + number))  # so that the others learn of it
    with Meeting(nodes, facts) as meeting:
        args = meeting.in_turn(lambda: _check(launch, arguments, config))
        if args.save_strategy != "no" and not meeting.share(Path(args.output_dir)):
            fail(
                f"{args.output_dir} is not the same folder on all nodes, so their checkpoints could not be put together: "
                "give an --output_dir on a file system that all nodes share, or --save_strategy no"
            )
        command, environment = _command(launch, config)
        command += ["--machine_rank", str(nodes.rank), "--main_process_ip", nodes.head, "--same_network"]
        command += ["--rdzv_backend", "static", "--main_process_port", str(meeting.port())]  # ranks follow NODE_RANK
        if found := network.interface(meeting.peer()):
            environment.setdefault("GLOO_SOCKET_IFNAME", found)  # gloo would take what the machine's own name resolves to
        if environment.get("TORCH_CPP_LOG_LEVEL") == "FATAL":  # meant for the meeting
            del environment["TORCH_CPP_LOG_LEVEL"]
        sys.exit(meeting.run([*command, recipe, *arguments], environment))


def _fit(config: dict, nodes: machines.Nodes, launch: Launched):
    """Sets how many processes and nodes run `config`, or fails when these are not the machines for it."""
    name, wanted = Path(launch.config).name, config["num_machines"]
    gpus = nodes.processes or config["num_processes"] // wanted  # on each machine
    here = f"{'are' if nodes.count > 1 else 'is'} {nodes.count} node{'s' * (nodes.count > 1)}"
    if nodes.count == 1 < wanted:
        if not launch.tiny:
            fail(
                f"{name} is for {wanted} machines with {gpus} GPU{'s' * (gpus > 1)} each, this is one: start it on each with "
                f"NNODES={wanted} NODE_RANK=… MASTER_ADDR=…, or with sbatch --nodes {wanted}. {_rehearsal(launch)}"
            )
        gpus = nodes.processes or config["num_processes"]  # a rehearsal: every process on this machine
    if config["distributed_type"] == "NO":
        if nodes.count > 1:
            fail(f"{name} trains on one GPU of one machine, and here are {nodes.count} nodes: choose a config that shards")
        gpus = 1
    launch.nodes, launch.processes = nodes.count, nodes.count * gpus
    replicas, shards = configs.mesh(config)
    if replicas * shards > 1 and (launch.processes != replicas * shards or nodes.count not in (1, replicas)):
        fail(
            f"{name} shards over {shards} GPUs of each of {replicas} nodes; here {here} with {gpus} GPU{'s' * (gpus > 1)} each: "
            "ask for others (NPROC_PER_NODE decides over the GPUs), or change parallelism_config in a copy of it"
        )


def _check(launch: Launched, arguments: list[str], config: dict | None = None):
    """Runs the recipe up to the end of `parse`, in this process; returns its training arguments."""
    if config:
        _hardware(config, launch)
    checks.versions()
    before, path = dict(os.environ), list(sys.path)  # transformers writes its own settings into the environment
    sys.path.insert(0, str(Path(launch.recipe).parent))
    launch.checking = True
    os.environ.update(launch.to_environment())
    sys.argv = [launch.recipe, *arguments]
    try:
        runpy.run_path(launch.recipe, run_name="__main__")
    except Checked as checked:
        return checked.args[0]
    finally:
        launch.checking = False
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)
    fail(f"{Path(launch.recipe).name} ended without calling parse(): is it a recipe?")


def _hardware(config: dict, launch: Launched):
    """Sets `on_cpu`, or fails when this machine cannot do its part."""
    name, gpus = Path(launch.config).name, launch.processes // launch.nodes
    if checks.gpu_count() >= gpus:
        return checks.bf16(config, name, gpus)
    if not launch.tiny:
        wanted = f"{gpus} GPU{'s' * (gpus > 1)}"
        fail(f"{name} needs {wanted}, and this machine has {checks.gpu_count() or 'none'}. {_rehearsal(launch)}")
    launch.on_cpu = True


def _command(launch: Launched, config: dict) -> tuple[list[str], dict]:
    """What starts the processes of this machine, without the recipe and its flags, and its environment."""
    environment = os.environ | launch.to_environment()
    environment.pop("PYTHONSAFEPATH", None)  # a recipe may import what lies beside it
    environment["PYTHONUNBUFFERED"] = "1"  # losses reach a log file when they are known
    if launch.tiny:
        environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # accelerate gives every process one thread; an optimizer on the CPU (offload) needs every core, a rehearsal only one.
    threads = 1 if launch.on_cpu else max(1, _cores() * launch.nodes // launch.processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("LOGLEVEL", "ERROR")  # torchrun's: it warns about every signal it passes on
    if config["distributed_type"] == "NO":
        # One process that sees several GPUs would be given nn.DataParallel by transformers.
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return [sys.executable], environment
    environment["PYTHONSAFEPATH"] = "1"  # for accelerate's own process; spawn.py takes it back for the recipe
    command = [sys.executable, "-m", "harness.start.processes", "--config_file", launch.config]
    command += ["--num_processes", str(launch.processes), "--num_machines", str(launch.nodes), "--main_process_port", "0"]
    return command, environment


def _rehearsal(launch: Launched) -> str:
    names = " ".join(shlex.quote(Path(path).stem) for path in (launch.recipe, launch.config))
    return f"Rehearse it here, on tiny stand-ins: ./launch.sh --tiny {names}"


def _cores() -> int:
    """Physical cores this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(psutil.cpu_count(logical=False) or usable, usable)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
    try:
        main(options, *sys.argv[1 + len(options) :])
    except KeyboardInterrupt:
        sys.exit(130)
