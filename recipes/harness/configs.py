"""Reads an Accelerate YAML. Refuses keys and values that accelerate would ignore or misread without an error."""

import dataclasses
import difflib
import re
import reprlib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.messages import UserError

import yaml

# The keys that accelerate 1.15 reads for FSDP2 (utils/launch.py, FullyShardedDataParallelPlugin); tests/test_configs.py compares.
BOOLEAN_KEYS = {
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
}
LAYER_CLASSES = "fsdp_transformer_layer_cls_to_wrap"  # names with commas between them, without spaces
FSDP2_KEYS = BOOLEAN_KEYS | {
    "fsdp_version",
    "fsdp_auto_wrap_policy",
    LAYER_CLASSES,
    "fsdp_state_dict_type",
    "fsdp_ignored_modules",  # a regular expression
}
# Keys of this project. accelerate ignores them; harness/run/sharding.py reads them.
OWN_BOOLEAN_KEYS = {"fsdp_reshard_after_backward", "fsdp_reduce_each_batch"}
OWN_KEYS = OWN_BOOLEAN_KEYS | {"fsdp_reduce_dtype"}
FSDP1_KEYS = {
    "fsdp_sharding_strategy",
    "fsdp_min_num_params",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
}
# FSDP1's sharding strategies; older versions of accelerate write their numbers, counted from 1.
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Top-level keys that a run needs, that `accelerate config` writes, or that launch.sh sets, with their types. Each may be null.
TOP_TYPES = {
    "compute_environment": str,
    "debug": bool,
    "distributed_type": bool | str,  # without quotes, NO is false
    "downcast_bf16": bool | str,
    "enable_cpu_affinity": bool,
    "fsdp_config": dict,
    "gpu_ids": str | int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "main_training_function": str,
    "mixed_precision": bool | str,  # without quotes, `no` is false in YAML
    "num_machines": object,  # `problems_of_counts` says what is wrong
    "num_processes": object,
    "parallelism_config": dict,
    "rdzv_backend": str,
    "same_network": bool,
    "tpu_env": list,
    "tpu_use_cluster": bool,
    "tpu_use_sudo": bool,
    "use_cpu": bool,
}
TOP_KEYS = set(TOP_TYPES)
NAMES_OF_TYPES = {bool: "true or false", int: "a whole number", dict: "lines of `key: value` below it", list: "a list"}
LARGEST_PORT = 65_535
MAX_GPUS = 64  # per machine. A larger number is a mistake, and a process would be started for each before the GPUs are counted
STATE_DICT_TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
DISTRIBUTED_TYPES = ("FSDP", "MULTI_GPU", "NO")
PARALLELISM_KEYS = {"parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"}
OTHER_PARALLELISM = {
    "parallelism_config_tp_size": "tensor parallelism",
    "parallelism_config_cp_size": "context parallelism",
    "parallelism_config_sp_size": "sequence parallelism",
}
# Keys and values that `accelerate config` writes and that are not used here, with what to do instead.
NOT_HERE = "(docs/which-parallelism.md#not-here)"
INSTEAD = {
    "megatron_lm_config": f"Megatron-LM is not supported, use FSDP {NOT_HERE}",
    "MEGATRON_LM": f"Megatron-LM is not supported, use FSDP {NOT_HERE}",
    "fp8_config": f"fp8 is not supported, use bf16 {NOT_HERE}",
    "fp8": f"fp8 is not supported, use bf16 {NOT_HERE}",
    "XLA": f"TPUs are not supported {NOT_HERE}",
    "ipex_config": f"IPEX is not supported: delete the line, and pass --use_cpu to train on a CPU {NOT_HERE}",
    "MULTI_CPU": "write MULTI_GPU or FSDP, and pass --use_cpu",
    "dynamo_config": "delete the line, and pass --torch_compile true",
    "dynamo_backend": "delete the line, and pass --torch_compile true",
}


@dataclasses.dataclass
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
    layer_classes: tuple[str, ...] = ()  # to wrap; () leaves the choice to accelerate
    gpu_ids: str = ""  # numbers of the GPUs to use, such as "0,2"; "" for all that are visible

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def is_fsdp(self) -> bool:
        return self.distributed_type == "FSDP"

    @property
    def could_reduce_each_batch(self) -> bool:
        """Whether `fsdp_reduce_each_batch: true` would save memory."""
        return self.is_fsdp and self.reshard_after_forward and not self.reduce_each_batch

    @property
    def is_hybrid(self) -> bool:
        return self.replicas * self.shards > 1


