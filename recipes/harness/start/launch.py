"""From the command line to a checked run and its processes. launch.sh calls it:

`python -m harness.start.launch [--tiny] RECIPE.py CONFIG.yaml [--flag value …]`.
"""

import signal

from harness.launched import set_interrupt_handler

if __name__ == "__main__":
    set_interrupt_handler(signal.SIG_DFL)  # while modules are imported

import ast
import dataclasses
import hashlib
import logging
import os
import re
import shlex
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from harness import configs, folder, hub
from harness.configs import AccelerateConfig
from harness.launched import (
    NODE_VARIABLE,
    Checked,
    Launched,
    TrainerBuilt,
    UserError,
    exit_on_user_error,
    last_signal,
    print_once,
    set_signal_handler,
)
from harness.nodes.cluster import Nodes, nodes_from_environment, run_with_srun
from harness.nodes.hardware import physical_cores
from harness.nodes.variables import integer_from_environment
from harness.start import flags, processes
from harness.start.plans import copy_plan
from harness.start.processes import Worker, idle_workers


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
    launched = Launched(recipe=recipe, config=config_path, tiny="--tiny" in options)
    set_processes(launched, config, nodes)
    if nodes.is_allocation:
        return run_with_srun(nodes, words)
    set_environment(launched, config.gpu_ids)
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():  # the latter is its older name
        os.environ["PYTORCH_ALLOC_CONF"] = allocator_settings(config, Path(recipe), arguments)
    can_fork = processes.import_libraries()
    find_gpu_features(launched, can_fork)
    # All workers are forked here, while this process has no threads and has not used a GPU. They wait until they are started.
    with idle_workers(launched.processes // launched.nodes, can_fork) as workers, idle_workers(1, can_fork) as (checker,):
        warnings.filterwarnings("ignore")  # in the launcher only; the processes that train are forked already
        if nodes.count > 1:
            return train_on_several_nodes(nodes, config, launched, options, arguments, workers, checker)
        output_dir, identity, _, _ = check_in_worker(checker, launched, arguments, config)
        # Not in a `with`: after an error it stays locked until this process exits.
        held = folder.lock_run(Path(output_dir), identity)
        store = None if config.distributed_type == "NO" else open_store()
        meeting_point = (store.host, store.port) if store else None
        copy_plan(launched, arguments, Path(output_dir))
        code = train(workers, launched, arguments, config, meeting_point)
        held.release()
        return code


def set_processes(launched: Launched, config: AccelerateConfig, nodes: Nodes) -> None:
    """Sets how many processes and nodes run the config. Raises UserError if these are not the machines for it."""
    gpus = nodes.processes or config.num_processes // config.num_machines  # per machine
    if nodes.count == 1 < config.num_machines:
        if not launched.tiny:
            raise UserError(
                f"{config.name} is for {config.num_machines} machines with {plural(gpus, 'GPU')} each, this is one: start it on "
                f"each with NNODES={config.num_machines} NODE_RANK=… MASTER_ADDR=…, or with sbatch --nodes "
                f"{config.num_machines}. {rehearsal_hint(launched)}"
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
    launched.nodes, launched.processes = nodes.count, nodes.count * gpus
    if not config.is_hybrid:
        return
    if launched.processes != config.replicas * config.shards or nodes.count not in (1, config.replicas):
        raise UserError(
            f"{config.name} shards over {config.shards} GPUs on each of {config.replicas} nodes, but there "
            f"{'are' if nodes.count > 1 else 'is'} {plural(nodes.count, 'node')} with {plural(gpus, 'GPU')} each: request other "
            "machines (NPROC_PER_NODE sets the GPUs), or change parallelism_config in a copy of the config"
        )


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def rehearsal_hint(launched: Launched) -> str:
    names = " ".join(shlex.quote(Path(path).stem) for path in (launched.recipe, launched.config))
    return f"Rehearse it here with a tiny model and dataset: ./launch.sh --tiny {names}"


def set_environment(launched: Launched, gpu_ids: str = "") -> None:
    """Sets what the libraries read when they are imported, and what every process needs. `gpu_ids`: of the config.

    Raises UserError for a number of threads that is none.
    """
    if gpu_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ids  # as accelerate does for the processes, and here for the checks too
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads == "":
        del os.environ["OMP_NUM_THREADS"]
    elif threads and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", threads):
        raise UserError(f"OMP_NUM_THREADS is {threads!r}, expected a number of threads: set another one, or unset it")
    os.environ["PYTHONUNBUFFERED"] = "1"  # losses reach a log file at once
    # datasets would tell a server about every file that a process opens, and without a network wait for it.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    # Offline, `kernels` reports that it did not check the publisher of a kernel; it did when the kernel was downloaded.
    logging.getLogger("kernels.hf_hub").addFilter(lambda record: "offline mode" not in record.getMessage())
    if launched.tiny:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    elif "HF_HUB_OFFLINE" not in os.environ and not hub.is_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"  # otherwise every process would retry for long


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


def find_gpu_features(launched: Launched, can_fork: bool) -> None:
    """Sets what the GPUs of this machine support; asked in a process of its own, because it uses a GPU."""
    code, features = processes.call(can_fork, gpu_features)
    if features is None:
        sys.exit(processes.explain_exit(code))
    launched.attention, launched.no_flash, launched.no_triton, launched.gpu_problem = features


def gpu_features() -> tuple[list[str], str, str, str]:
    from harness.model.gpu_features import find_gpu_features

    return find_gpu_features()


def check_in_worker(
    worker: Worker, launched: Launched, arguments: list[str], config: AccelerateConfig | None
) -> tuple[str, dict, bool, bool]:
    """Checks the run in a process of its own, which may use a GPU. Exits if something is wrong.

    Sets `launched.on_cpu`. Returns the output directory, its run.json, whether the run saves checkpoints there, and whether it
    has a mirror.
    """
    worker.start(run_checks, launched, arguments, config)
    code, _ = processes.wait_for([worker])
    set_signal_handler(processes.exit_for_signal)
    if worker.result is None:
        sys.exit(processes.explain_exit(code))
    if last_signal():  # the check ended before the signal reached it
        processes.exit_for_signal(last_signal(), None)
    launched.on_cpu, *found = worker.result
    return tuple(found)


def run_checks(launched: Launched, arguments: list[str], config: AccelerateConfig) -> tuple[bool, str, dict, bool, bool]:
    """Checks the machine, then runs the recipe up to the end of `parse`.

    Returns what the launcher needs from the process that runs this: whether the run is on CPU, its output directory and
    run.json, whether it saves checkpoints, and whether it has a mirror.
    """
    from harness.start import checks

    set_device(launched, config, use_cpu=flags.is_true("use_cpu", arguments), rows=rows_of_step(Path(launched.recipe), arguments))
    checks.check_shared_memory(launched)
    checks.print_few_cores(launched)
    script_args, training_args, _ = check_recipe(launched, arguments)
    output_dir = training_args.output_dir
    identity = folder.read_json(Path(output_dir, folder.RUN))
    return launched.on_cpu, output_dir, identity, training_args.save_strategy != "no", bool(script_args.mirror)


def check_recipe(launched: Launched, arguments: list[str]) -> tuple[Any, Any, Any]:
    """Runs a recipe up to the end of `parse`, with all checks; returns the three arguments of the run."""
    from harness.start import checks

    warnings.filterwarnings("ignore")
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # a UserError says what is wrong with a file
    checks.print_untested_versions()
    os.environ.update(dataclasses.replace(launched, only_check=True).to_environment())
    try:
        processes.run_recipe(launched.recipe, arguments)
    except Checked as checked:
        return checked.args
    raise UserError(f"{Path(launched.recipe).name} ended without calling parse(): is it a recipe?")


def build_trainer(launched: Launched, arguments: list[str]) -> Any:
    """Runs a recipe up to `train`, in this process; returns its trainer. `launched.mode` must not be "train": it would train.

    The checks of `check_recipe`, which need the machine or the dataset, are left out.
    """
    os.environ.update(launched.to_environment())
    try:
        processes.run_recipe(launched.recipe, arguments)
    except TrainerBuilt as built:
        return built.args[0]
    raise UserError(f"{Path(launched.recipe).name} ended without calling train(): is it a recipe?")


def rows_of_step(recipe: Path, arguments: list[str]) -> tuple[int, int]:
    """Rows per optimizer step and per micro-batch, (0, 0) where recipe and flags do not set them to numbers."""
    if flags.value_of("gradient_accumulation_steps", arguments):
        return 0, 0
    rows, micro_batch = (
        flags.number_of(name, arguments, recipe) for name in ("global_batch_size", "per_device_train_batch_size")
    )
    return rows or 0, micro_batch or 0


def set_device(launched: Launched, config: AccelerateConfig, use_cpu: bool, rows: tuple[int, int] = (0, 0)) -> None:
    """Sets `on_cpu`. Raises UserError if the machine has too few GPUs; `rows`: per step and micro-batch, to offer fewer."""
    from harness.start import checks

    gpus = launched.processes // launched.nodes
    if not use_cpu and checks.count_gpus() >= gpus:
        if launched.gpu_problem:
            raise UserError(launched.gpu_problem)
        return
    if not (launched.tiny or use_cpu):
        found = checks.count_gpus()
        # Not in a hybrid config, which needs its replicas, nor on several nodes, whose steps depend on the others.
        possible = [] if config.is_hybrid or launched.nodes > 1 or not all(rows) else range(1, found + 1)
        enough = [count for count in possible if rows[0] % (rows[1] * count) == 0]
        hint = rehearsal_hint(launched)
        if enough:
            words = "it" if enough[-1] == 1 else f"{enough[-1]} of them" if enough[-1] < found else "them"
            hint = f"NPROC_PER_NODE={enough[-1]} trains the same steps on {words}, and continues a run there, if memory suffices"
        raise UserError(f"{config.name} needs {plural(gpus, 'GPU')}, this machine has {found or 'none'}. {hint}")
    launched.on_cpu = True


def open_store() -> Any:
    """The TCPStore at which the processes of one machine meet. It has threads: call this after the processes were forked.

    Other machines cannot connect to it: it would listen at all addresses of this one without a socket of its own. torch unpickles
    what processes send each other through it.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def set_training_environment(launched: Launched, config: AccelerateConfig) -> None:
    """Sets what the processes that train inherit."""
    os.environ.update(launched.to_environment())
    # accelerate sets one thread per process. An optimizer on the CPU (offload) needs every core, a rehearsal only one.
    threads = 1 if launched.on_cpu else max(1, physical_cores() * launched.nodes // launched.processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if launched.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP would take the GPU of a machine that has too few
    if config.distributed_type == "NO":
        # With several visible GPUs, transformers would wrap the model in nn.DataParallel.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def train(
    workers: list[Worker],
    launched: Launched,
    arguments: list[str],
    config: AccelerateConfig,
    meeting_point: tuple[str, int] | None,
    node: int = 0,
) -> int:
    """Runs the recipe in the processes of this node; returns the exit code.

    `meeting_point`: address and port of the TCPStore of all processes, None for a config without torch.distributed.
    """
    set_training_environment(launched, config)
    if meeting_point is None:
        return processes.train_in_one_process(workers[0], launched, arguments)
    from harness.compat.accelerate import launch_environment
    from harness.compat.torch import use_store_of_launcher

    environment = launch_environment(config.path, launched.processes, launched.nodes, launched.recipe) | use_store_of_launcher()
    environment |= {"MASTER_ADDR": meeting_point[0], "MASTER_PORT": str(meeting_point[1])}
    return processes.train_in_processes(workers, launched, arguments, environment, node)


def train_on_several_nodes(
    nodes: Nodes,
    config: AccelerateConfig,
    launched: Launched,
    options: list[str],
    arguments: list[str],
    workers: list[Worker],
    checker: Worker,
) -> int:
    """Meets the launchers of the other nodes, checks in turn, and runs this node's processes."""
    from harness.nodes.meeting import Meeting
    from harness.nodes.network import interface_to

    if nodes.rank:
        os.environ[NODE_VARIABLE] = str(nodes.rank)
    facts = {
        "command": shlex.join([*options, Path(launched.recipe).stem, Path(launched.config).stem, *arguments]),
        "attention implementation": ", ".join(launched.attention),
        "NPROC_PER_NODE": len(workers),
    }
    for path in (launched.recipe, launched.config):
        facts[f"digest of {Path(path).name}"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
    with Meeting(nodes, facts) as meeting:
        found = meeting.check_in_turn(lambda: check_in_worker(checker, launched, arguments, config))
        output_dir, identity, saves, has_mirror = found
        launched.separate_disks = saves and not meeting.all_see(Path(output_dir))
        if launched.separate_disks and not has_mirror:
            raise UserError(
                f"--output_dir: {output_dir} is not the same folder on all nodes, so their checkpoints could not be put "
                "together: pass a folder on a file system that all nodes share, or --mirror with the URL of a bucket, to which "
                "every node uploads its part, or --save_strategy no"
            )
        # Not before all nodes have checked.
        held = folder.lock_run(Path(output_dir), identity) if nodes.rank == 0 or launched.separate_disks else None
        if interface := interface_to(meeting.another_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo takes the one that the machine's name resolves to
        head = nodes.head if nodes.rank else "127.0.0.1"
        if nodes.rank == 0:
            copy_plan(launched, arguments, Path(output_dir))
        code = meeting.run(lambda: train(workers, launched, arguments, config, (head, nodes.port), nodes.rank))
        if held:
            held.release()
        return code


if __name__ == "__main__":
    code = 0
    set_signal_handler(processes.exit_for_signal)
    set_interrupt_handler(signal.default_int_handler)
    try:
        with exit_on_user_error():
            code = main(sys.argv[1:])
    except SystemExit as end:
        code = end.code
    processes.exit_quickly(code or 0)
