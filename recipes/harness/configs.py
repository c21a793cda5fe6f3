"""Reads an Accelerate YAML. Refuses keys and values that accelerate would ignore or misread without an error.

The second half translates the YAMLs that `accelerate config` writes for FSDP1 and DeepSpeed. launch.sh calls it:

`python -m harness.configs FILE [OUT]`.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.launched import UserError, exit_on_user_error, print_once

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
    "fsdp_ignored_modules",
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
ZERO_STAGES = {0: "NO_SHARD", 1: "SHARD_GRAD_OP", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
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
# What a translated config keeps of the original. launch.sh sets the other keys.
KEPT_KEYS = {"debug", "enable_cpu_affinity", "gpu_ids", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu"}
COMMENTS = {  # in a translated config, above a key, or above a key with this value
    "mixed_precision": "Computes in this dtype, keeps float32 weights. Cost: two bytes more per parameter than pure bf16.",
    "mixed_precision: 'no'": "No autocast: the model computes in the dtype it is loaded in.",
    "parallelism_config_dp_replicate_size": "One replica per machine: only gradients cross the network. Cost: more memory than "
    "sharding over all GPUs.",
    "parallelism_config_dp_shard_size": "Weights are all-gathered among the GPUs of a machine.",
    "fsdp_auto_wrap_policy": "One FSDP unit per transformer layer: the next layer is all-gathered while this one computes.",
    "fsdp_transformer_layer_cls_to_wrap": "The classes of these layers. Without the key, the model's own list is used.",
    "fsdp_offload_params": "Weights, gradients and optimizer in host memory. Cost: they cross PCIe, and AdamW runs on the CPU.",
    "fsdp_reshard_after_forward: true": "Frees a layer's weights after its forward pass. Cost: a second all-gather.",
    "fsdp_reshard_after_forward: false": "With both keys false, weights are all-gathered once per optimizer step. Cost: all "
    "weights on every GPU.",
    "fsdp_reshard_after_backward": "A key of this project, ignored by accelerate.",
    "fsdp_reduce_each_batch": "Accumulated gradients stay sharded. Cost: a reduce-scatter per micro-batch. This project's key.",
    "fsdp_activation_checkpointing": "Recomputes activations in the backward pass. Cost: about a third more compute.",
    "fsdp_state_dict_type: SHARDED_STATE_DICT": "Each process writes its shard of a checkpoint; `./launch.sh --merge` makes a "
    "plain model of them.",
    "fsdp_state_dict_type: FULL_STATE_DICT": "The first process writes the whole model into a checkpoint. Cost: its host memory.",
    "fsdp_cpu_ram_efficient_loading": "The first process reads the weights and broadcasts them. Gain: one copy in host memory.",
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
    keys = _load(path)
    if problems := _problems(keys, path):
        raise UserError(f"{Path(path).name}: {'; '.join(problems)}")

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
        layer_classes=tuple(fsdp[LAYER_CLASSES].split(",")) if fsdp.get(LAYER_CLASSES) else (),
        gpu_ids=_gpu_ids(keys),
    )


def _load(path: str) -> dict:
    """The keys of a YAML. Raises UserError unless they are keys and values."""
    file = Path(path).name
    if not Path(path).is_file():
        raise UserError(f"file not found: {path}")
    try:
        keys = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file}: not a readable YAML file: {error}") from error
    if not isinstance(keys, dict):
        raise UserError(f"{file}: no keys found: an Accelerate config is a list of `key: value` lines")
    for key in ("fsdp_config", "parallelism_config", "deepspeed_config"):
        if not isinstance(keys.get(key) or {}, dict):
            raise UserError(f"{file}: {key} is {keys[key]!r}, expected lines of `key: value` below it")
    return keys


def _gpu_ids(keys: dict) -> str:
    ids = keys.get("gpu_ids")
    return "" if ids in (None, "all") else str(ids).replace(" ", "")


def _is_deepspeed(keys: dict) -> bool:
    return keys.get("distributed_type") == "DEEPSPEED" or "deepspeed_config" in keys


def _marks_of_fsdp1(keys: dict) -> list[str]:
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


def _problems(keys: dict, path: str) -> list[str]:
    """Everything that is wrong with the keys of a YAML."""
    kind, fsdp, parallelism = keys.get("distributed_type"), keys.get("fsdp_config") or {}, keys.get("parallelism_config") or {}
    target = Path(path).with_name(f"fsdp2_{Path(path).name}")
    translate = f"Write the FSDP2 config that does the same, and use that: {_command('--convert', path, target)}"
    if _is_deepspeed(keys):
        return [
            "DeepSpeed is not used here, because FSDP2 does the same and can be rehearsed on CPU, see the table in "
            "docs/memory-and-strategies.md (ZeRO-3 is 4gpu_full_shard, ZeRO-2 is 4gpu_shard_grad_op, ZeRO-Offload is "
            f"1x3090_offload). {translate}"
        ]
    marks = _marks_of_fsdp1(keys)
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
    if not re.fullmatch(r"(\d+(,\d+)*)?", _gpu_ids(keys)):
        problems.append(f"gpu_ids is {keys['gpu_ids']!r}, expected all, or numbers of GPUs such as 0,2")
    for key, size in parallelism.items():
        if key in PARALLELISM_KEYS and (type(size) is not int or size < 1):
            problems.append(f"{key} is {size!r}, expected a number of GPUs or replicas")
    if problems:
        return problems

    if kind not in DISTRIBUTED_TYPES:
        problems.append(f"distributed_type is {kind!r}, expected one of {', '.join(DISTRIBUTED_TYPES)}")
    if keys.get("mixed_precision", "no") not in ("no", "bf16", "fp16"):
        problems.append(f"mixed_precision is {keys['mixed_precision']!r}, expected 'no', bf16 or fp16 (quote the 'no')")
    problems += _problems_of_counts(keys)
    if not problems and kind == "NO" and keys.get("num_processes", 1) > 1:
        problems.append(f"distributed_type NO is one process: use FSDP or MULTI_GPU for {keys['num_processes']}")
    if kind == "NO":
        unread = [key for key in ("debug", "enable_cpu_affinity") if keys.get(key)]
        problems += [f"{key} has no effect with distributed_type NO: delete the line" for key in unread]
    return problems


def _problems_of_counts(keys: dict) -> list[str]:
    processes, machines = keys.get("num_processes", 1), keys.get("num_machines", 1)
    if not all(type(number) is int and number > 0 for number in (processes, machines)) or processes % machines:
        return [f"num_processes ({processes}) counts all machines, so it must be a multiple of num_machines ({machines})"]
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
    if fsdp.get("fsdp_version") != 2:
        problems.append(f"fsdp_version is {fsdp.get('fsdp_version', 'missing')}: write fsdp_version: 2")
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
    if not isinstance(fsdp.get(LAYER_CLASSES) or "", str):
        problems.append(f"{LAYER_CLASSES} is {fsdp[LAYER_CLASSES]!r}, expected a name, or several like A,B")
    if fsdp.get("fsdp_activation_checkpointing_offload") and not fsdp.get("fsdp_activation_checkpointing"):
        problems.append("fsdp_activation_checkpointing_offload: true needs fsdp_activation_checkpointing: true")
    if fsdp.get("fsdp_state_dict_type", STATE_DICT_TYPES[0]) not in STATE_DICT_TYPES:
        problems.append(f"fsdp_state_dict_type is {fsdp['fsdp_state_dict_type']!r}, expected {' or '.join(STATE_DICT_TYPES)}")
    if fsdp.get("fsdp_reduce_dtype", "float32") not in ("float32", "bfloat16", "float16"):
        problems.append(f"fsdp_reduce_dtype is {fsdp['fsdp_reduce_dtype']!r}, expected float32, bfloat16 or float16")
    return problems


def main(path: str, out: str = "") -> None:
    """Prints the FSDP2 config that does what the config at `path` does, or writes it to `out`."""
    keys, notes = translate(path)
    text = with_comments(keys, notes)
    if not out:
        print_once(text.rstrip())
        return
    if Path(out).exists():
        raise UserError(f"{out} exists already: name another file: {_command('--convert', path, 'OUT')}")
    try:
        Path(out).write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another file") from error
    next_steps = f"Written to {out}. To rehearse with it: {_command('--tiny', 'RECIPE', out)}"
    print_once("\n".join([*notes, next_steps, f"Memory and time: {_command('--plan', 'RECIPE', out)}"]))


def translate(path: str) -> tuple[dict, list[str]]:
    """The keys of the FSDP2 config that does what an FSDP1 or DeepSpeed config does, and notes about it, a title first.

    Raises UserError for a config that needs no translation or has none.
    """
    keys, file = _load(path), Path(path).name
    if not (_is_deepspeed(keys) or _marks_of_fsdp1(keys)):
        read(path)
        raise UserError(f"{file}: this config needs no translation: use it as it is")
    if problems := _problems_of_counts(keys):
        raise UserError(f"{file}: {problems[0]}")
    machines, processes, notes = keys.get("num_machines", 1), keys.get("num_processes", 1), []
    fsdp, deepspeed = keys.get("fsdp_config") or {}, keys.get("deepspeed_config") or {}
    if _is_deepspeed(keys):
        fsdp = _fsdp1_of_deepspeed(deepspeed, file, notes)
    strategy = _strategy_of(fsdp, file)
    is_hybrid = strategy.startswith("HYBRID") and machines > 1
    if strategy.startswith("HYBRID") and not is_hybrid:
        notes.append(f"On one machine {strategy} has one replica, which is sharded over all GPUs.")

    new = {"distributed_type": "FSDP", "num_machines": machines, "num_processes": processes}
    new["mixed_precision"] = keys.get("mixed_precision") or "no"  # without quotes, `no` is false in YAML
    new |= {key: value for key, value in keys.items() if key in KEPT_KEYS and value not in (None, False, [], "all")}
    if is_hybrid:
        new["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": machines,
            "parallelism_config_dp_shard_size": processes // machines,
        }
    if strategy == "NO_SHARD":
        if fsdp.get("fsdp_offload_params"):
            raise UserError(f"{file}: weights that are not sharded cannot be offloaded: choose FULL_SHARD or ZeRO stage 3")
        new["distributed_type"] = "MULTI_GPU" if processes > 1 else "NO"
    else:
        new["fsdp_config"] = _fsdp2_of_fsdp1(fsdp, strategy, notes)
    if machines == 1:
        del new["num_machines"]
    unknown = {key: value for key, value in keys.items() if key not in TOP_KEYS | {"deepspeed_config"}}
    if problems := _problems(new | unknown, path):
        raise UserError(f"{file}: {'; '.join(problems)}")
    where = f"{processes} GPU{'s' if processes > 1 else ''}" + (f" of {machines} machines" if machines > 1 else "")
    if new["mixed_precision"] != "no" and "fsdp_config" in new:
        half = {"bf16": "bfloat16", "fp16": "float16"}[new["mixed_precision"]]
        notes.append(f"Gradients are reduced in float32; fsdp_reduce_dtype: {half} below fsdp_config halves that communication.")
    if not fsdp.get("fsdp_activation_checkpointing"):
        notes.append("No activation checkpointing: if your script turned it on, pass --activation_checkpointing true.")
    return new, [f"{strategy} on {where}, translated from {file}", *notes]


def _strategy_of(fsdp: dict, file: str) -> str:
    """The sharding strategy of an FSDP1 config, which has two keys for it."""
    values = [fsdp[key] for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy") if key in fsdp]
    values = [value for value in values if not isinstance(value, bool)]
    if not values:  # what FSDP1 does, or a config for FSDP2 that lacks its fsdp_version
        return "FULL_SHARD" if fsdp.get("fsdp_reshard_after_forward", True) else "SHARD_GRAD_OP"
    name = str(values[0]).upper()
    if name.isdecimal() and 1 <= int(name) <= len(STRATEGIES):
        name = STRATEGIES[int(name) - 1]
    if name not in STRATEGIES:
        raise UserError(f"{file}: the sharding strategy is {values[0]!r}, expected one of {', '.join(STRATEGIES)}")
    return name


def _fsdp1_of_deepspeed(deepspeed: dict, file: str, notes: list[str]) -> dict:
    """The FSDP1 keys for a deepspeed_config. `notes` gets what is a flag here."""
    stages = "stage 3 is 4gpu_full_shard, 1 and 2 are 4gpu_shard_grad_op, 0 is 4gpu_ddp"
    if "deepspeed_config_file" in deepspeed:
        raise UserError(f"{file}: {deepspeed['deepspeed_config_file']} is not read: use the config for its stage: {stages}")
    stage = deepspeed.get("zero_stage")
    if stage not in list(ZERO_STAGES):  # a list, because what a YAML holds may have no hash
        raise UserError(f"{file}: zero_stage is {stage!r}, expected 0, 1, 2 or 3: {stages}")
    devices = [deepspeed.get(f"offload_{what}_device", "none") for what in ("optimizer", "param")]
    if "nvme" in devices:
        raise UserError(f"{file}: FSDP2 cannot offload to a disk: write cpu instead of nvme, or none")
    notes.append(f"DeepSpeed is not used here: FSDP2 does the same as ZeRO stage {stage}.")
    if stage == 1:
        notes[-1] += " It shards the gradients too, which sends no more."
    if "cpu" in devices and deepspeed.get("offload_param_device") != "cpu":
        notes.append("With the optimizer, FSDP2 offloads the weights and gradients that it updates.")
    flags = {"gradient_accumulation_steps": "gradient_accumulation_steps", "gradient_clipping": "max_grad_norm"}
    passed = [f"--{flag} {deepspeed[key]}" for key, flag in flags.items() if deepspeed.get(key) not in (None, "auto")]
    if passed:
        notes.append(f"These are flags of the recipe here: {' '.join(passed)}")
    return {
        "fsdp_sharding_strategy": ZERO_STAGES[stage],
        "fsdp_offload_params": "cpu" in devices,
        "fsdp_cpu_ram_efficient_loading": True,
    }


def _fsdp2_of_fsdp1(fsdp: dict, strategy: str, notes: list[str]) -> dict:
    """An fsdp_config for FSDP2. `notes` gets what has no counterpart."""
    is_resharded = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    new = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": is_resharded}
    new["fsdp_reduce_each_batch" if is_resharded else "fsdp_reshard_after_backward"] = is_resharded
    if fsdp.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        notes.append(f"Instead of {fsdp['fsdp_auto_wrap_policy']}, every transformer layer is wrapped.")
    if left_out := [key for key in fsdp if key in FSDP1_KEYS - {"fsdp_sharding_strategy", "fsdp_min_num_params"}]:
        notes.append(f"FSDP2 does by itself: {', '.join(left_out)}.")
    new |= {key: value for key, value in fsdp.items() if key not in FSDP1_KEYS and key not in new and value is not False}
    if new.get("fsdp_state_dict_type", "LOCAL_STATE_DICT") == "LOCAL_STATE_DICT":  # FSDP2 has none of that name
        new["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    return new


def with_comments(keys: dict, notes: list[str]) -> str:
    """The text of a config: notes at its top, and above every key its reason and cost."""
    lines = [f"# {note}" for note in notes]
    for key, value in keys.items():
        indent, entries = ("  ", value) if isinstance(value, dict) else ("", {key: value})
        if indent:
            lines.append(f"{key}:")
        for name, entry in entries.items():
            line = yaml.safe_dump({name: entry}, width=1000).strip()
            if comment := COMMENTS.get(line) or COMMENTS.get(name):
                lines.append(f"{indent}# {comment}")
            lines.append(indent + line)
    return "\n".join(lines) + "\n"


def _command(*words: object) -> str:
    return shlex.join(["./launch.sh", *map(str, words)])


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