def read(path: str) -> AccelerateConfig:
    """Reads the YAML at `path`; "" is a run without one. Raises UserError with everything that is wrong with the file."""
    if not path:
        return AccelerateConfig()
    keys = load_keys(path)
    if problems := find_problems(keys, path):
        raise UserError(f"{Path(path).name}: {'; '.join(problems)}")

    fsdp, parallelism = keys.get("fsdp_config") or {}, keys.get("parallelism_config") or {}
    names = [field.name for field in dataclasses.fields(AccelerateConfig)]
    values = {name: keys[name] for name in names if name in keys}
    values |= {name: fsdp[f"fsdp_{name}"] for name in names if f"fsdp_{name}" in fsdp}
    return AccelerateConfig(
        **values
        | {
            "path": path,
            "replicas": parallelism.get("parallelism_config_dp_replicate_size", 1),
            "shards": parallelism.get("parallelism_config_dp_shard_size", 1),
            "layer_classes": tuple(fsdp[LAYER_CLASSES].split(",")) if fsdp.get(LAYER_CLASSES) else (),
            "gpu_ids": _gpu_ids(keys),
        }
    )


def load_keys(path: str) -> dict:
    """The keys of a YAML. Raises UserError unless they are keys and values."""
    file = Path(path).name
    if not Path(path).is_file():
        raise UserError(f"file not found: {path}")
    keys = read_yaml(path, file)
    if not isinstance(keys, dict):
        raise UserError(f"{file}: no keys found: an Accelerate config is a list of `key: value` lines")
    for key, kind in (TOP_TYPES | {"deepspeed_config": dict}).items():
        if keys.get(key) is not None and not isinstance(keys[key], kind):
            raise UserError(f"{file}: {key} is {shorten(keys[key])}, expected {NAMES_OF_TYPES.get(kind, 'a text')}")
    return keys


def shorten(value: Any) -> str:
    """A value of YAML for a message. What is deeply nested is not written out: aliases can make it endless."""
    shortener = reprlib.Repr()
    shortener.maxlevel, shortener.maxstring, shortener.maxother, shortener.maxlong = 3, 100, 100, 30
    return shortener.repr(value)[:200]


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
                problem = f"the key {shorten(key)} is {'there twice' if key in seen else 'no text'}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def _gpu_ids(keys: dict) -> str:
    ids = keys.get("gpu_ids")
    return "" if ids in (None, "all") else str(ids).replace(" ", "")


def is_deepspeed(keys: dict) -> bool:
    return keys.get("distributed_type") == "DEEPSPEED" or "deepspeed_config" in keys


def marks_of_fsdp1(keys: dict) -> list[str]:
    """What in a YAML is for FSDP1, in words; [] if nothing is."""
    fsdp = keys.get("fsdp_config") or {}
    if keys.get("distributed_type") != "FSDP" or not fsdp:
        return []
    marks = [key for key in fsdp if key in FSDP1_KEYS]
    if fsdp.get("fsdp_reshard_after_forward") in STRATEGIES:
        marks.append(f"fsdp_reshard_after_forward: {fsdp['fsdp_reshard_after_forward']}")
    if fsdp.get("fsdp_version", 1) == 1:
        marks.append("fsdp_version is " + ("1" if "fsdp_version" in fsdp else "missing, which accelerate reads as 1"))
    return marks


def find_problems(keys: dict, path: str) -> list[str]:
    """Everything that is wrong with the keys of a YAML."""
    kind, fsdp, parallelism = keys.get("distributed_type"), keys.get("fsdp_config") or {}, keys.get("parallelism_config") or {}
    target = Path(path).with_name(f"fsdp2_{Path(path).name}")
    translate = f"Write the FSDP2 config that does the same, and use that: {launcher_command('--convert', path, target)}"
    if is_deepspeed(keys):
        return [
            "DeepSpeed is not used here, because FSDP2 does the same and can be rehearsed on CPU, see the table in "
            "docs/memory-and-strategies.md (ZeRO-3 is 4gpu_full_shard, ZeRO-2 is 4gpu_shard_grad_op, ZeRO-Offload is "
            f"1x3090_offload). {translate}"
        ]
    marks = marks_of_fsdp1(keys)
    if marks and keys.get("mixed_precision") not in INSTEAD:
        return [f"this config is for FSDP1 ({', '.join(marks)}). {translate}"]
    named = [*zip(keys, keys, strict=True), ("distributed_type", kind), ("mixed_precision", keys.get("mixed_precision"))]
    if unused := [f"{key}: {INSTEAD[name]}" for key, name in named if isinstance(name, str) and name in INSTEAD]:
        return unused
    problems = _unknown_keys(keys, TOP_KEYS)
    problems += _unknown_keys([key for key in parallelism if key not in OTHER_PARALLELISM], PARALLELISM_KEYS)
    for key, name in OTHER_PARALLELISM.items():
        if parallelism.get(key, 1) != 1:
            problems.append(f"{key}: {name} is not supported: delete the line")
    if kind == "FSDP":
        problems += _fsdp2_problems(fsdp)
    elif fsdp:
        problems.append("fsdp_config is only read with distributed_type: FSDP")
    for key in ("use_cpu", "tpu_use_cluster", "tpu_use_sudo", "tpu_env"):
        if keys.get(key):
            problems.append(f"{key} is not read: delete the line" + ("; pass --use_cpu" if key == "use_cpu" else ""))
    if not re.fullmatch(r"([0-9]{1,3}(,[0-9]{1,3})*)?", _gpu_ids(keys)):
        problems.append(f"gpu_ids is {shorten(keys['gpu_ids'])}, expected all, or numbers of GPUs such as 0,2")
    port = keys.get("main_process_port")
    if port is not None and not 0 <= port <= LARGEST_PORT:
        problems.append(f"main_process_port is {shorten(port)}, expected 0 to {LARGEST_PORT}")
    for key, size in parallelism.items():
        if key in PARALLELISM_KEYS and (type(size) is not int or size < 1):
            problems.append(f"{key} is {shorten(size)}, expected a number of GPUs or replicas")
    if problems:
        return problems

    if kind not in DISTRIBUTED_TYPES:
        problems.append(f"distributed_type is {shorten(kind)}, expected one of {', '.join(DISTRIBUTED_TYPES)}")
    if keys.get("mixed_precision", "no") not in ("no", "bf16", "fp16"):
        problems.append(f"mixed_precision is {shorten(keys['mixed_precision'])}, expected 'no', bf16 or fp16 (quote the 'no')")
    problems += problems_of_counts(keys)
    if not problems and kind == "NO" and keys.get("num_processes", 1) > 1:
        problems.append(f"distributed_type NO is one process: use FSDP or MULTI_GPU for {keys['num_processes']}")
    if kind == "NO":
        unread = [key for key in ("debug", "enable_cpu_affinity") if keys.get(key)]
        problems += [f"{key} has no effect with distributed_type NO: delete the line" for key in unread]
    return problems


