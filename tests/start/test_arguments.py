"""What `parse` refuses, in one line, before anything is spawned or written."""

import ast
import os

from harness.launched import Launched
from harness.run import session
from harness.start import launch

import pytest
from accelerate.utils import DistributedDataParallelKwargs
from conftest import RECIPES

RECIPE = "qwen2_fineweb_edu"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 1),  # a rehearsal's own
        (["--per_device_eval_batch_size", "3"], 3),
        (["--per_device_eval_batch_size=3"], 3),
    ],
)
def test_evaluation_batches_are_not_larger_than_those_of_training(build_trainer, flags, expected):
    """Unless a flag says so; transformers' own 8 would be the largest of the run."""
    trainer = build_trainer("qwen2_chat", "--per_device_train_batch_size", "2", *flags)
    assert trainer.args.per_device_eval_batch_size == expected


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], 2),  # a rehearsal's own
        (["--global_batch_size", "12"], 6),
        (["--global_batch_size", "12", "--per_device_train_batch_size", "1"], 12),
        (["--gradient_accumulation_steps", "5"], 5),
    ],
)
def test_the_accumulation_follows_from_the_global_batch(build_trainer, flags, steps):
    assert build_trainer("qwen2_chat", *flags).args.gradient_accumulation_steps == steps


def test_ddp_holds_gradients_once(build_trainer):
    trainer = build_trainer("qwen2_chat")
    trainer.accelerator.ddp_handler = DistributedDataParallelKwargs()
    session.prepare(trainer, {})
    assert trainer.accelerator.ddp_handler.gradient_as_bucket_view


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "max_steps=" not in path.read_text()], ids=lambda path: path.stem)
def test_runs_of_any_length_are_evaluated_and_saved_on_the_way(recipe):
    """Where the data say how many steps there are, a number of steps might come after the last."""
    calls = [node for node in ast.walk(ast.parse(recipe.read_text())) if isinstance(node, ast.Call)]
    call = next(node for node in calls if getattr(node.func, "id", "") == "parse")
    numbers = {word.arg: word.value.value for word in call.keywords if word.arg in ("eval_steps", "save_steps")}
    assert len(numbers) == 2 and all(0 < number < 1 for number in numbers.values())


@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "a"}, {"PYTORCH_CUDA_ALLOC_CONF": "a"}])
def test_blocks_of_gpu_memory_may_grow(monkeypatch, own):
    """Unless a person says what the allocator does, by its newer or its older name."""
    monkeypatch.setattr(os, "environ", dict(own))
    launch._prepare_environment(Launched(tiny=True))
    assert os.environ.get("PYTORCH_ALLOC_CONF") == own.get("PYTORCH_ALLOC_CONF", None if own else "expandable_segments:True")


def test_ddp_searches_no_unused_parameters(build_trainer):
    assert build_trainer("qwen2_chat", "--use_peft").args.ddp_find_unused_parameters is False
    assert build_trainer("qwen2_chat", "--ddp_find_unused_parameters", "true").args.ddp_find_unused_parameters is True
