"""From the command line to a checked run and its processes. launch.sh calls it:

`python -m harness.start.launch [--tiny] RECIPE.py CONFIG.yaml [--flag value …]`.
"""

import signal

from harness.signals import set_interrupt_handler

if __name__ == "__main__":
    set_interrupt_handler(signal.SIG_DFL)  # while modules are imported

import ast
import contextlib
import hashlib
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness import configs, folder, hub
from harness.configs import AccelerateConfig
from harness.contexts import CheckedRun, Context
from harness.messages import NODE_VARIABLE, UserError, exit_on_user_error, plural, print_once
from harness.nodes.cluster import Nodes, nodes_from_environment, record_exit_code, run_with_srun
from harness.nodes.hardware import physical_cores
from harness.nodes.network import interface_of
from harness.nodes.variables import integer_from_environment
from harness.signals import set_signal_handler
from harness.start import flags, processes
from harness.start.plans import copy_plan

if TYPE_CHECKING:
    from harness.nodes.meeting import Meeting

T = TypeVar("T")


def main(words: list[str]) -> int:
    """Checks a run, then trains on this node. In a SLURM allocation, it starts itself on every node with srun instead.

    `words`: [--tiny] RECIPE CONFIG, then the flags of the recipe. Returns the exit code.
    """
    options = [word for word in words[:1] if word == "--tiny"]
    recipe, config_path, *arguments = words[len(options) :]
    if "--help" in arguments or "-h" in arguments:
        print_once(flags.help_text(Path(recipe)))
        return 0
    flags.check_flags(Path(recipe), arguments)
    config, nodes = configs.read(config_path), nodes_from_environment()
    context = Context(recipe, config, nodes=nodes.count, min_nodes=nodes.min_count, tiny=options == ["--tiny"])
    context.processes = count_processes(context, nodes)
    if nodes.is_allocation:
        return run_with_srun(nodes, words)
    set_environment(context.tiny, config.gpu_ids)
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():  # the latter is its older name
        os.environ["PYTORCH_ALLOC_CONF"] = allocator_settings(config, Path(recipe), arguments)
    method = processes.start_server()
    warnings.filterwarnings("ignore")  # in the launcher only
    context.attention, context.no_flash, context.no_triton, context.gpu_problem = ask_process(method, gpu_features)
    if nodes.count > 1:
        return train_on_several_nodes(nodes, context, options, arguments, method)
    checked = ask_process(method, run_check, context, arguments)
    # Not in a `with`: after an error it stays locked until this process exits.
    held = folder.lock_run(Path(checked.output_dir), checked.identity)
    copy_plan(context, arguments, Path(checked.output_dir))
    code = train(method, context, checked, arguments)
    held.release()
    return code


