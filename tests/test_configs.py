"""Accelerate configs: those of the project are read; keys that accelerate would ignore are refused."""

import argparse
import dataclasses
import os

from harness import configs
from harness.compat.accelerate import launch_environment
from harness.start import launch

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.to_fsdp2 import to_fsdp2_command
from conftest import CONFIGS

FSDP = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
WRAP = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
BOMB = "[" + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]" for n in range(9)) + "]"  # 9^9 items
FSDP2_KEYS = configs.FsdpKeys.model_fields.keys() - configs.OWN_KEYS
FSDP1_KEYS = {
    "fsdp_sharding_strategy",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_min_num_params",
}
CONTRADICTION = ("reshard_after_forward: false", "reshard_after_backward: false", "reduce_each_batch: true")


def test_known_keys_are_those_of_accelerate():
    assert {field.name for field in dataclasses.fields(ClusterConfig)} >= configs.TopKeys.model_fields.keys()
    flags = {action.dest for action in launch_command_parser()._actions} | {"fsdp_ignored_modules"}
    assert {name for name in flags if name.startswith("fsdp_")} == FSDP2_KEYS | FSDP1_KEYS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_gradients_stay_sharded_with_reshard_after_forward(path):
    """These configs save memory. The others save communication, and accumulate unsharded gradients."""
    config = configs.read(str(path))
    fsdp = yaml.safe_load(path.read_text()).get("fsdp_config", {})
    # On one GPU nothing is sharded, and with offload the CPU would have to add the gradients of every micro-batch.
    expected = bool(fsdp.get("fsdp_reshard_after_forward")) and config.num_processes > 1
    assert bool(fsdp.get("fsdp_reduce_each_batch")) == config.reduce_each_batch == expected


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_read(path):
    config, keys = configs.read(str(path)), yaml.safe_load(path.read_text())
    assert config.name == path.stem and config.num_processes == keys["num_processes"] >= 1
    assert config.num_machines == keys.get("num_machines", 1) and config.distributed_type == keys["distributed_type"]
    assert config.mixed_precision == keys["mixed_precision"]
    ClusterConfig.from_yaml_file(yaml_file=str(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_fsdp_key_is_read(path):
    config, fsdp = configs.read(str(path)), yaml.safe_load(path.read_text()).get("fsdp_config", {})
    attributes = {f"fsdp_{name}": value for name, value in vars(config).items()}
    for key in fsdp.keys() & attributes.keys():
        assert attributes[key] == fsdp[key], key
    assert configs.OWN_KEYS & fsdp.keys() <= attributes.keys()


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
        (FSDP + WRAP + "  fsdp_use_orig_params: true\n", ["fsdp_use_orig_params", "FSDP1"]),
        (FSDP + WRAP + "  fsdp_reshard_after_forward: HYBRID_SHARD\n", ["fsdp_reshard_after_forward"]),
        ("distributed_type: DEEPSPEED\n", ["distributed_type", "DeepSpeed"]),
        ("distributed_type: MULTI_GPU\nmegatron_lm_config: {}\n", ["megatron_lm_config"]),
        (FSDP + WRAP + "parallelism_config: {parallelism_config_tp_size: 2}\n", ["parallelism_config_tp_size"]),
        ("distributed_type: FSDP\nnum_procesess: 1\n", ["num_procesess"]),
        ("distributed_type: MULTI_GPU\nuse_cpu: true\n", ["use_cpu"]),
        (FSDP + WRAP + "  fsdp_offload_parms: true\n", ["fsdp_offload_parms"]),
        (FSDP.replace("  fsdp_version: 2\n", "  fsdp_offload_params: true\n"), ["fsdp_version"]),
        (FSDP.replace("version: 2", "version: 1"), ["fsdp_version"]),
        (FSDP + WRAP + "  fsdp_offload_params: sometimes\n", ["fsdp_offload_params"]),
        (FSDP + WRAP + "  fsdp_reshard_after_backward: false\n", ["fsdp_reshard_after_forward: false"]),
        (FSDP + WRAP + "  fsdp_reduce_dtype: fp8\n", ["fsdp_reduce_dtype"]),
        (FSDP + WRAP + "  fsdp_activation_checkpointing_offload: true\n", ["fsdp_activation_checkpointing: true"]),
        (
            FSDP + WRAP + "".join(f"  fsdp_{key}\n" for key in CONTRADICTION),
            ["fsdp_reduce_each_batch", "fsdp_reshard_after_backward"],
        ),
        (FSDP, ["fsdp_auto_wrap_policy"]),
        (FSDP + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n", ["TRANSFORMER_BASED_WRAP"]),
        ('distributed_type: "NO"\nnum_processes: 2\n', ["distributed_type"]),
        ("distributed_type: NO\n", ["distributed_type"]),
        ("num_processes: 2\n", ["distributed_type"]),
        ("distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n", ["num_processes"]),
        ("distributed_type: MULTI_GPU\nnum_processes: 0\n", ["num_processes"]),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8\n", ["mixed_precision", "bf16"]),
        ("distributed_type: MULTI_GPU\nmixed_precision: no\n", ["mixed_precision", "'no'"]),
        ("distributed_type: MULTI_GPU\ndistributed_type: FSDP\n", ["distributed_type", "line 2, column 1"]),
        (FSDP + WRAP + "  fsdp_version: 2\n", ["fsdp_version", "line 6, column 3"]),
        ("distributed_type: MULTI_GPU\n7: 8\n", ["7", "line 2, column 1"]),
        ("distributed_type: MULTI_GPU\nmain_process_port: x\n", ["main_process_port"]),
        ("distributed_type: MULTI_GPU\ngpu_ids: 0-3\n", ["gpu_ids"]),
        ("distributed_type: MULTI_GPU\nmixed_precision: &a [*a]\n", ["mixed_precision"]),
        (f"distributed_type: MULTI_GPU\nmixed_precision: {BOMB}\n", ["mixed_precision"]),
        (FSDP + WRAP + "  fsdp_ignored_modules: [a]\n", ["fsdp_ignored_modules"]),
        ("distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n", ["fsdp_config"]),
        ("distributed_type: FSDP\nfsdp_config: 3\n", ["fsdp_config"]),
        (FSDP + WRAP + "  fsdp_state_dict_type: SHARDED_STATEDICT\n", ["fsdp_state_dict_type", "SHARDED_STATE_DICT"]),
        (FSDP + WRAP + "parallelism_config:\n  parallelism_config_dp_replicate_size: x\n", ["dp_replicate_size"]),
        (FSDP + WRAP + "parallelism_config:\n  parallelism_config_dp_shard_size: 0\n", ["dp_shard_size"]),
        ("- a\n- b\n", ["dictionary"]),
        ("a: [\n", ["not a readable YAML"]),
        ("a: 2026-99-99\n", ["not a readable YAML"]),
        ("[" * 5000, ["not a readable YAML"]),
    ],
)
def test_error_names_the_key(tmp_path, error_of, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = error_of(configs.read, str(path))
    assert "bad.yaml" in message
    for word in words:
        assert word in message


FSDP1 = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
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
"""  # as `accelerate config` writes it


def test_what_accelerate_translates_from_fsdp1_is_read(tmp_path, error_of):
    """`accelerate to-fsdp2`, which the message names."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(FSDP1)
    assert "FSDP1" in error_of(configs.read, str(old))
    to_fsdp2_command(argparse.Namespace(config_file=str(old), output_file=str(new), overwrite=False))
    config = configs.read(str(new))
    assert config.is_fsdp and config.num_processes == 4 and not config.reshard_after_forward


@pytest.mark.parametrize(("value", "expected"), [("all", ""), ("", ""), ("0, 2", "0,2"), ("1", "1")])
def test_gpu_ids(tmp_path, monkeypatch, value, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(f"distributed_type: MULTI_GPU\ngpu_ids: {value}\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    launch.set_environment(True, configs.read(str(path)).gpu_ids)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (expected or "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as for a rehearsal on CPU
    assert launch_environment(str(path), 2, 1, "recipe.py")["CUDA_VISIBLE_DEVICES"] == ""


def test_config_that_does_not_exist(tmp_path, error_of):
    assert f"No such file or directory: '{tmp_path}/mine.yaml'" in error_of(configs.read, str(tmp_path / "mine.yaml"))
