"""Reads an Accelerate YAML and refuses what accelerate would silently ignore or misread."""

import difflib
from pathlib import Path

from harness.launched import fail

import yaml

# What accelerate 1.15 reads for FSDP2 (utils/launch.py and FullyShardedDataParallelPlugin), tests/ground/test_configs.py holds
# it there.
BOOLEANS = {
    *("fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"),
}
FSDP2_KEYS = BOOLEANS | {
    *("fsdp_version", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_state_dict_type"),
    "fsdp_ignored_modules",
}
# Read by harness/run/sharding.py; accelerate passes over them.
HARNESS_KEYS = {"fsdp_reshard_after_backward", "fsdp_reduce_each_batch", "fsdp_reduce_dtype"}
NOT_NEEDED = "FSDP2 does it by itself; delete the line"
FSDP1_WORDS = {
    "fsdp_min_num_params": "layers are wrapped by fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP; delete the line",
    "fsdp_sharding_strategy": "FULL_SHARD is fsdp_reshard_after_forward: true, SHARD_GRAD_OP is false there and for "
    "fsdp_reshard_after_backward, HYBRID_SHARD is a parallelism_config, NO_SHARD is distributed_type: MULTI_GPU",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters; delete the line",
    **dict.fromkeys(("fsdp_sync_module_states", "fsdp_backward_prefetch", "fsdp_forward_prefetch"), NOT_NEEDED),
}
# Needed to run on a machine, written by `accelerate config`, or set by launch.sh.
TOP_KEYS = {
    *("compute_environment", "debug", "distributed_type", "downcast_bf16", "enable_cpu_affinity", "fsdp_config", "gpu_ids"),
    *("machine_rank", "main_process_ip", "main_process_port", "main_training_function", "mixed_precision", "num_machines"),
    *("num_processes", "parallelism_config", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
    "use_cpu",
}
KINDS = ("FSDP", "MULTI_GPU", "NO")


def read(path: str) -> dict:
    """The YAML as a dict with `fsdp_config` always there; {} for no path. Ends the process on a bad file."""
    if not path:
        return {}
    name = Path(path).name
    try:
        config = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"{name} is not a readable YAML file: {error}")
    if not isinstance(config, dict):
        fail(f"{name} holds no keys: an Accelerate config is a list of `key: value` lines")
    problems = _unknown(config, TOP_KEYS)
    for key in ("fsdp_config", "parallelism_config"):
        if not isinstance(config.get(key) or {}, dict):
            fail(f"{name}: {key} is {config[key]!r}, expected lines of `key: value` below it")
    fsdp = config["fsdp_config"] = config.get("fsdp_config") or {}
    if config.get("distributed_type") == "FSDP":
        problems += _fsdp2(fsdp)
    elif fsdp:
        problems.append("fsdp_config is only read with distributed_type: FSDP")
    if fsdp and (FSDP1_WORDS.keys() & fsdp.keys() or fsdp.get("fsdp_version", 1) == 1):
        problems.append(f"accelerate translates FSDP1: accelerate to-fsdp2 --config_file {name} --output_file fsdp2_{name}")
    if problems:
        fail(f"{name}: {'; '.join(problems)}")
    if config.get("distributed_type") not in KINDS:
        fail(f"{name}: distributed_type is {config.get('distributed_type')!r}, expected one of {', '.join(KINDS)}")
    if config.get("mixed_precision", "no") not in ("no", "bf16", "fp16"):
        fail(f"{name}: mixed_precision is {config['mixed_precision']!r}, expected 'no', bf16 or fp16 (quote the 'no')")
    processes, machines = config.get("num_processes", 1), config.setdefault("num_machines", 1)
    if not all(type(n) is int and n > 0 for n in (processes, machines)) or processes % machines:
        fail(f"{name}: num_processes ({processes}) counts all machines, so it must be a multiple of num_machines ({machines})")
    config["num_processes"] = processes
    if config["distributed_type"] == "NO" and processes > 1:
        fail(f"{name}: distributed_type NO is one process; for {processes}, use FSDP or MULTI_GPU")
    return config


def _unknown(keys: dict, allowed: set[str]) -> list[str]:
    problems = []
    for key in (key for key in keys if key not in allowed):
        near = difflib.get_close_matches(str(key), allowed, n=1)
        problems.append(f"unknown key {key}: " + (f"did you mean {near[0]}?" if near else "accelerate does not read it here"))
    return problems


def _fsdp2(fsdp: dict) -> list[str]:
    """What is wrong with an fsdp_config, all of it at once."""
    problems = [f"{key} is a word of FSDP1: {advice}" for key, advice in FSDP1_WORDS.items() if key in fsdp]
    problems += _unknown(fsdp, FSDP2_KEYS | HARNESS_KEYS | FSDP1_WORDS.keys())
    if fsdp.get("fsdp_version") != 2:
        version = fsdp.get("fsdp_version", "missing, which accelerate takes as 1")
        problems.append(f"fsdp_version is {version}: write fsdp_version: 2")
    if fsdp.get("fsdp_auto_wrap_policy") != "TRANSFORMER_BASED_WRAP":
        problems.append("write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, one FSDP unit a transformer layer")
    for key in sorted((BOOLEANS | HARNESS_KEYS - {"fsdp_reduce_dtype"}) & fsdp.keys()):
        if not isinstance(fsdp[key], bool):
            problems.append(f"{key} is {fsdp[key]!r}, expected true or false")
    if fsdp.get("fsdp_reshard_after_backward") is False and fsdp.get("fsdp_reshard_after_forward") is not False:
        problems.append("fsdp_reshard_after_backward: false needs fsdp_reshard_after_forward: false, or nothing stays gathered")
    if fsdp.get("fsdp_reduce_each_batch") and fsdp.get("fsdp_reshard_after_backward") is False:
        problems.append(
            "fsdp_reduce_each_batch: true saves memory, fsdp_reshard_after_backward: false spends it: take one of them"
        )
    if fsdp.get("fsdp_reduce_dtype", "float32") not in ("float32", "bfloat16", "float16"):
        problems.append(f"fsdp_reduce_dtype is {fsdp['fsdp_reduce_dtype']!r}, expected float32, bfloat16 or float16")
    return problems


def mesh(config: dict) -> tuple[int, int]:
    """Replicas and shards of a hybrid config, (1, 1) of any other."""
    sizes = config.get("parallelism_config") or {}
    return tuple(sizes.get(f"parallelism_config_dp_{kind}_size", 1) for kind in ("replicate", "shard"))
