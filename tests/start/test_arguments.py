"""What `parse` sets: batch sizes, steps, and the environment of a run."""

import ast
import os

from harness.configs import AccelerateConfig
from harness.launched import Launched
from harness.run import sharding
from harness.start import launch

import pytest
from accelerate.utils import DistributedDataParallelKwargs
from conftest import RECIPES


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 1),  # the value of a rehearsal
        (["--per_device_eval_batch_size", "3"], 3),
        (["--per_device_eval_batch_size=3"], 3),
    ],
)
def test_eval_batch_size_is_at_most_train_batch_size(build_trainer, flags, expected):
    """Unless a flag sets it. The default of transformers, 8, would be the largest batch of the run."""
    trainer = build_trainer("qwen2_chat", "--per_device_train_batch_size", "2", *flags)
    assert trainer.args.per_device_eval_batch_size == expected


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ([], 2),  # the value of a rehearsal
        (["--global_batch_size", "12"], 6),
        (["--global_batch_size", "12", "--per_device_train_batch_size", "1"], 12),
        (["--gradient_accumulation_steps", "5"], 5),
    ],
)
def test_global_batch_size_sets_accumulation_steps(build_trainer, flags, steps):
    assert build_trainer("qwen2_chat", *flags).args.gradient_accumulation_steps == steps


def test_ddp_gradients_are_views_of_its_buckets(build_trainer):
    """Otherwise DDP holds the gradients twice."""
    trainer = build_trainer("qwen2_chat")
    trainer.accelerator.ddp_handler = DistributedDataParallelKwargs()
    sharding.prepare_sharding(trainer, AccelerateConfig())
    assert trainer.accelerator.ddp_handler.gradient_as_bucket_view


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "max_steps=" not in path.read_text()], ids=lambda path: path.stem)
def test_eval_steps_and_save_steps_are_shares_of_the_run(recipe):
    """In recipes without max_steps, whose dataset decides how many steps there are: a fixed number could be more than that."""
    calls = [node for node in ast.walk(ast.parse(recipe.read_text())) if isinstance(node, ast.Call)]
    call = next(node for node in calls if getattr(node.func, "id", "") == "parse")
    values = {keyword.arg: keyword.value.value for keyword in call.keywords if keyword.arg in ("eval_steps", "save_steps")}
    assert len(values) == 2 and all(0 < value < 1 for value in values.values())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "a"}, "a"), ({"PYTORCH_CUDA_ALLOC_CONF": "a"}, None)],
)
def test_expandable_segments_are_the_default(monkeypatch, variables, expected):
    """The user can set the allocator by the newer or the older name of the variable."""
    monkeypatch.setattr(os, "environ", dict(variables))
    launch.set_environment(Launched(tiny=True))
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


def test_ddp_does_not_search_unused_parameters_by_default(build_trainer):
    assert build_trainer("qwen2_chat", "--use_peft").args.ddp_find_unused_parameters is False
    assert build_trainer("qwen2_chat", "--ddp_find_unused_parameters", "true").args.ddp_find_unused_parameters is True
