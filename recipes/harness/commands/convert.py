"""Translates the YAMLs that `accelerate config` writes for FSDP1 and DeepSpeed into one for FSDP2. launch.sh calls it:

`python -m harness.commands.convert FILE [OUT]`.
"""

import sys
from pathlib import Path

from harness.commands import arguments
from harness.configs import (
    FSDP1_KEYS,
    NAMES_OF_TYPES,
    STRATEGIES,
    TOP_KEYS,
    find_problems,
    is_deepspeed,
    launcher_command,
    load_keys,
    marks_of_fsdp1,
    problems_of_counts,
    read,
    shorten,
)
from harness.messages import UserError, exit_on_user_error, plural, print_once

import yaml

ZERO_STAGES = {0: "NO_SHARD", 1: "SHARD_GRAD_OP", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
# What a translated config keeps of the original. launch.sh sets the other keys.
KEPT_KEYS = {"debug", "enable_cpu_affinity", "gpu_ids", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu"}
# Of the keys that are read; numbers can be "auto".
DEEPSPEED_TYPES = {
    "zero_stage": int,
    "offload_optimizer_device": str,
    "offload_param_device": str,
    "deepspeed_config_file": str,
    "gradient_accumulation_steps": int,
    "gradient_clipping": float,
}
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


def main(*words: str) -> None:
    """Prints the FSDP2 config that does what the config FILE does, or writes it to OUT."""
    parsed = arguments.convert().read(words)
    path, out = parsed.file, parsed.out
    keys, notes = translate(path)
    text = with_comments(keys, notes)
    if not out:
        print_once(text.rstrip())
        return
    if Path(out).exists():
        raise UserError(f"{out} exists already: name another file: {launcher_command('--convert', path, 'OUT')}")
    try:
        Path(out).write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another file") from error
    next_steps = f"Written to {out}. To rehearse with it: {launcher_command('--tiny', 'RECIPE', out)}"
    print_once("\n".join([*notes, next_steps, f"Memory and time: {launcher_command('--plan', 'RECIPE', out)}"]))


def translate(path: str) -> tuple[dict, list[str]]:
    """The keys of the FSDP2 config that does what an FSDP1 or DeepSpeed config does, and notes about it, a title first.

    Raises UserError for a config that needs no translation or has none.
    """
    keys, file = load_keys(path), Path(path).name
    if not (is_deepspeed(keys) or marks_of_fsdp1(keys)):
        read(path)
        raise UserError(f"{file}: this config needs no translation: use it as it is")
    if problems := problems_of_counts(keys):
        raise UserError(f"{file}: {problems[0]}")
    machines, processes, notes = keys.get("num_machines", 1), keys.get("num_processes", 1), []
    fsdp, deepspeed = keys.get("fsdp_config") or {}, keys.get("deepspeed_config") or {}
    if not isinstance(fsdp.get("fsdp_auto_wrap_policy", ""), str):
        raise UserError(f"{file}: fsdp_auto_wrap_policy is {shorten(fsdp['fsdp_auto_wrap_policy'])}, expected a text")
    for key, kind in DEEPSPEED_TYPES.items():
        if deepspeed.get(key) not in (None, "auto") and not isinstance(deepspeed[key], kind):
            raise UserError(f"{file}: {key} is {shorten(deepspeed[key])}, expected {NAMES_OF_TYPES.get(kind, 'a text')}")
    if is_deepspeed(keys):
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
    if problems := find_problems(new | unknown, path):
        raise UserError(f"{file}: {'; '.join(problems)}")
    where = plural(processes, "GPU") + (f" of {machines} machines" if machines > 1 else "")
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
        raise UserError(f"{file}: the sharding strategy is {shorten(values[0])}, expected one of {', '.join(STRATEGIES)}")
    return name


def _fsdp1_of_deepspeed(deepspeed: dict, file: str, notes: list[str]) -> dict:
    """The FSDP1 keys for a deepspeed_config. `notes` gets what is a flag here."""
    stages = "stage 3 is 4gpu_full_shard, 1 and 2 are 4gpu_shard_grad_op, 0 is 4gpu_ddp"
    if "deepspeed_config_file" in deepspeed:
        raise UserError(f"{file}: {deepspeed['deepspeed_config_file']} is not read: use the config for its stage: {stages}")
    stage = deepspeed.get("zero_stage")
    if stage not in list(ZERO_STAGES):  # a list, because what a YAML holds may have no hash
        raise UserError(f"{file}: zero_stage is {shorten(stage)}, expected 0, 1, 2 or 3: {stages}")
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


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
