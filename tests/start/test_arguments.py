"""What `parse` refuses, in one line, before anything is spawned or written."""

import pytest

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


def test_ddp_searches_no_unused_parameters(build_trainer):
    assert build_trainer("qwen2_chat", "--use_peft").args.ddp_find_unused_parameters is False
    assert build_trainer("qwen2_chat", "--ddp_find_unused_parameters", "true").args.ddp_find_unused_parameters is True