def count_processes(context: Context, nodes: Nodes) -> int:
    """How many processes run a config on all nodes. Raises UserError if these are not the machines for it."""
    config = context.config
    gpus = nodes.processes or config.num_processes // config.num_machines  # per machine
    if nodes.count == 1 < config.num_machines:
        if not context.tiny:
            raise UserError(
                f"{config.name} is for {config.num_machines} machines with {plural(gpus, 'GPU')} each, this is one: start it on "
                f"each with NNODES={config.num_machines} NODE_RANK=… MASTER_ADDR=…, or with sbatch --nodes "
                f"{config.num_machines}. {context.rehearsal_hint}"
            )
        gpus = nodes.processes or config.num_processes  # a rehearsal runs all processes on this machine
    if config.distributed_type == "NO":
        if nodes.count > 1:
            raise UserError(
                f"{config.name} trains on one GPU of one machine, but there are {nodes.count} nodes: use another config"
            )
        if integer_from_environment("NPROC_PER_NODE", 1) > 1:
            raise UserError(
                f"{config.name} trains on one GPU, but NPROC_PER_NODE is {gpus}: leave it out, or use a config for several GPUs, "
                "for example 4gpu_ddp"
            )
        gpus = 1
    has_whole_nodes = nodes.count == 1 or config.shards % gpus == 0 or gpus % config.shards == 0  # a replica, or a node replicas
    if config.is_hybrid and (nodes.count * gpus != config.replicas * config.shards or not has_whole_nodes):
        raise UserError(
            f"{config.name} is for {plural(config.replicas, 'replica')} of {plural(config.shards, 'GPU')} each, but there "
            f"{'are' if nodes.count > 1 else 'is'} {plural(nodes.count, 'node')} with {plural(gpus, 'GPU')} each: request other "
            "machines (NPROC_PER_NODE sets the GPUs), or change parallelism_config in a copy of the config"
        )
    if nodes.min_count % max(1, config.shards // gpus):
        raise UserError(
            f"NNODES is {nodes.min_count}:{nodes.count}, but a replica of {config.name} is on {config.shards // gpus} nodes: "
            f"pass a multiple of {config.shards // gpus} as the first number"
        )
    return nodes.count * gpus


def set_environment(tiny: bool, gpu_ids: str = "") -> None:
    """Sets what the libraries read when they are imported, and what every process needs. `gpu_ids`: of the config.

    Raises UserError for a number of threads that is none, and for variables that accelerate reads instead of the config.
    """
    for name in os.environ:
        if name.startswith("ACCELERATE_USE_") and os.environ[name].lower() in ("1", "true", "yes", "on"):
            raise UserError(f"{name} is set in the environment, and would change what the config says: unset it")
    if gpu_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ids  # as accelerate does for the processes, and here for the checks too
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads == "":
        del os.environ["OMP_NUM_THREADS"]
    elif threads and not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", threads):
        raise UserError(f"OMP_NUM_THREADS is {threads!r}, expected a number of threads: set another one, or unset it")
    elif threads:
        os.environ["OMP_NUM_THREADS"] = threads.split(",")[0]  # accelerate reads no list, which has numbers for nested loops
    # PyTorch's compiler runs what it finds in its cache: by default a folder in /tmp, which other users can make first.
    with contextlib.suppress(RuntimeError):  # there is no home
        if os.access(Path.home(), os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache/torchinductor"))
    os.environ["PYTHONUNBUFFERED"] = "1"  # losses reach a log file at once
    # datasets would tell a server about every file that a process opens, and without a network wait for it.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    if tiny:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    else:
        hub.use_cache_if_unreachable()


def allocator_settings(config: AccelerateConfig, recipe: Path, arguments: list[str]) -> str:
    """PYTORCH_ALLOC_CONF of a run: how PyTorch allocates GPU memory and pinned host memory.

    Large pinned blocks are neither rounded up nor cached if parameters are offloaded and only an adapter is trained.
    """
    settings = "expandable_segments:True"  # less fragmentation of GPU memory
    is_adapter = flags.is_true("use_peft", arguments, recipe)
    of_recipe = [ast.unparse(value) for value in flags.recipe_values(recipe, "activation_checkpointing_kwargs")]
    checkpointing = flags.value_of("activation_checkpointing_kwargs", arguments) or "".join(of_recipe[-1:])
    offloads_activations = (
        config.activation_checkpointing_offload
        or flags.is_true("activation_offloading", arguments, recipe)
        or re.search("""["']offload["']:\\s*true""", checkpointing, re.IGNORECASE) is not None
    )
    if config.offload_params and is_adapter and not offloads_activations:
        # PyTorch rounds pinned blocks up to powers of two: 19.2 GB of weights take 21.3 GB. So blocks above 1 MB are not rounded.
        # Such blocks must not be cached either: PyTorch 2.13 can reuse a cached block that is too small (pytorch/pytorch#192722).
        # All other runs keep the cache: gradients of offloaded weights and offloaded activations are allocated in every step.
        settings += ",pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
    return settings


def ask_process(method: str, function: Callable[..., T], *arguments: Any) -> T:
    """What `function` returns in a process of its own, which may use a GPU. Exits as that process does if it fails."""
    code, answer = processes.call(method, function, *arguments)
    if code or answer is None:
        sys.exit(processes.explain_exit(code))
    return answer


def gpu_features() -> tuple[list[str], str, str, str]:
    from harness.model.gpu_features import find_gpu_features

    return find_gpu_features()


def run_check(context: Context, arguments: list[str]) -> CheckedRun:
    """Checks the machine, and the recipe up to the end of `parse`."""
    from harness.start.machine import print_untested_versions
    from harness.start.training import Check

    hide_library_warnings()
    print_untested_versions()
    check = Check(**vars(context))
    processes.run_recipe(check, arguments)
    if check.checked is None:
        raise UserError(f"{Path(context.recipe).name} ended without calling parse(): is it a recipe?")
    return check.checked


def hide_library_warnings() -> None:
    """For commands that run a recipe without training."""
    warnings.filterwarnings("ignore")
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # a UserError says what is wrong with a file


def set_training_environment(context: Context) -> None:
    """Sets what the processes that train inherit."""
    # accelerate sets one thread per process. An optimizer on the CPU (offload) needs every core, a rehearsal only one.
    threads = 1 if context.on_cpu else max(1, physical_cores() * context.nodes // context.processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if context.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP would take the GPU of a machine that has too few
    if context.nodes == 1 and (loopback := interface_of("127.0.0.1")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # gloo listens at the address of the machine's name
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # NCCL would listen at that of another interface
    if context.config.distributed_type == "NO":
        # With several visible GPUs, transformers would wrap the model in nn.DataParallel.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def train(method: str, context: Context, checked: CheckedRun, arguments: list[str], meeting: "Meeting | None" = None) -> int:
    """Runs the recipe in the processes of this node; returns the exit code."""
    from harness.compat.accelerate import launch_environment
    from harness.nodes.rendezvous import OneNode, make_rendezvous
    from harness.start.training import Train

    training = Train(**vars(context) | {"on_cpu": checked.on_cpu})
    set_training_environment(training)
    output_dir = Path(checked.output_dir)
    restarts = checked.max_restarts
    if restarts is None:
        restarts = 3 if context.nodes > 1 else 0
    if context.config.distributed_type == "NO":
        return processes.train(method, training, arguments, {}, OneNode(is_distributed=False), output_dir, restarts)
    variables = launch_environment(context.config.path, context.processes, context.nodes, context.recipe)
    rendezvous = make_rendezvous(meeting, checked.usable_nodes) if meeting else OneNode()
    return processes.train(method, training, arguments, variables, rendezvous, output_dir, restarts)


def train_on_several_nodes(nodes: Nodes, context: Context, options: list[str], arguments: list[str], method: str) -> int:
    """Meets the launchers of the other nodes, checks in turn, and runs this node's processes."""
    from harness.nodes.meeting import Meeting
    from harness.nodes.network import interface_to

    if nodes.rank:
        os.environ[NODE_VARIABLE] = str(nodes.rank)
    facts = {
        "command": shlex.join([*options, Path(context.recipe).stem, context.config.name, *arguments]),
        "attention implementation": ", ".join(context.attention),
        "NPROC_PER_NODE": context.processes // context.nodes,
    }
    for path in (context.recipe, context.config.path):
        facts[f"digest of {Path(path).name}"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
    with Meeting(nodes, facts) as meeting:
        context.joins = meeting.joins
        checked = meeting.check_in_turn(lambda: ask_process(method, run_check, context, arguments))
        output_dir = Path(checked.output_dir)
        if checked.saves and not meeting.all_see(output_dir):
            raise UserError(
                f"--output_dir: {output_dir} is not the same folder on all nodes, so their checkpoints could not be put "
                "together: pass a folder on a file system that all nodes share, or --save_strategy no"
            )
        # Not before all nodes have checked.
        held = folder.lock_run(output_dir, checked.identity) if nodes.rank == 0 else None
        another = meeting.another_address()
        if another and (interface := interface_to(another)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo takes the one that the machine's name resolves to
        if nodes.rank == 0:
            copy_plan(context, arguments, Path(checked.output_dir))
        code = meeting.run(lambda: train(method, context, checked, arguments, meeting))
        if held:
            held.release()
        return code


if __name__ == "__main__":
    code = 0
    set_signal_handler(processes.exit_for_signal)
    set_interrupt_handler(processes.interrupt)
    try:
        with exit_on_user_error():
            code = main(sys.argv[1:])
    except SystemExit as end:
        code = end.code
    record_exit_code(code or 0)
    processes.exit_quickly(code or 0)
