"""The machines of a run: on which device it computes, how memory is allocated, and what is checked of all nodes."""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from harness.compat.accelerate import allow_fsdp_on_cpu
from harness.compat.torch import set_allocator_settings
from harness.configs import AccelerateConfig
from harness.launched import ALLOCATOR_VARIABLES, GROWING, launched, own_allocator_settings
from harness.messages import UserError, plural, print_once
from harness.model.gpu_features import find_gpu_features
from harness.runs import NO_FEATURES, GpuFeatures, Run, rehearsal_hint

import torch
from transformers import TrainingArguments
from trl import ModelConfig


def choose_device(run: Run) -> Run:
    """The run, with whether it computes on CPU. Sets what CUDA and accelerate read at their first use."""
    on_cpu = must_use_cpu(run) if launched() else run.on_cpu or run.values.use_cpu
    if not launched() and not on_cpu and torch.cuda.is_available() and not os.environ.keys() & set(ALLOCATOR_VARIABLES):
        print_once(f"Set PYTORCH_ALLOC_CONF={GROWING} before a start without ./launch.sh: GPU memory fragments less.")
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # FSDP would take the GPU of a machine that has too few
        if run.config.is_fsdp:
            allow_fsdp_on_cpu()
    set_allocator(run.config, run.values)
    return dataclasses.replace(run, on_cpu=on_cpu)


def set_allocator(config: AccelerateConfig, values: argparse.Namespace) -> str:
    """Sets how PyTorch allocates memory, unless the user has, by a call: CUDA may have started. Returns the settings.

    `values`: of all arguments.
    """
    settings = allocator_settings(config, values)
    if own := own_allocator_settings():
        return own
    set_allocator_settings(settings)
    return settings


def allocator_settings(config: AccelerateConfig, values: argparse.Namespace) -> str:
    """How PyTorch allocates GPU memory and pinned host memory in a run, as PYTORCH_ALLOC_CONF has it.

    Large pinned blocks are neither rounded up nor cached if parameters are offloaded and only an adapter is trained. `values`: of
    all arguments.
    """
    settings = GROWING
    checkpointing = values.activation_checkpointing_kwargs or {}
    if isinstance(checkpointing, str):  # of a flag
        checkpointing = json.loads(checkpointing)
    offloads_activations = (
        config.activation_checkpointing_offload
        or getattr(values, "activation_offloading", False)  # not of every class of arguments
        or checkpointing.get("offload")
    )
    if config.offload_params and values.use_peft and not offloads_activations:
        # PyTorch rounds pinned blocks up to powers of two: 19.2 GB of weights take 21.3 GB. So blocks above 1 MB are not rounded.
        # Such blocks must not be cached either: PyTorch 2.13 can reuse a cached block that is too small (pytorch/pytorch#192722).
        # All other runs keep the cache: gradients of offloaded weights and offloaded activations are allocated in every step.
        settings += ",pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
    return settings


def must_use_cpu(run: Run) -> bool:
    """Whether a run computes on CPU: with --use_cpu, or a rehearsal on a machine with too few GPUs.

    Raises UserError if a run has too few GPUs, and torch's error if CUDA cannot use them.
    """
    if run.values.use_cpu:
        return True
    needed = run.processes // run.nodes
    found = torch.cuda.device_count()
    if found and not torch.cuda.is_available():
        torch.cuda.init()  # raises an error that names the driver
    if found >= needed:
        return False
    if run.tiny:
        return True
    raise UserError(
        f"{run.config.name} needs {plural(needed, 'GPU')}, this machine has {found or 'none'} (NPROC_PER_NODE sets how many are "
        f"used). {rehearsal_hint(run.recipe, run.config)}"
    )


def check_nodes(nodes: list[dict[str, Any]]) -> GpuFeatures:
    """What the GPUs of all nodes can. `nodes`: the `facts_of_node` of each.

    Raises UserError if a node has a problem, or other flags, files or GPUs.
    """
    first = nodes[0]
    for node in nodes:
        problem = node["problem"]
        if not problem and node["start"] != first["start"]:
            problem = f"started with {node['start']}, {first['host']} with {first['start']}: start all nodes alike"
        if problem:
            raise UserError(f"{node['host']}: {problem}" if len(nodes) > 1 else problem)
    return GpuFeatures(*first["features"])


def facts_of_node(run: Run, training_args: TrainingArguments, model_args: ModelConfig) -> dict[str, Any]:
    """What the first process of the run must know of this node."""
    problem, features = "", NO_FEATURES
    try:
        check_one_gpu(training_args)
        check_shared_memory(run)
        if not training_args.use_cpu:
            check_bf16(training_args, model_args, run)
        if training_args.device.type == "cuda":
            features = find_gpu_features()
    except UserError as error:
        problem = str(error)
    files = {Path(path).name: digest_of_file(path) for path in (run.recipe, run.config.path) if path}
    start = f"{sys.argv[1:]} {files} {features}"
    return {"host": platform.node(), "features": features, "problem": problem, "start": start}


def digest_of_file(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


def check_one_gpu(training_args: TrainingArguments) -> None:
    """Raises UserError if this process, started without launch.sh, would train on several GPUs.

    transformers would wrap the model in nn.DataParallel: more rows per step than `global_batch_size`, and packed rows without the
    lengths of their documents.
    """
    if training_args.n_gpu > 1:
        raise UserError(
            f"one process would train on {training_args.n_gpu} GPUs with nn.DataParallel, which recipes do not support: set "
            f"CUDA_VISIBLE_DEVICES=0 to use one GPU, or start the recipe with launch.sh or `.venv/bin/torchrun --nproc-per-node "
            f"{training_args.n_gpu}`"
        )


def check_bf16(training_args: TrainingArguments, model_args: ModelConfig, run: Run) -> None:
    """Raises UserError for bf16 on a GPU that only emulates it, slowly; `torch.cuda.is_bf16_supported` accepts those.

    The config, the recipe or a flag can set mixed precision. Without it the model computes in its own dtype.
    """
    is_sharded_4bit = model_args.load_in_4bit and run.is_sharded  # in bf16, whatever the dtype
    if training_args.fp16 or not (training_args.bf16 or is_sharded_4bit or model_args.dtype == "bfloat16"):
        return
    advice = f"pass --bf16 false --fp16 true --dtype {'float16' if model_args.use_peft else 'float32'}"
    if is_sharded_4bit:
        advice = "sharded 4-bit weights compute in bf16 only, so use other GPUs"
    for index in range(min(run.processes // run.nodes or 1, torch.cuda.device_count())):
        if torch.cuda.get_device_capability(index) < (8, 0):
            raise UserError(f"{torch.cuda.get_device_name(index)} has no bf16 arithmetic, which this run uses: {advice}")


def check_shared_memory(run: Run) -> None:
    """Raises UserError if /dev/shm is too small for NCCL's buffers of 33 MB for each process, without which a run hangs."""
    shm = Path("/dev/shm")
    needed = 1  # MB, for the locks of the processes
    if not run.on_cpu and run.processes > run.nodes and os.environ.get("NCCL_SHM_DISABLE") != "1":
        needed += 33 * (run.processes // run.nodes)
    free = shutil.disk_usage(shm).free / 1e6 if shm.is_dir() else needed
    if free < needed:
        raise UserError(
            f"/dev/shm has {free:.0f} MB free, {needed} MB are needed: delete old files there, or give the container more "
            "(docker run --shm-size=1g, or --ipc=host), or set NCCL_SHM_DISABLE=1"
        )
