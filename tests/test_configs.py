"""Accelerate configs: those of the project explain every key; keys that accelerate would ignore are refused."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from harness import configs

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import CONFIGS

FSDP = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
WRAP = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
CONTRADICTION = ("reshard_after_forward: false", "reshard_after_backward: false", "reduce_each_batch: true")


def test_known_keys_are_those_of_accelerate():
    assert {field.name for field in dataclasses.fields(ClusterConfig)} >= configs.TOP_KEYS
    flags = {action.dest for action in launch_command_parser()._actions} | {"fsdp_ignored_modules"}
    known = {name for name in flags if name.startswith("fsdp_")}
    assert known == configs.FSDP2_KEYS | configs.FSDP1_KEYS.keys()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_gradients_stay_sharded_with_reshard_after_forward(path):
    """These configs save memory. The others save communication, and accumulate unsharded gradients."""
    config = configs.read(str(path))
    fsdp = yaml.safe_load(path.read_text()).get("fsdp_config", {})
    assert bool(fsdp.get("fsdp_reduce_each_batch")) == bool(fsdp.get("fsdp_reshard_after_forward"))
    assert config.reduce_each_batch == (config.is_fsdp and config.reshard_after_forward)


@pytest.mark.parametrize("key", sorted(configs.FSDP2_KEYS))
def test_every_fsdp2_key_has_an_effect(key, monkeypatch):
    """Each changes accelerate's FSDP plugin."""
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    variables = {  # the names are those of accelerate/utils/launch.py
        "fsdp_version": {"FSDP_VERSION": "1"},
        "fsdp_reshard_after_forward": {"FSDP_RESHARD_AFTER_FORWARD": "false"},
        "fsdp_offload_params": {"FSDP_OFFLOAD_PARAMS": "true"},
        "fsdp_auto_wrap_policy": {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
        "fsdp_transformer_layer_cls_to_wrap": {
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Layer",
        },
        "fsdp_state_dict_type": {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"},
        "fsdp_cpu_ram_efficient_loading": {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
        "fsdp_activation_checkpointing": {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
        "fsdp_activation_checkpointing_offload": {
            "FSDP_ACTIVATION_CHECKPOINTING": "true",
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
        },
        "fsdp_ignored_modules": {"FSDP_IGNORED_MODULES": ".*lm_head"},
    }[key]
    monkeypatch.setenv("FSDP_VERSION", "2")
    *context, last = variables
    for name in context:
        monkeypatch.setenv(name, variables[name])
    before = FullyShardedDataParallelPlugin()
    monkeypatch.setenv(last, variables[last])
    after = FullyShardedDataParallelPlugin()
    assert str(vars(before)) != str(vars(after))


def test_project_has_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_explains_every_key(path):
    """In a comment above the key. The first line, which `./launch.sh` lists, names the GPUs."""
    config, keys = configs.read(str(path)), yaml.safe_load(path.read_text())
    assert config.name == path.stem and config.num_processes == keys["num_processes"] >= 1
    assert config.num_machines == keys.get("num_machines", 1) and config.distributed_type == keys["distributed_type"]
    assert config.mixed_precision == keys["mixed_precision"]
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and "GPU" in lines[0]
    obvious = {"distributed_type", "num_processes", "num_machines", "fsdp_config", "fsdp_version", "parallelism_config"}
    for number, line in enumerate(lines):
        key = line.strip().split(":")[0]
        if line.strip() and not line.strip().startswith("#") and key not in obvious:
            assert lines[number - 1].strip().startswith("#"), f"{path.name}: {key} has no comment above it"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_fsdp_key_is_read(path):
    config, fsdp = configs.read(str(path)), yaml.safe_load(path.read_text()).get("fsdp_config", {})
    attributes = {f"fsdp_{name}": value for name, value in vars(config).items()}
    for key in fsdp.keys() & attributes.keys():
        assert attributes[key] == fsdp[key], key
    for key in configs.OWN_KEYS & fsdp.keys():
        assert key in attributes


def test_hybrid_config():
    (path,) = (path for path in CONFIGS if "hybrid" in path.stem)
    config = configs.read(str(path))
    assert config.is_fsdp and config.is_hybrid and (config.replicas, config.shards) == (2, 4)
    assert not any(configs.read(str(other)).is_hybrid for other in CONFIGS if other != path)


def test_no_config():
    """`python recipe.py`"""
    config = configs.read("")
    assert not config.path and not config.is_fsdp and config.num_processes == 1 and config.mixed_precision is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: FSDP\nnum_procesess: 1\n", ["num_procesess", "num_processes"]),
        (FSDP + "  fsdp_offload_parms: true\n", ["fsdp_offload_parms", "fsdp_offload_params"]),
        (FSDP.replace("  fsdp_version: 2\n", "  fsdp_offload_params: true\n"), ["fsdp_version", "missing"]),
        (FSDP.replace("version: 2", "version: 1"), ["fsdp_version is 1"]),
        (FSDP + WRAP + "  fsdp_offload_params: sometimes\n", ["fsdp_offload_params", "sometimes"]),
        (FSDP + WRAP + "  fsdp_reshard_after_backward: false\n", ["needs fsdp_reshard_after_forward: false"]),
        (FSDP + WRAP + "  fsdp_reduce_dtype: fp8\n", ["fsdp_reduce_dtype", "fp8"]),
        (
            FSDP + WRAP + "".join(f"  fsdp_{key}\n" for key in CONTRADICTION),
            ["fsdp_reduce_each_batch", "fsdp_reshard_after_backward"],
        ),
        (FSDP + "  fsdp_sharding_strategy: HYBRID_SHARD\n", ["fsdp_sharding_strategy", "parallelism_config"]),
        (FSDP + "  fsdp_use_orig_params: true\n", ["fsdp_use_orig_params", "delete"]),
        ("distributed_type: DEEPSPEED\n", ["DeepSpeed", "FSDP2"]),
        (FSDP, ["fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]),
        (FSDP + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n", ["TRANSFORMER_BASED_WRAP"]),
        ('distributed_type: "NO"\nnum_processes: 2\n', ["one process"]),
        ("distributed_type: NO\n", ["False", "FSDP"]),
        ("distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n", ["num_processes (3)", "multiple"]),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8\n", ["fp8", "bf16"]),
        ("distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n", ["fsdp_config", "FSDP"]),
        ("- a\n- b\n", ["key: value"]),
        ("a: [\n", ["not a readable YAML"]),
    ],
)
def test_error_names_the_key(tmp_path, error_of, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = error_of(configs.read, str(path))
    assert "bad.yaml" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_config(path):
    ClusterConfig.from_yaml_file(yaml_file=str(path))
    assert yaml.safe_load(path.read_text()).keys() <= configs.TOP_KEYS


# As `accelerate config` writes it.
FSDP1_CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_fsdp1_config_can_be_translated(tmp_path, monkeypatch, error_of):
    """The error names every FSDP1 key, and a command of accelerate; what that command writes is accepted."""
    (tmp_path / "mine.yaml").write_text(FSDP1_CONFIG)
    monkeypatch.chdir(tmp_path)
    message = error_of(configs.read, "mine.yaml")
    keys = ["backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params"]
    for word in (*keys, "version is 1", "'SHARD_GRAD_OP'"):
        assert word in message
    command = message[message.index("accelerate to-fsdp2") :].split()
    subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True, capture_output=True)
    config = configs.read("fsdp2_mine.yaml")
    assert config.is_fsdp and config.reshard_after_forward is False and config.cpu_ram_efficient_loading
