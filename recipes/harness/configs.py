"""Reads an Accelerate YAML. Refuses keys and values that accelerate would ignore or misread without an error."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.launched import UserError

import yaml

# The keys that accelerate 1.15 reads for FSDP2 (utils/launch.py, FullyShardedDataParallelPlugin); tests/test_configs.py compares.
BOOLEAN_KEYS = {
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
}
FSDP2_KEYS = BOOLEAN_KEYS | {
    "fsdp_version",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_state_dict_type",
    "fsdp_ignored_modules",
}
# Keys of this project. accelerate ignores them; harness/run/sharding.py reads them.
OWN_BOOLEAN_KEYS = {"fsdp_reshard_after_backward", "fsdp_reduce_each_batch"}
OWN_KEYS = OWN_BOOLEAN_KEYS | {"fsdp_reduce_dtype"}
NOT_NEEDED = "FSDP2 does it by itself: delete the line"
FSDP1_KEYS = {
    "fsdp_min_num_params": "layers are wrapped by fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP: delete the line",
    "fsdp_sharding_strategy": "FULL_SHARD is fsdp_reshard_after_forward: true; SHARD_GRAD_OP is false for that key and for "
    "fsdp_reshard_after_backward; HYBRID_SHARD is a parallelism_config; NO_SHARD is distributed_type: MULTI_GPU",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters: delete the line",
    "fsdp_sync_module_states": NOT_NEEDED,
    "fsdp_backward_prefetch": NOT_NEEDED,
    "fsdp_forward_prefetch": NOT_NEEDED,
}
# Top-level keys that a run needs, that `accelerate config` writes, or that launch.sh sets.
TOP_KEYS = {
    "compute_environment",
    "debug",
    "distributed_type",
    "downcast_bf16",
    "enable_cpu_affinity",
    "fsdp_config",
    "gpu_ids",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "mixed_precision",
    "num_machines",
    "num_processes",
    "parallelism_config",
    "rdzv_backend",
    "same_network",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "use_cpu",
}
DISTRIBUTED_TYPES = ("FSDP", "MULTI_GPU", "NO")
PARALLELISM_KEYS = {"parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"}
OTHER_PARALLELISM = {
    "parallelism_config_tp_size": "tensor parallelism",
    "parallelism_config_cp_size": "context parallelism",
    "parallelism_config_sp_size": "sequence parallelism",
}


@dataclass
class AccelerateConfig:
    """An Accelerate YAML. The defaults describe a run without one."""

    path: str = ""
    distributed_type: str = ""  # one of DISTRIBUTED_TYPES, "" without a YAML
    num_processes: int = 1  # on all machines
    num_machines: int = 1
    mixed_precision: str | None = None  # "no", "bf16", "fp16"; None when the YAML does not say
    replicas: int = 1  # of a hybrid config
    shards: int = 1  # in each replica of a hybrid config; 1 in any other config
    offload_params: bool = False
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    reduce_each_batch: bool = False
    reduce_dtype: str = "float32"
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    cpu_ram_efficient_loading: bool = False

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def is_fsdp(self) -> bool:
        return self.distributed_type == "FSDP"

    @property
    def is_hybrid(self) -> bool:
        return self.replicas * self.shards > 1


def read(path: str) -> AccelerateConfig:
    """Reads the YAML at `path`; "" is a run without one. Raises UserError with everything that is wrong with the file."""
    if not path:
        return AccelerateConfig()
    file = Path(path).name
    try:
        keys = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: not a readable YAML file: {error}") from error
    if not isinstance(keys, dict):
        raise UserError(f"{file}: no keys found: an Accelerate config is a list of `key: value` lines")
    for key in ("fsdp_config", "parallelism_config"):
        if not isinstance(keys.get(key) or {}, dict):
            raise UserError(f"{file}: {key} is {keys[key]!r}, expected lines of `key: value` below it")
    if problems := _problems(keys, file):
        raise UserError(f"{file}: {'; '.join(problems)}")

    fsdp, parallelism = keys.get("fsdp_config") or {}, keys.get("parallelism_config") or {}
    return AccelerateConfig(
        path=path,
        distributed_type=keys["distributed_type"],
        num_processes=keys.get("num_processes", 1),
        num_machines=keys.get("num_machines", 1),
        mixed_precision=keys.get("mixed_precision"),
        replicas=parallelism.get("parallelism_config_dp_replicate_size", 1),
        shards=parallelism.get("parallelism_config_dp_shard_size", 1),
        offload_params=fsdp.get("fsdp_offload_params", False),
        reshard_after_forward=fsdp.get("fsdp_reshard_after_forward", True),
        reshard_after_backward=fsdp.get("fsdp_reshard_after_backward", True),
        reduce_each_batch=fsdp.get("fsdp_reduce_each_batch", False),
        reduce_dtype=fsdp.get("fsdp_reduce_dtype", "float32"),
        activation_checkpointing=fsdp.get("fsdp_activation_checkpointing", False),
        activation_checkpointing_offload=fsdp.get("fsdp_activation_checkpointing_offload", False),
        cpu_ram_efficient_loading=fsdp.get("fsdp_cpu_ram_efficient_loading", False),
    )


def _problems(keys: dict, file: str) -> list[str]:
    """Everything that is wrong with the keys of a YAML."""
    kind, fsdp, parallelism = keys.get("distributed_type"), keys.get("fsdp_config") or {}, keys.get("parallelism_config") or {}
    if kind == "DEEPSPEED" or "deepspeed_config" in keys:
        return [
            "DeepSpeed configs are not read: FSDP2 does the same, see the table in docs/memory-and-strategies.md "
            "(ZeRO-3 is 4gpu_full_shard, ZeRO-2 is 4gpu_shard_grad_op, ZeRO-Offload is 1x3090_offload)"
        ]
    problems = _unknown_keys(keys, TOP_KEYS)
    problems += _unknown_keys([key for key in parallelism if key not in OTHER_PARALLELISM], PARALLELISM_KEYS)
    for key, name in OTHER_PARALLELISM.items():
        if parallelism.get(key, 1) != 1:
            problems.append(f"{key}: {name} is not supported: delete the line")
    if kind == "FSDP":
        problems += _fsdp2_problems(fsdp)
    elif fsdp:
        problems.append("fsdp_config is only read with distributed_type: FSDP")
    if fsdp and (FSDP1_KEYS.keys() & fsdp.keys() or fsdp.get("fsdp_version", 1) == 1):
        problems.append(
            f"accelerate translates FSDP1: .venv/bin/accelerate to-fsdp2 --config_file {file} --output_file fsdp2_{file}"
        )
    for key in ("use_cpu", "tpu_use_cluster", "tpu_use_sudo", "tpu_env"):
        if keys.get(key):
            problems.append(f"{key} is not read: delete the line" + ("; pass --use_cpu" if key == "use_cpu" else ""))
    if problems:
        return problems

    if kind not in DISTRIBUTED_TYPES:
        problems.append(f"distributed_type is {kind!r}, expected one of {', '.join(DISTRIBUTED_TYPES)}")
    if keys.get("mixed_precision", "no") not in ("no", "bf16", "fp16"):
        problems.append(f"mixed_precision is {keys['mixed_precision']!r}, expected 'no', bf16 or fp16 (quote the 'no')")
    processes, machines = keys.get("num_processes", 1), keys.get("num_machines", 1)
    if not all(type(n) is int and n > 0 for n in (processes, machines)) or processes % machines:
        problems.append(f"num_processes ({processes}) counts all machines, so it must be a multiple of num_machines ({machines})")
    elif kind == "NO" and processes > 1:
        problems.append(f"distributed_type NO is one process: use FSDP or MULTI_GPU for {processes}")
    return problems


def _unknown_keys(keys: Iterable, known: set[str]) -> list[str]:
    problems = []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            problems.append(f"unknown key {key}: " + (f"did you mean {near[0]}?" if near else "it would be ignored: delete it"))
    return problems


def _fsdp2_problems(fsdp: dict) -> list[str]:
    """Everything that is wrong with an fsdp_config."""
    problems = [f"{key} is an FSDP1 key: {advice}" for key, advice in FSDP1_KEYS.items() if key in fsdp]
    problems += _unknown_keys(fsdp, FSDP2_KEYS | OWN_KEYS | FSDP1_KEYS.keys())
    if fsdp.get("fsdp_version") != 2:
        version = fsdp.get("fsdp_version", "missing, which accelerate reads as 1")
        problems.append(f"fsdp_version is {version}: write fsdp_version: 2")
    if fsdp.get("fsdp_auto_wrap_policy") != "TRANSFORMER_BASED_WRAP":
        problems.append("write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, one FSDP unit per transformer layer")
    for key in sorted((BOOLEAN_KEYS | OWN_BOOLEAN_KEYS) & fsdp.keys()):
        if not isinstance(fsdp[key], bool):
            problems.append(f"{key} is {fsdp[key]!r}, expected true or false")
    if fsdp.get("fsdp_reshard_after_backward") is False:
        if fsdp.get("fsdp_reshard_after_forward") is not False:
            problems.append("fsdp_reshard_after_backward: false needs fsdp_reshard_after_forward: false")
        if fsdp.get("fsdp_reduce_each_batch"):
            problems.append(
                "fsdp_reduce_each_batch: true saves memory and fsdp_reshard_after_backward: false uses it: set only one of them"
            )
    if fsdp.get("fsdp_reduce_dtype", "float32") not in ("float32", "bfloat16", "float16"):
        problems.append(f"fsdp_reduce_dtype is {fsdp['fsdp_reduce_dtype']!r}, expected float32, bfloat16 or float16")
    return problems
