"""Reads an Accelerate YAML. Refuses keys and values that accelerate would ignore or misread without an error."""

import dataclasses
import difflib
import re
import shlex
from pathlib import Path
from types import UnionType
from typing import Any

from harness.messages import UserError

import yaml

# The type of the value of each key, or the values that it may have. Every key may be null. Accelerate 1.15 reads these for FSDP2
# (utils/launch.py, FullyShardedDataParallelPlugin); tests/test_configs.py compares.
FSDP2_KEYS = {
    "fsdp_version": (2,),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),  # one FSDP unit per transformer layer
    "fsdp_transformer_layer_cls_to_wrap": str,  # names with commas between them, without spaces
    "fsdp_reshard_after_forward": bool,
    "fsdp_offload_params": bool,
    "fsdp_cpu_ram_efficient_loading": bool,
    "fsdp_activation_checkpointing": bool,
    "fsdp_activation_checkpointing_offload": bool,
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    "fsdp_ignored_modules": str,  # a regular expression
}
OWN_KEYS = {  # of this project: accelerate ignores them, run/sharding.py reads them
    "fsdp_reshard_after_backward": bool,
    "fsdp_reduce_each_batch": bool,
    "fsdp_reduce_dtype": ("float32", "bfloat16", "float16"),
}
PARALLELISM_KEYS = {
    "parallelism_config_dp_replicate_size": int,
    "parallelism_config_dp_shard_size": int,
    # Tensor, context and sequence parallelism, which this project does not have.
    "parallelism_config_tp_size": (1,),
    "parallelism_config_cp_size": (1,),
    "parallelism_config_sp_size": (1,),
}
TOP_KEYS = {  # that a run needs, that `accelerate config` writes, or that launch.sh sets
    "compute_environment": str,
    "debug": bool,
    "distributed_type": ("FSDP", "MULTI_GPU", "NO"),
    "downcast_bf16": bool | str,
    "enable_cpu_affinity": bool,
    "fsdp_config": dict,
    "gpu_ids": str | int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "main_training_function": str,
    "mixed_precision": ("no", "bf16", "fp16"),  # without quotes, `no` is false in YAML
    "num_machines": int,
    "num_processes": int,
    "parallelism_config": dict,
    "rdzv_backend": str,
    "same_network": bool,
    "tpu_env": list,
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "use_cpu": (False,),  # --use_cpu trains on the CPU
}
FSDP1_KEYS = {
    "fsdp_sharding_strategy",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
}
Kind = type | UnionType | tuple[Any, ...]
NAMES_OF_TYPES = {bool: "true or false", int: "a whole number", list: "a list", dict: "lines of `key: value` below it"}


@dataclasses.dataclass
class AccelerateConfig:
    """An Accelerate YAML. The defaults describe a run without one."""

    path: str = ""
    distributed_type: str = ""  # FSDP, MULTI_GPU or NO; "" without a YAML
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
    gpu_ids: str = ""  # numbers of the GPUs to use, such as "0,2"; "" for all that are visible

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
    if not Path(path).is_file():
        raise UserError(f"file not found: {path}")
    keys = read_yaml(path, file)
    if not isinstance(keys, dict):
        raise UserError(f"{file}: no keys found: an Accelerate config is a list of `key: value` lines")
    if is_for_others(keys):
        raise UserError(
            f"{file}: this config is for FSDP1 or DeepSpeed, and this project uses FSDP2: for FSDP1, run `.venv/bin/accelerate "
            f"to-fsdp2 --config_file {shlex.quote(path)} --output_file NEW.yaml`; for DeepSpeed, copy the config of the same "
            "strategy (docs/memory-and-strategies.md#fsdp1-and-deepspeed-terms)"
        )
    for part in (keys.get("fsdp_config"), keys.get("parallelism_config"), keys):
        if isinstance(part, dict):
            for key in [key for key, value in part.items() if value is None]:
                del part[key]
    if problems := find_problems(keys):
        raise UserError(f"{file}: {'; '.join(problems)}")

    parallelism = keys.get("parallelism_config", {})
    values = keys | {key.removeprefix("fsdp_"): value for key, value in keys.get("fsdp_config", {}).items()}
    values["path"] = path
    values["replicas"] = parallelism.get("parallelism_config_dp_replicate_size", 1)
    values["shards"] = parallelism.get("parallelism_config_dp_shard_size", 1)
    values["gpu_ids"] = _gpu_ids(keys)
    fields = [field.name for field in dataclasses.fields(AccelerateConfig)]
    return AccelerateConfig(**{name: values[name] for name in fields if name in values})


