"""`--convert` writes the FSDP2 config that does what a config for FSDP1 or DeepSpeed does."""

import dataclasses
import shlex

from harness import configs
from harness.commands import convert
from harness.messages import UserError

import pytest
import yaml
from conftest import ROOT, assert_one_error

pytestmark = pytest.mark.unit

OBVIOUS = {"distributed_type", "num_processes", "num_machines", "fsdp_config", "fsdp_version", "parallelism_config"}
# As `accelerate config` writes it in January 2026 (CINECA's slides, four GPUs), and a shorter one for offload (a guide to 70B).
SLIDE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: false
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: false
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
"""
GUIDE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 2
mixed_precision: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
"""
TWO_MACHINES = SLIDE.replace("num_machines: 1", "num_machines: 2").replace("num_processes: 4", "num_processes: 8")
NEWER = SLIDE.replace("fsdp_sharding_strategy: FULL_SHARD", "fsdp_version: 1\n  fsdp_reshard_after_forward: SHARD_GRAD_OP")
DEEPSPEED = """\
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
SHARD_GRAD_OP = {"reshard_after_forward": False, "reshard_after_backward": False, "reduce_each_batch": False}


def strategy(name: str, text: str = SLIDE) -> str:
    return text.replace("FULL_SHARD", name)


@pytest.mark.parametrize(
    ("text", "same_as", "different"),
    [
        (SLIDE, "4gpu_full_shard", {"cpu_ram_efficient_loading": False}),
        (strategy("1"), "4gpu_full_shard", {"cpu_ram_efficient_loading": False}),
        (GUIDE, "2x3090_qlora", {"cpu_ram_efficient_loading": True, "activation_checkpointing": False}),
        (strategy("HYBRID_SHARD", TWO_MACHINES), "2x4gpu_hybrid_shard", {"cpu_ram_efficient_loading": False}),
        (
            strategy("HYBRID_SHARD_ZERO2", TWO_MACHINES),
            "2x4gpu_hybrid_shard",
            {"cpu_ram_efficient_loading": False, **SHARD_GRAD_OP},
        ),
        (strategy("HYBRID_SHARD"), "4gpu_full_shard", {"cpu_ram_efficient_loading": False}),
        (strategy("SHARD_GRAD_OP"), "4gpu_shard_grad_op", {"cpu_ram_efficient_loading": False}),
        (NEWER, "4gpu_shard_grad_op", {"cpu_ram_efficient_loading": False}),
        (strategy("NO_SHARD"), "4gpu_ddp", {}),
        (strategy("NO_SHARD").replace("num_processes: 4", "num_processes: 1"), "1x3090", {}),
        (DEEPSPEED, "4gpu_full_shard", {}),
        (DEEPSPEED.replace("stage: 3", "stage: 2"), "4gpu_shard_grad_op", {}),
        (DEEPSPEED.replace("stage: 3", "stage: 1"), "4gpu_shard_grad_op", {}),
        (DEEPSPEED.replace("stage: 3", "stage: 0"), "4gpu_ddp", {}),
        (DEEPSPEED.replace("param_device: none", "param_device: cpu"), "4gpu_full_shard", {"offload_params": True}),
    ],
)
def test_translated_config_is_one_of_the_project(tmp_path, text, same_as, different):
    """By the value of its sharding strategy or ZeRO stage. accelerate's to-fsdp2 makes full shard of HYBRID_SHARD."""
    (tmp_path / "old.yaml").write_text(text)
    convert.main(str(tmp_path / "old.yaml"), str(tmp_path / "new.yaml"))
    translated = configs.read(str(tmp_path / "new.yaml"))
    expected = configs.read(str(ROOT / f"accelerate_configs/{same_as}.yaml"))
    assert translated == dataclasses.replace(expected, path=translated.path, **different)
    lines = (tmp_path / "new.yaml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if line.strip().split(":")[0] not in OBVIOUS and "#" not in line]
    assert keys and all("# " in lines[number - 1] for number in keys)


def test_what_translation_leaves_out_is_printed(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    kept = "fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer\n  fsdp_state_dict_type: LOCAL_STATE_DICT"
    path.write_text(strategy("HYBRID_SHARD").replace("fsdp_state_dict_type: SHARDED_STATE_DICT", kept) + "gpu_ids: 0,1\n")
    convert.main(str(path))
    printed = capsys.readouterr().out
    assert "On one machine HYBRID_SHARD has one replica" in printed and "gpu_ids: 0,1\n" in printed
    assert "by itself: fsdp_backward_prefetch, fsdp_forward_prefetch, fsdp_sync_module_states, fsdp_use_orig_params." in printed
    assert yaml.safe_load(printed)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Qwen2DecoderLayer"
    assert yaml.safe_load(printed)["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    path.write_text(DEEPSPEED.replace("optimizer_device: none", "optimizer_device: cpu"))
    convert.main(str(path))
    printed = capsys.readouterr().out
    assert "--gradient_accumulation_steps 4 --max_grad_norm 1.0" in printed
    assert "With the optimizer, FSDP2 offloads the weights" in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (strategy("SOME_SHARD"), ["sharding strategy is 'SOME_SHARD'", "HYBRID_SHARD"]),
        (strategy("NO_SHARD", GUIDE), ["cannot be offloaded"]),
        (SLIDE.replace("bf16\n", "fp8\n"), ["mixed_precision: fp8 is not supported, use bf16"]),
        (SLIDE.replace("use_cpu: false", "use_cpu: true"), ["use_cpu is not read"]),
        (SLIDE + "num_procesess: 8\n", ["num_procesess", "num_processes"]),
        (TWO_MACHINES.replace("num_processes: 8", "num_processes: 7"), ["num_processes (7)"]),
        (DEEPSPEED.replace("stage: 3", "stage: 4"), ["zero_stage is 4"]),
        (DEEPSPEED.replace("param_device: none", "param_device: nvme"), ["disk", "cpu instead of nvme"]),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n",
            ["zero.json is not read", "stage 3"],
        ),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", ["needs no translation"]),
    ],
)
def test_config_without_translation_is_refused(tmp_path, error_of, text, words):
    (tmp_path / "old.yaml").write_text(text)
    message = error_of(convert.main, str(tmp_path / "old.yaml"))
    assert message.startswith("old.yaml: ")
    for word in words:
        assert word in message