def problems_of_counts(keys: dict) -> list[str]:
    processes, machines = keys.get("num_processes", 1), keys.get("num_machines", 1)
    if not all(type(number) is int and number > 0 for number in (processes, machines)) or processes % machines:
        numbers = shorten(processes), shorten(machines)
        return [f"num_processes ({numbers[0]}) counts all machines, so it must be a multiple of num_machines ({numbers[1]})"]
    if processes // machines > MAX_GPUS:
        return [f"num_processes is for more than {MAX_GPUS} GPUs per machine: is a digit wrong?"]
    return []


def _unknown_keys(keys: Iterable, known: set[str]) -> list[str]:
    problems = []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            problems.append(f"unknown key {key}: " + (f"did you mean {near[0]}?" if near else "it would be ignored: delete it"))
    return problems


def _fsdp2_problems(fsdp: dict) -> list[str]:
    """Everything that is wrong with an fsdp_config."""
    problems = _unknown_keys(fsdp, FSDP2_KEYS | OWN_KEYS)
    if type(fsdp.get("fsdp_version")) is not int or fsdp["fsdp_version"] != 2:
        version = shorten(fsdp["fsdp_version"]) if "fsdp_version" in fsdp else "missing"
        problems.append(f"fsdp_version is {version}: write fsdp_version: 2")
    if fsdp.get("fsdp_auto_wrap_policy") != "TRANSFORMER_BASED_WRAP":
        problems.append("write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, one FSDP unit per transformer layer")
    for key in sorted((BOOLEAN_KEYS | OWN_BOOLEAN_KEYS) & fsdp.keys()):
        if not isinstance(fsdp[key], bool):
            problems.append(f"{key} is {shorten(fsdp[key])}, expected true or false")
    if fsdp.get("fsdp_reshard_after_backward") is False:
        if fsdp.get("fsdp_reshard_after_forward") is not False:
            problems.append("fsdp_reshard_after_backward: false needs fsdp_reshard_after_forward: false")
        if fsdp.get("fsdp_reduce_each_batch"):
            problems.append(
                "fsdp_reduce_each_batch: true saves memory and fsdp_reshard_after_backward: false uses it: set only one of them"
            )
    if not isinstance(fsdp.get(LAYER_CLASSES) or "", str):
        problems.append(f"{LAYER_CLASSES} is {shorten(fsdp[LAYER_CLASSES])}, expected a name, or several like A,B")
    try:
        re.compile(fsdp.get("fsdp_ignored_modules") or "")
    except (re.error, TypeError):
        problems.append(f"fsdp_ignored_modules is {shorten(fsdp['fsdp_ignored_modules'])}, expected a regular expression")
    if fsdp.get("fsdp_activation_checkpointing_offload") and not fsdp.get("fsdp_activation_checkpointing"):
        problems.append("fsdp_activation_checkpointing_offload: true needs fsdp_activation_checkpointing: true")
    if fsdp.get("fsdp_state_dict_type", STATE_DICT_TYPES[0]) not in STATE_DICT_TYPES:
        problems.append(
            f"fsdp_state_dict_type is {shorten(fsdp['fsdp_state_dict_type'])}, expected {' or '.join(STATE_DICT_TYPES)}"
        )
    if fsdp.get("fsdp_reduce_dtype", "float32") not in ("float32", "bfloat16", "float16"):
        problems.append(f"fsdp_reduce_dtype is {shorten(fsdp['fsdp_reduce_dtype'])}, expected float32, bfloat16 or float16")
    return problems


def launcher_command(*words: object) -> str:
    """A command of launch.sh, to be pasted into a shell."""
    return shlex.join(["./launch.sh", *map(str, words)])
