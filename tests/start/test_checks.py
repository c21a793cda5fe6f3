"""Checks of the machine and the installed packages, before anything is started."""

import argparse
import math
import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

from harness import configs
from harness.configs import AccelerateConfig
from harness.nodes.cluster import Nodes
from harness.run.training import check_built_trainer
from harness.runs import Run, StartedRecipe
from harness.start import claim, launch, machine
from harness.start.arguments import (
    REFUSED,
    ScriptArguments,
    check_arguments,
    check_flags_have_effect,
    check_generation,
    check_numbers,
    check_optimizer,
    check_quantized,
    check_refused,
)

import pytest
import torch
from conftest import ROOT
from peft import LoraConfig, get_peft_model
from runs import check_run, write_rows
from transformers import AutoModelForCausalLM, Qwen2Config, TrainingArguments
from trl import DistillationConfig, GRPOConfig, ModelConfig, SFTConfig

RECIPE = ROOT / "tests/recipes/own/weighed.py"  # it passes no adapter to its trainer

VALUES = SimpleNamespace(use_cpu=False)


@pytest.fixture
def refuses(error_of):
    """Checks that a function refuses arguments with these words, or accepts them if there are none."""

    def call(words: str, function, *arguments):
        if words:
            assert words in error_of(function, *arguments)
        else:
            function(*arguments)

    return call


@pytest.mark.parametrize(("gpus", "on_cpu"), [(8, False), (4, True), (0, True)])
def test_rehearsal_uses_gpus_only_if_there_are_enough(monkeypatch, gpus, on_cpu):
    """Two machines with four GPUs each are eight processes on this machine."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    context = Run("a.py", AccelerateConfig("hybrid.yaml", mixed_precision="bf16"), processes=8, tiny=True, values=VALUES)
    assert machine.must_use_cpu(context) == on_cpu


def test_old_driver_is_an_error(monkeypatch):
    """NVML counts the GPUs of such a machine. CUDA is not available, and its initialization says why."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError("The NVIDIA driver on your system is too old.")))
    with pytest.raises(RuntimeError, match="too old"):
        machine.must_use_cpu(Run("a.py", processes=2, values=VALUES))


