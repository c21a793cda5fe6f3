"""Accelerate configs: those of the project are read; keys that accelerate would ignore are refused."""

import dataclasses
import os

from harness import configs
from harness.compat.accelerate import launch_environment
from harness.start import launch

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
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
def test_config_is_read(path):
    config, keys = configs.read(str(path)), yaml.safe_load(path.read_text())
    assert config.name == path.stem and config.num_processes == keys["num_processes"] >= 1
    assert config.num_machines == keys.get("num_machines", 1) and config.distributed_type == keys["distributed_type"]
    assert config.mixed_precision == keys["mixed_precision"]
    ClusterConfig.from_yaml_file(yaml_file=str(path))
    fsdp, attributes = keys.get("fsdp_config", {}), {f"fsdp_{name}": value for name, value in vars(config).items()}
    for key in fsdp.keys() & attributes.keys():
        assert attributes[key] == fsdp[key], key
    assert configs.OWN_KEYS & fsdp.keys() <= attributes.keys()
    # These configs save memory. The others save communication, and accumulate unsharded gradients. On one GPU nothing is
    # sharded, and with offload the CPU would have to add the gradients of every micro-batch.
    expected = bool(fsdp.get("fsdp_reshard_after_forward")) and config.num_processes > 1
    assert bool(fsdp.get("fsdp_reduce_each_batch")) == config.reduce_each_batch == expected
    assert config.is_hybrid == ("hybrid" in path.stem) and (not config.is_hybrid or (config.replicas, config.shards) == (2, 4))


def test_no_config():
    """`python recipe.py`"""
    config = configs.read("")
    assert not config.path and not config.is_fsdp and config.num_processes == 1 and config.mixed_precision is None


# Whole files that are refused, or what follows FSDP + WRAP in one, and a word of the message.
FILES = {
    "distributed_type: DEEPSPEED\n": "DeepSpeed",
    "distributed_type: MULTI_GPU\nmegatron_lm_config: {}\n": "megatron_lm_config",
    "distributed_type: FSDP\nnum_procesess: 1\n": "num_procesess",
    "distributed_type: MULTI_GPU\nuse_cpu: true\n": "use_cpu",
    FSDP.replace("  fsdp_version: 2\n", "  fsdp_offload_params: true\n"): "fsdp_version",
    FSDP.replace("version: 2", "version: 1"): "fsdp_version",
    FSDP: "fsdp_auto_wrap_policy",
    FSDP + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n": "TRANSFORMER_BASED_WRAP",
    'distributed_type: "NO"\nnum_processes: 2\n': "distributed_type",
    "distributed_type: NO\n": "distributed_type",
    "num_processes: 2\n": "distributed_type",
    "distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n": "num_processes",
    "distributed_type: MULTI_GPU\nnum_processes: 0\n": "num_processes",
    "distributed_type: MULTI_GPU\nmixed_precision: fp8\n": "mixed_precision",
    "distributed_type: MULTI_GPU\nmixed_precision: no\n": "mixed_precision",
    "distributed_type: MULTI_GPU\ndistributed_type: FSDP\n": "line 2, column 1",
    "distributed_type: MULTI_GPU\n7: 8\n": "line 2, column 1",
    "distributed_type: MULTI_GPU\ngpu_ids: 0-3\n": "gpu_ids",
    "distributed_type: MULTI_GPU\nmixed_precision: &a [*a]\n": "mixed_precision",
    f"distributed_type: MULTI_GPU\nmixed_precision: {BOMB}\n": "mixed_precision",
    "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n": "fsdp_config",
    "- a\n- b\n": "dictionary",
    "a: [\n": "not a readable YAML",
    "a: 2026-99-99\n": "not a readable YAML",
    "[" * 5000: "not a readable YAML",
}
ENDS = {
    "  fsdp_use_orig_params: true\n": "FSDP1",
    "  fsdp_reshard_after_forward: HYBRID_SHARD\n": "fsdp_reshard_after_forward",
    "parallelism_config: {parallelism_config_tp_size: 2}\n": "parallelism_config_tp_size",
    "  fsdp_offload_parms: true\n": "fsdp_offload_parms",
    "  fsdp_offload_params: sometimes\n": "fsdp_offload_params",
    "  fsdp_reshard_after_backward: false\n": "fsdp_reshard_after_forward: false",
    "  fsdp_reduce_dtype: fp8\n": "fsdp_reduce_dtype",
    "  fsdp_activation_checkpointing_offload: true\n": "fsdp_activation_checkpointing: true",
    "".join(f"  fsdp_{key}\n" for key in CONTRADICTION): "fsdp_reduce_each_batch",
    "  fsdp_version: 2\n": "line 6, column 3",
    "  fsdp_ignored_modules: [a]\n": "fsdp_ignored_modules",
    "  fsdp_state_dict_type: SHARDED_STATEDICT\n": "SHARDED_STATE_DICT",
    "parallelism_config:\n  parallelism_config_dp_shard_size: 0\n": "dp_shard_size",
}


@pytest.mark.parametrize(
    ("text", "word"), [*FILES.items(), *((FSDP + WRAP + end, word) for end, word in ENDS.items())], ids=lambda text: text[-60:]
)
def test_error_names_the_key(tmp_path, error_of, text, word):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = error_of(configs.read, str(path))
    assert "bad.yaml" in message and word in message


@pytest.mark.parametrize(("value", "expected"), [("all", ""), ("", ""), ("0, 2", "0,2"), ("1", "1")])
def test_gpu_ids(tmp_path, monkeypatch, value, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(f"distributed_type: MULTI_GPU\ngpu_ids: {value}\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    launch.set_environment(True, configs.read(str(path)).gpu_ids)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (expected or "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as for a rehearsal on CPU
    assert launch_environment(str(path), 2, 1, "recipe.py")["CUDA_VISIBLE_DEVICES"] == ""
