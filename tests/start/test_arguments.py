"""What `parse` sets: batch sizes, steps, and the environment of a run."""

import argparse
from types import SimpleNamespace

from harness import configs
from harness.configs import AccelerateConfig
from harness.run import sharding
from harness.runs import Run
from harness.start import machine
from harness.start.arguments import ScriptArguments, set_steps

import pytest
from accelerate.utils import DistributedDataParallelKwargs
from conftest import ROOT


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], 2),  # the value of a rehearsal
        (["--global_batch_size", "12"], 6),
        (["--global_batch_size", "12", "--per_device_train_batch_size", "1"], 12),
        (["--gradient_accumulation_steps", "5"], 5),
        (["--global_batch_size", "3"], 3),  # possible with the run's micro-batch of 1, not with a rehearsal's of 2
    ],
)
def test_global_batch_size_sets_accumulation_steps(build_trainer, flags, steps):
    assert build_trainer("qwen2_chat", *flags).args.gradient_accumulation_steps == steps


def test_own_files_are_trained_on_for_one_epoch(tmp_path):
    """By a recipe that streams, whose number of steps is for its own dataset; a flag for epochs or steps counts."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    for name, given, expected in (
        (str(path), {"dataset_name"}, (False, -1, 1)),
        (str(path), {"dataset_name", "num_train_epochs"}, (False, -1, 3)),
        (str(path), {"dataset_name", "max_steps"}, (True, 1000, 3)),
        (str(path), {"dataset_name", "dataset_streaming"}, (True, 1000, 3)),
        ("someone/rows", {"dataset_name"}, (True, 1000, 3)),
        ("someone/rows", {"num_train_epochs"}, (True, -1, 3)),
    ):
        script_args = ScriptArguments(dataset_name=name, dataset_streaming=True)
        batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
        training_args = SimpleNamespace(max_steps=1000, num_train_epochs=3, **batch)
        set_steps(Run("a.py", given=frozenset(given)), (script_args, training_args, None), {}, 1)
        assert (script_args.dataset_streaming, training_args.max_steps, training_args.num_train_epochs) == expected


def test_budget_of_tokens():
    script_args = ScriptArguments(dataset_name="a/b", max_tokens=10_000)
    training_args = SimpleNamespace(max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=256)
    set_steps(Run("a.py"), (script_args, training_args, None), {}, 2)
    assert training_args.max_steps == 3


def test_ddp_gradients_are_views_of_its_buckets(build_trainer):
    """Otherwise DDP holds the gradients twice."""
    trainer = build_trainer("qwen2_chat")
    trainer.accelerator.ddp_handler = DistributedDataParallelKwargs()
    sharding.prepare_sharding(trainer, AccelerateConfig())
    assert trainer.accelerator.ddp_handler.gradient_as_bucket_view


PINNED = ",pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"


def test_activation_offloading_without_a_gpu(build_trainer, capsys):
    """TRL asks for the current accelerator, of which there is none."""
    assert not build_trainer("qwen2_chat", "--activation_offloading").args.activation_offloading
    assert "--activation_offloading is not used" in capsys.readouterr().out


GROWING = "expandable_segments:True"
OFFLOADED = {"offload": True}


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        ("1x3090", {}, GROWING),
        ("1x3090_offload", {}, GROWING),
        ("1x3090_offload", {"use_peft": True}, GROWING + PINNED),
        ("1x3090_offload", {"use_peft": True, "activation_offloading": True}, GROWING),
        ("1x3090_offload", {"use_peft": True, "activation_checkpointing_kwargs": OFFLOADED}, GROWING),
        ("1x3090_offload", {"use_peft": True, "activation_checkpointing_kwargs": '{"offload": true}'}, GROWING),
    ],
)
def test_allocator_settings(config, values, expected):
    """Segments grow, and the pinned memory of frozen, offloaded weights is not rounded up."""
    found = argparse.Namespace(**{"use_peft": False, "activation_checkpointing_kwargs": None} | values)
    assert machine.allocator_settings(configs.read(str(ROOT / f"accelerate_configs/{config}.yaml")), found) == expected


@pytest.mark.parametrize(
    ("flags", "batch", "on_start"),
    [
        ([], 1, True),  # the batch of a rehearsal
        (["--per_device_eval_batch_size=3", "--eval_strategy", "no"], 3, False),
        (["--eval_strategy", "no", "--eval_on_start"], 1, True),
    ],
)
def test_evaluations(build_trainer, flags, batch, on_start):
    """Without a flag their batch is at most that of the training: transformers' default of 8 would be the largest of the run."""
    args = build_trainer("qwen2_chat", "--per_device_train_batch_size", "2", *flags).args
    assert (args.per_device_eval_batch_size, args.eval_on_start) == (batch, on_start)
