"""From the command line to a checked run and its processes. Called by launch.sh:

`python -m harness.start.launch [--tiny] [--prepare | --preview] RECIPE.py [CONFIG.yaml] [--flag value …]`.
"""

import signal

from harness.nodes import signals

if __name__ == "__main__":
    signals.interrupt(signal.SIG_DFL)  # while modules are imported

import dataclasses
import hashlib
import itertools
import logging
import os
import shlex
import sys
import warnings
from pathlib import Path

from harness import configs, folder, hub, launched
from harness.launched import Checked, Launched, fail
from harness.nodes import machines, slurm
from harness.start import checks, flags, loading, processes, server, worker


def main(options: list[str], recipe: str, *arguments: str):
    launch = Launched(recipe=recipe, tiny="--tiny" in options, command="".join(options).replace("--tiny", "")[2:])
    if not launch.command:
        launch.config, *arguments = arguments
    if "--help" in arguments or "-h" in arguments:
        return launched.say(flags.help_text(Path(recipe)))
    flags.check(Path(recipe), list(arguments))
    config, nodes = configs.read(launch.config), machines.from_environment()
    if not launch.command:
        _fit(config, nodes, launch)
        if nodes.is_allocation:
            sys.exit(slurm.run(nodes, sys.argv[1:]))
    _prepare_environment(launch)
    server.prepare()
    warnings.filterwarnings("ignore")  # in the launcher; the processes that train show theirs
    if launch.command != "preview":
        code, chosen = processes.call(loading.choose)
        if chosen is None:
            sys.exit(processes.ended(code))
        launch.attention, launch.torch_loss = chosen
    if launch.command:
        _check(dataclasses.replace(launch, on_cpu=True), arguments)  # a GPU need not be there
    elif nodes.count == 1:
        held = folder.lock(Path(_check(launch, arguments, config)[0]))  # noqa: F841 (as long as this process lives)
        sys.exit(processes.run(recipe, arguments, _accelerate(launch, config)))
    else:
        _on_several(nodes, config, launch, options, arguments)


def _on_several(nodes: machines.Nodes, config: dict, launch: Launched, options: list[str], arguments: list[str]):
    """Meets the launchers of the other nodes, checks in turn, and runs this node's processes."""
    from harness.nodes import network
    from harness.nodes.meeting import Meeting

    launched.node = f"node {nodes.rank}: " if nodes.rank else ""
    facts = {"command": shlex.join([*options, Path(launch.recipe).stem, Path(launch.config).stem, *arguments])}
    facts["attention of its GPUs"] = launch.attention
    facts["NPROC_PER_NODE"] = launch.processes // launch.nodes
    for path in (launch.recipe, launch.config):
        facts[f"{Path(path).name} of digest"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
    with Meeting(nodes, facts) as meeting:
        output_dir, saves = meeting.in_turn(lambda: _check(launch, arguments, config))
        if saves and not meeting.share(Path(output_dir)):
            fail(
                f"{output_dir} is not the same folder on all nodes, so their checkpoints could not be put together: "
                "give an --output_dir on a file system that all nodes share, or --save_strategy no"
            )
        command = [*_accelerate(launch, config), "--machine_rank", str(nodes.rank), "--main_process_ip", nodes.head]
        command += ["--same_network", "--main_process_port", str(meeting.port()), "--rdzv_backend", "static"]  # NODE_RANK's order
        held = folder.lock(Path(output_dir)) if nodes.rank == 0 else None  # noqa: F841 (not before all have checked)
        if found := network.interface(meeting.peer()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)  # gloo would take what the machine's own name resolves to
        if os.environ.get("TORCH_CPP_LOG_LEVEL") == "FATAL":  # meant for the meeting
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        sys.exit(meeting.run(lambda: processes.run(launch.recipe, arguments, command)))


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


def _check(launch: Launched, arguments: list[str], config: dict | None = None) -> tuple[str, bool]:
    """Checks the run in a process of its own, which may use a GPU. Ends this one unless everything is in order.

    Sets `launch.on_cpu`. Returns the run's folder, and whether it will hold checkpoints.
    """
    code, answer = processes.call(_checked, launch, arguments, config, launched.node)
    signals.handle(processes.stop)
    if answer is None:
        sys.exit(processes.ended(code))
    if signals.received:  # and the check had ended before it could hear of it
        processes.stop(signals.received, None)
    launch.on_cpu, *rest = answer
    return tuple(rest)


def _checked(launch: Launched, arguments: list[str], config: dict | None, node: str) -> tuple[bool, str, bool]:
    """Runs the recipe up to the end of `parse`."""
    launched.node = node
    warnings.filterwarnings("ignore")
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what is wrong with a file is said in one line
    if config:
        _hardware(config, launch, "--use_cpu" in arguments)
    checks.versions()
    checks.shared_memory(launch)
    os.environ.update(dataclasses.replace(launch, checking=True).to_environment())
    try:
        worker.recipe(launch.recipe, arguments)
    except Checked as checked:
        args = checked.args[0]
        return launch.on_cpu, args.output_dir, args.save_strategy != "no"
    fail(f"{Path(launch.recipe).name} ended without calling parse(): is it a recipe?")


def _hardware(config: dict, launch: Launched, use_cpu: bool = False):
    """Sets `on_cpu`, or fails when this machine cannot do its part."""
    name, gpus = Path(launch.config).name, launch.processes // launch.nodes
    if not use_cpu and checks.gpu_count() >= gpus:
        return checks.bf16(config, name, gpus)
    if not (launch.tiny or use_cpu):
        wanted = f"{gpus} GPU{'s' * (gpus > 1)}"
        fail(f"{name} needs {wanted}, and this machine has {checks.gpu_count() or 'none'}. {_rehearsal(launch)}")
    launch.on_cpu = True


def _prepare_environment(launch: Launched):
    """What the libraries read while they are imported, and what every process should find."""
    os.environ.pop("PYTHONSAFEPATH", None)  # a recipe may import what lies beside it
    os.environ["PYTHONUNBUFFERED"] = "1"  # losses reach a log file when they are known
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less of a GPU's memory is lost between blocks
    os.environ.setdefault("LOGLEVEL", "ERROR")  # torchrun's: it warns about every signal it passes on
    if launch.tiny:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    elif "HF_HUB_OFFLINE" not in os.environ and not hub.answers():
        os.environ["HF_HUB_OFFLINE"] = "1"  # or every process would try for long, again and again


def _accelerate(launch: Launched, config: dict) -> list[str] | None:
    """The arguments of `accelerate launch`, None for one plain process; sets what the processes find in their environment."""
    os.environ.update(launch.to_environment())
    # accelerate gives every process one thread; an optimizer on the CPU (offload) needs every core, a rehearsal only one.
    threads = 1 if launch.on_cpu else max(1, machines.cores() * launch.nodes // launch.processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if launch.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with too few GPUs is as good as one without
    if config["distributed_type"] == "NO":
        # One process that sees several GPUs would be given nn.DataParallel by transformers.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return None
    command = ["--config_file", launch.config, "--num_processes", str(launch.processes)]
    return [*command, "--num_machines", str(launch.nodes), "--main_process_port", "0"]


def _rehearsal(launch: Launched) -> str:
    names = " ".join(shlex.quote(Path(path).stem) for path in (launch.recipe, launch.config))
    return f"Rehearse it here, on tiny stand-ins: ./launch.sh --tiny {names}"


if __name__ == "__main__":
    options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
    code = 0
    signals.handle(processes.stop)
    signals.interrupt(signal.default_int_handler)
    try:
        main(options, *sys.argv[1 + len(options) :])
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    server.leave(code or 0)