@pytest.mark.parametrize(("visible", "expected"), [(None, "0"), ("2,3", "2")])
def test_one_process_sees_one_gpu(monkeypatch, visible, expected):
    """With several visible GPUs, transformers would wrap the model in nn.DataParallel."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    monkeypatch.setattr(os, "environ", environment | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    config = AccelerateConfig("c.yaml", distributed_type="NO")
    launch.set_environment_of_processes("a.py", config, Nodes(), 1, tiny=False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({}, ""),
        ({"use_peft": True}, "peft_config=get_peft_config(model_args)"),
        ({"use_peft": True, "load_in_4bit": True}, "quantization_config=get_quantization_config(model_args)"),
        ({"use_peft": True, "lora_r": 8}, ""),
        ({"use_peft": True, "lora_r": 64}, "--lora_r"),
        ({"use_peft": True, "lora_r": 8, "lora_dropout": 0.5}, "--lora_dropout"),
        ({"dtype": "bfloat16"}, "--dtype"),
        ({"dtype": "float32"}, ""),
    ],
)
def test_arguments_that_the_built_trainer_has_not(refuses, flags, problem):
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, num_hidden_layers=1), dtype=torch.float32)
    if "get_peft_config" not in problem and "use_peft" in flags:
        model = get_peft_model(model, LoraConfig(r=8))
    arguments = None, SFTConfig(use_cpu=True, bf16=False), ModelConfig(**flags)
    recipe = StartedRecipe(Run("a.py", given=frozenset(flags)), arguments=arguments, trainer=SimpleNamespace(model=model))
    refuses(problem, check_built_trainer, recipe)


def test_adapter_that_a_recipe_does_not_make(fork_launch, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": f"some words {number}"} for number in range(20)])
    flags = ["--dataset_name", rows, "--use_peft", "--output_dir", tmp_path / "run"]
    process = fork_launch("--tiny", RECIPE, "1x3090", *flags)
    assert process.returncode == 2 and "get_peft_config" in process.stderr, process.stdout + process.stderr


BF16, FP16, NEITHER = {"bf16": True, "fp16": False}, {"bf16": False, "fp16": True}, {"bf16": False, "fp16": False}


@pytest.mark.parametrize(
    ("precision", "model", "is_sharded", "words"),
    [
        (BF16, {}, True, "pass --bf16 false --fp16 true --dtype float32"),  # by the config, the recipe or a flag
        (BF16, {"use_peft": True, "load_in_4bit": True}, False, "pass --bf16 false --fp16 true --dtype float16"),
        (NEITHER, {"dtype": "bfloat16"}, True, "pass --bf16 false --fp16 true --dtype float32"),
        (NEITHER, {"use_peft": True, "load_in_4bit": True}, True, "sharded 4-bit weights compute in bf16"),
        (FP16, {}, True, ""),  # --bf16 false --fp16 true with a config for bf16
        (FP16, {"dtype": "float16", "use_peft": True, "load_in_4bit": True}, False, ""),
    ],
)
def test_bf16_needs_compute_capability_8(monkeypatch, refuses, precision, model, is_sharded, words):
    """Whatever makes the run compute in bf16. The second GPU of this machine is a T4."""
    capability = {0: (8, 6), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capability))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    arguments = SimpleNamespace(**precision), ModelConfig(**model)
    machine.check_bf16(*arguments, Run("a.py", any_config=is_sharded, processes=1))
    refuses(words, machine.check_bf16, *arguments, Run("a.py", any_config=is_sharded, processes=2))


def test_launcher_checks_bf16(monkeypatch, error_of):
    """`parse` does, once the arguments of the run are known. (On this machine there is no GPU.)"""
    calls = []
    monkeypatch.setattr(machine, "check_bf16", lambda *arguments: calls.append(arguments[2].processes))
    monkeypatch.setattr(machine, "must_use_cpu", lambda context: False)
    config = configs.read(str(ROOT / "accelerate_configs/4gpu_ddp.yaml"))
    monkeypatch.setattr(sys, "argv", ["qwen2_chat.py", "--bf16", "false", "--model_name_or_path", "/nowhere"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert "/nowhere" in error_of(check_run, ROOT / "recipes/qwen2_chat.py", config, 4)
    assert calls == [4]


def test_arguments_that_an_optimizer_does_not_read(tmp_path, refuses):
    """transformers ignores them."""
    for optim, given, unread in (
        ("adamw_torch", "foo=1", "'foo=1'"),
        ("ademamix", "alpha=5.0,foo=1", "'foo=1'"),
        ("sgd", "momentum=0.9,", "''"),
        ("sgd", "nesterov=true,momentum=0.9", ""),
    ):
        training_args = TrainingArguments(str(tmp_path), optim=optim, optim_args=given, use_cpu=True, bf16=False)
        refuses(unread, check_optimizer, training_args, AccelerateConfig())


@pytest.mark.parametrize(
    ("training", "model", "flag"),
    [
        ({}, {"dtype": "float16"}, "--dtype"),  # of a recipe; it would be replaced
        ({}, {"bnb_4bit_quant_storage": "uint8"}, "--bnb_4bit_quant_storage"),
        ({"fp16": True}, {}, "--fp16"),
        ({"torch_compile": True}, {}, "--torch_compile"),
        ({}, {"load_in_4bit": False, "load_in_8bit": True}, "--load_in_8bit"),
        ({}, {}, ""),
    ],
)
def test_options_of_sharded_4bit_weights(refuses, training, model, flag):
    training_args = SimpleNamespace(**NEITHER | {"torch_compile": False, "model_init_kwargs": None} | training)
    model_args = ModelConfig("my/model", **{"use_peft": True, "load_in_4bit": True} | model)
    arguments = Run("a.py", any_config=True), training_args, model_args
    refuses(flag, check_quantized, *arguments)


def test_recipe_must_call_train(fork_launch, tmp_path):
    """`trainer.train()` neither resumes nor saves the model."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": f"some words {number}"} for number in range(20)])
    recipe = tmp_path / "recipe.py"
    call = f"SFTConfig, 'text', model_name_or_path='Qwen/Qwen2-0.5B', dataset_name={str(rows)!r}"
    recipe.write_text(f"from harness import parse\nfrom trl import SFTConfig\n\nparse({call})\n")
    process = fork_launch("--tiny", recipe, "1x3090", "--output_dir", tmp_path / "run")
    assert process.returncode == 2, process.stdout + process.stderr
    assert process.stderr.count("error: ") == 1 and "recipe.py ended without calling train()" in process.stderr


