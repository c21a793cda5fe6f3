"""The YAMLs: every key is one accelerate reads, with a reason beside it; what it would ignore is refused."""

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


def test_the_keys_are_the_ones_accelerate_knows():
    assert {field.name for field in dataclasses.fields(ClusterConfig)} >= configs.TOP_KEYS
    flags = {action.dest for action in launch_command_parser()._actions} | {"fsdp_ignored_modules"}
    known = {name for name in flags if name.startswith("fsdp_")}
    assert known == configs.FSDP2_KEYS | configs.FSDP1_WORDS.keys()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_gradients_stay_sharded_where_memory_is_the_point(path):
    """Where layers are freed after the forward pass; where they stay gathered, traffic is, and gradients add up whole."""
    fsdp = configs.read(str(path))["fsdp_config"]
    assert bool(fsdp.get("fsdp_reduce_each_batch")) == bool(fsdp.get("fsdp_reshard_after_forward"))


@pytest.mark.parametrize("key", sorted(configs.FSDP2_KEYS))
def test_every_fsdp2_key_changes_the_plugin(key, monkeypatch):
    """A key that changes nothing is dead under FSDP2."""
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    variables = {  # as accelerate/utils/launch.py names them
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


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_reads_and_explains_itself(path):
    config = configs.read(str(path))
    assert config["num_processes"] >= 1
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and "GPU" in lines[0]
    obvious = {"distributed_type", "num_processes", "num_machines", "fsdp_config", "fsdp_version", "parallelism_config"}
    for number, line in enumerate(lines):
        key = line.strip().split(":")[0]
        if line.strip() and not line.strip().startswith("#") and key not in obvious:
            assert lines[number - 1].strip().startswith("#"), f"{path.name}: {key} has no reason above it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: FSDP\nnum_procesess: 1\n", ["num_procesess", "num_processes"]),
        (FSDP + "  fsdp_offload_parms: true\n", ["fsdp_offload_parms", "fsdp_offload_params"]),
        (FSDP.replace("  fsdp_version: 2\n", "  fsdp_offload_params: true\n"), ["fsdp_version", "missing"]),
        (FSDP.replace("version: 2", "version: 1"), ["fsdp_version is 1"]),
        (
            FSDP + "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: sometimes\n",
            ["fsdp_offload_params", "sometimes"],
        ),
        (FSDP + "  fsdp_sharding_strategy: HYBRID_SHARD\n", ["fsdp_sharding_strategy", "parallelism_config"]),
        (FSDP + "  fsdp_use_orig_params: true\n", ["fsdp_use_orig_params", "delete"]),
        ("distributed_type: DEEPSPEED\n", ["DEEPSPEED", "FSDP"]),
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
def test_a_bad_config_is_one_line(tmp_path, capsys, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        configs.read(str(path))
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.count("\n") == 1 and "bad.yaml" in message
    for word in words:
        assert word in message


def test_the_yaml_is_one_accelerate_itself_reads():
    for path in CONFIGS:
        ClusterConfig.from_yaml_file(yaml_file=str(path))
        assert yaml.safe_load(path.read_text()).keys() <= configs.TOP_KEYS


OF_FSDP1 = """\
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


def test_fsdp1_is_answered_at_once_and_what_accelerate_makes_of_it_is_taken(tmp_path, monkeypatch, says):
    """As `accelerate config` writes it; the command of the answer is run as it stands."""
    (tmp_path / "mine.yaml").write_text(OF_FSDP1)
    monkeypatch.chdir(tmp_path)
    message = says(configs.read, "mine.yaml")
    for word in (
        "backward_prefetch",
        "forward_prefetch",
        "sync_module_states",
        "use_orig_params",
        "version is 1",
        "'SHARD_GRAD_OP'",
    ):
        assert word in message
    command = message[message.index("accelerate to-fsdp2") :].split()
    subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True, capture_output=True)
    fsdp = configs.read("fsdp2_mine.yaml")["fsdp_config"]
    assert fsdp["fsdp_version"] == 2 and fsdp["fsdp_reshard_after_forward"] is False
