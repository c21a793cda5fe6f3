"""Environment variables that libraries read when they are imported, and those of accelerate."""

import contextlib
import logging
import os
import warnings
from pathlib import Path

from harness import hub
from harness.compat.accelerate import launch_environment
from harness.configs import AccelerateConfig
from harness.launched import GROWING, own_allocator_settings
from harness.messages import UserError
from harness.runs import Run

# Keys of a config that become training arguments, whose flags these variables of accelerate would override. Besides, accelerate's
# own checkpointing recomputes with other random numbers, so dropout would differ between forward and backward.
LEFT_TO_ARGUMENTS = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


def set_environment(tiny: bool, gpu_ids: str = "") -> None:
    """Sets what the libraries read when they are imported, and what every process needs. `gpu_ids`: of the config.

    Raises UserError for variables that accelerate reads instead of the config.
    """
    for name in os.environ:
        if name.startswith("ACCELERATE_USE_") and os.environ[name].lower() in ("1", "true", "yes", "on"):
            raise UserError(f"{name} is set in the environment, and would change what the config says: unset it")
    if gpu_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ids
    threads = os.environ.pop("OMP_NUM_THREADS", "").split(",")[0]  # accelerate reads no list, which has numbers for nested loops
    if threads:
        os.environ["OMP_NUM_THREADS"] = threads
    # PyTorch's compiler runs what it finds in its cache: by default a folder in /tmp, which other users can make first.
    with contextlib.suppress(RuntimeError):  # there is no home
        if os.access(Path.home(), os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache/torchinductor"))
    if not own_allocator_settings():  # CUDA reads it when it starts, which importing PEFT does (through bitsandbytes)
        os.environ["PYTORCH_ALLOC_CONF"] = GROWING
    os.environ["PYTHONUNBUFFERED"] = "1"  # losses reach a log file at once
    # datasets would tell a server about every file that a process opens, and without a network wait for it.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    if tiny:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    else:
        hub.use_cache_if_unreachable()


def set_environment_of_accelerate(run: Run) -> None:
    """Sets what accelerate reads of the config, as `accelerate launch` does. Before the first accelerate state is made."""
    if run.config.distributed_type != "NO":
        os.environ.update(launch_environment(run.config.path, run.processes, run.nodes, run.recipe))
    os.environ.update(LEFT_TO_ARGUMENTS)


def config_of_accelerate() -> AccelerateConfig:
    """What `accelerate launch` passes on of its config: neither the path, nor the keys of this project."""
    names = ("offload_params", "activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
    return AccelerateConfig(
        distributed_type="FSDP" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "",
        mixed_precision=os.environ["ACCELERATE_MIXED_PRECISION"],
        **{name: os.environ.get(f"FSDP_{name.upper()}") == "true" for name in names},
    )


def hide_library_warnings() -> None:
    """For commands that run a recipe without training."""
    warnings.filterwarnings("ignore")
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # a UserError says what is wrong with a file