def test_folder_that_another_node_does_not_have(tmp_path, monkeypatch, error_of):
    """Only the first process makes it."""
    monkeypatch.setattr(claim, "answer_of_first", lambda question, find: str(tmp_path / "run/file"))
    monkeypatch.setattr(claim, "SECONDS_TO_SEE_IT", 1)
    message = error_of(claim.check_folder_is_shared, tmp_path / "run")
    assert "is not the same folder on all nodes" in message


@pytest.mark.parametrize("words", REFUSED)
def test_refused_flags(error_of, words):
    """Set by the recipe, a file or the command line."""
    name, value = [*words.removeprefix("--").split(), "x"][:2]
    number_or_text = {"True": True, "False": False, "1": 1}.get(value, value)
    assert error_of(check_refused, argparse.Namespace(**{name: number_or_text})).startswith(f"--{name}: ")
    check_refused(argparse.Namespace(**{name: number_or_text is False}))


@pytest.mark.parametrize("name", ["trust_remote_code", "tp_plan"])
def test_options_of_a_model_that_are_refused(error_of, name):
    for options in ({name: "auto"}, f'{{"{name}": true}}'):
        assert name in error_of(check_refused, argparse.Namespace(model_init_kwargs=options))


@pytest.mark.parametrize(
    ("given", "values", "flag"),
    [
        ({"lora_r"}, {}, "lora_r"),
        ({"bnb_4bit_quant_type"}, {"use_peft": True}, "bnb_4bit_quant_type"),
        ({"warmup_steps"}, {"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps"),
        ({"warmup_steps"}, {"lr_scheduler_type": "constant", "warmup_steps": 0}, ""),
        ({"warmup_steps"}, {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, ""),
        ({"max_steps"}, {"max_tokens": 9}, "max_steps"),
        ({"global_batch_size", "gradient_accumulation_steps"}, {}, "gradient_accumulation_steps"),
    ],
)
def test_flags_without_effect(refuses, given, values, flag):
    config = {name: values[name] for name in ("lr_scheduler_type", "warmup_steps") if name in values}
    arguments = ScriptArguments(max_tokens=values.get("max_tokens")), TrainingArguments("out", use_cpu=True, **config)
    call = Run("a.py", given=frozenset(given)), *arguments, ModelConfig(use_peft=values.get("use_peft", False))
    refuses(flag and f"--{flag} ", check_flags_have_effect, *call)


@pytest.mark.parametrize(("group", "iterations", "flag"), [(4, 1, ""), (3, 1, "--num_generations"), (4, 2, "--num_iterations")])
def test_groups_of_answers(refuses, group, iterations, flag):
    values = {"generation_batch_size": 8, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
    values |= {"num_generations": group, "num_iterations": iterations, "metric_for_best_model": None}
    training_args = SimpleNamespace(**values)
    refuses(flag, check_generation, SimpleNamespace(dataset_streaming=False), training_args)


@pytest.mark.parametrize("kind", [GRPOConfig, DistillationConfig])
def test_streams_of_prompts_are_refused(error_of, tmp_path, kind):
    arguments = ScriptArguments("rows", dataset_streaming=True), kind(str(tmp_path), use_cpu=True, bf16=False), ModelConfig()
    assert error_of(check_arguments, Run("a.py"), *arguments).startswith("--dataset_streaming: ")


NUMBERS = [("max_steps", 0), ("max_steps", -5), ("learning_rate", math.nan), ("max_length", 0), ("global_batch_size", 0)]


@pytest.mark.parametrize(("name", "value"), [*NUMBERS, ("max_pixels", -1), ("max_pixels", 980)])
def test_numbers_with_which_nothing_is_trained(error_of, name, value):
    training_args = SimpleNamespace(**{"max_steps": 1} | {name: value})
    assert f"--{name} is {value}" in error_of(check_numbers, Run("a.py"), SimpleNamespace(), training_args)