def test_error_has_the_command_that_translates(launch, tmp_path):
    """As a user meets it: the run is refused, the command of its message writes a config that is read."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "slide.yaml").write_text(SLIDE)
    process = launch("--tiny", "qwen2_chat", "slide.yaml", cwd=folder)
    assert_one_error(process, "slide.yaml", "for FSDP1 (fsdp_backward_prefetch", "fsdp_version is missing")
    program, *command = shlex.split(process.stderr[process.stderr.index("./launch.sh") :])
    assert program == "./launch.sh" and command[0] == "--convert"
    process = launch(*command, cwd=folder)
    assert process.returncode == 0 and str(folder / "fsdp2_slide.yaml") in process.stdout, process.stderr
    assert configs.read(str(folder / "fsdp2_slide.yaml")).is_fsdp
    assert_one_error(launch(*command, cwd=folder), "fsdp2_slide.yaml exists already")
    assert_one_error(launch("--convert", cwd=folder), "--convert: the following arguments are required: FILE", "--convert --help")


@pytest.mark.parametrize("line", ["zero_stage: []", "zero_stage: 2\n  offload_optimizer_device: []"])
def test_lists_in_a_deepspeed_config(tmp_path, line):
    path = tmp_path / "bad.yaml"
    path.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  {line}\n")
    with pytest.raises(UserError, match="expected"):
        convert.translate(str(path))