def read_yaml(path: str, name: str) -> Any:
    """The content of a YAML file. Raises UserError, with `name`, if it is none, or has a key twice."""
    try:
        with Path(path).open(encoding="utf-8") as file:  # whose name and lines are in the messages
            return yaml.load(file, Loader=UniqueKeyLoader)
    except (OSError, ValueError, RecursionError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{name}: not a readable YAML file: {error}") from error


class UniqueKeyLoader(yaml.SafeLoader):
    """Loads YAML in which every key is a text, and is there once: PyYAML takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = f"the key {key!r} is {'there twice' if key in seen else 'no text'}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def is_for_others(keys: dict) -> bool:
    """Whether a YAML is for FSDP1 or DeepSpeed."""
    fsdp = keys.get("fsdp_config")
    is_fsdp1 = isinstance(fsdp, dict) and (fsdp.keys() & FSDP1_KEYS or isinstance(fsdp.get("fsdp_reshard_after_forward"), str))
    return bool(is_fsdp1) or keys.get("distributed_type") == "DEEPSPEED" or "deepspeed_config" in keys


def find_problems(keys: dict) -> list[str]:
    """Everything that is wrong with the keys of a YAML: with their names and types first, then what contradicts."""
    if problems := wrong_keys(keys, TOP_KEYS):
        return problems
    fsdp = keys.get("fsdp_config", {})
    parallelism = keys.get("parallelism_config", {})
    kind = keys.get("distributed_type")
    problems += wrong_keys(fsdp, FSDP2_KEYS | OWN_KEYS) + wrong_keys(parallelism, PARALLELISM_KEYS)
    kinds = TOP_KEYS | FSDP2_KEYS
    required = ["distributed_type"]
    if kind == "FSDP":
        required += ["fsdp_version", "fsdp_auto_wrap_policy"]
    elif fsdp:
        problems.append("fsdp_config is only read with distributed_type: FSDP")
    problems += [f"{key} is missing, expected {name_of_kind(kinds[key])}" for key in required if key not in keys | fsdp]
    if problems:
        return problems

    if fsdp.get("fsdp_reshard_after_backward") is False:
        if fsdp.get("fsdp_reshard_after_forward") is not False:
            problems.append("fsdp_reshard_after_backward: false needs fsdp_reshard_after_forward: false")
        if fsdp.get("fsdp_reduce_each_batch"):
            problems.append(
                "fsdp_reduce_each_batch: true saves memory that fsdp_reshard_after_backward: false uses: set only one"
            )
    if fsdp.get("fsdp_activation_checkpointing_offload") and not fsdp.get("fsdp_activation_checkpointing"):
        problems.append("fsdp_activation_checkpointing_offload: true needs fsdp_activation_checkpointing: true")
    if not re.fullmatch(r"([0-9]{1,3}(,[0-9]{1,3})*)?", _gpu_ids(keys)):
        problems.append(f"gpu_ids is {keys['gpu_ids']!r}, expected all, or numbers of GPUs such as 0,2")
    problems += [f"{key} is {size}, expected a number of GPUs or replicas" for key, size in parallelism.items() if size < 1]
    processes = keys.get("num_processes", 1)
    machines = keys.get("num_machines", 1)
    if min(processes, machines) < 1 or processes % machines:
        problems.append(f"num_processes ({processes}) counts all machines, so it must be a multiple of num_machines ({machines})")
    elif kind == "NO" and processes > 1:
        problems.append(f"distributed_type NO is one process: use FSDP or MULTI_GPU for {processes}")
    return problems


def wrong_keys(keys: dict, kinds: dict[str, Kind]) -> list[str]:
    """The keys that are not in `kinds`, and those with a value of another kind."""
    problems = []
    for key, value in keys.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.85)
            problems.append(f"unknown key {key}: " + (f"did you mean {near[0]}?" if near else "it would be ignored: delete it"))
        elif not is_of_kind(value, kinds[key]):
            problems.append(f"{key} is {value!r}, expected {name_of_kind(kinds[key])}")
    return problems


def is_of_kind(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return any(type(value) is type(one) and value == one for one in kind)
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is int)


def name_of_kind(kind: Kind) -> str:
    return " or ".join(map(repr, kind)) if isinstance(kind, tuple) else NAMES_OF_TYPES.get(kind, "a text")


def _gpu_ids(keys: dict) -> str:
    ids = keys.get("gpu_ids")
    return "" if ids in (None, "all") else str(ids).replace(" ", "")
