"""What a run overrides in a recipe's trainer."""

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace

from harness.messages import UserError
from harness.run import generation, training
from harness.run.sharding import count_parameters
from harness.run.trainer import keep_workers_after_sigterm

import pytest
import torch
from runs import add_parts, train
from torch.utils.data import DataLoader


@pytest.mark.parametrize("split", ["train", "eval"])
def test_data_workers_survive_sigterm(build_trainer, split):
    """SLURM and launchers send it to all processes: a worker that exits ends the run before its checkpoint is written."""
    trainer = build_trainer(
        "qwen2_chat", "--dataloader_num_workers", "1", "--dataloader_prefetch_factor", "1", "--max_length", "32"
    )
    add_parts(trainer)
    loader = trainer.get_train_dataloader() if split == "train" else trainer.get_eval_dataloader()
    batches = iter(loader.base_dataloader)
    next(batches)
    os.kill(batches._workers[0].pid, signal.SIGTERM)
    assert [len(next(batches)["input_ids"]) for _ in range(4)]


def test_workers_are_initialized_as_before():
    found = []
    loader = keep_workers_after_sigterm(DataLoader(range(2), worker_init_fn=found.append))
    before = signal.getsignal(signal.SIGTERM)
    loader.worker_init_fn(3)
    assert found == [3] and signal.signal(signal.SIGTERM, before) == signal.SIG_IGN


def test_methods_that_a_recipe_sets_on_its_trainer_are_called(build_trainer):
    """They would hide those of the class, without which a run neither logs nor saves completely."""
    trainer, calls = build_trainer("qwen2_chat", "--max_steps", "2", "--save_strategy", "no", "--max_length", "32"), []
    log, loader = trainer.log, trainer.get_train_dataloader
    trainer.log = lambda logs, *args: (calls.append(logs), log(logs, *args))
    trainer.get_train_dataloader = lambda: (calls.append("loader"), loader())[1]
    train(trainer)
    assert "loader" in calls and any("tokens_per_second" in logs for logs in calls if isinstance(logs, dict))


def test_nothing_to_train_is_an_error(build_trainer, error_of):
    """There would be losses, a gradient norm and an end, for example with GRPO whose adapter is not trained."""
    trainer = build_trainer("qwen2_chat", "--use_peft")
    trainer.model.requires_grad_(False)
    assert "no parameter of the model is trained" in error_of(count_parameters, trainer.model)


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_run_that_changes_no_weight_is_an_error(build_trainer, rate):
    flags = ["--max_steps", "2", "--warmup_steps", "0", "--save_strategy", "no", "--eval_strategy", "no", "--max_length", "32"]
    trainer = build_trainer("qwen2_chat", *flags)
    trainer.args.learning_rate = rate
    with contextlib.nullcontext() if rate else pytest.raises(UserError, match="no trained weight has changed"):
        train(trainer)
    assert Path(trainer.args.output_dir, "model.safetensors").exists() == bool(rate)


@pytest.mark.parametrize(
    ("processes", "answers", "rows", "is_right"),
    [(2, 2, range(5), False), (2, None, range(5), False), (1, 2, range(5), True), (2, 1, range(5), True), (2, 2, None, True)],
)
def test_answers_of_an_evaluation_count_once(processes, answers, rows, is_right):
    """Of five prompts with two answers each, accelerate would complete the last batch of two processes with the first prompt."""
    args = {"world_size": processes, "per_device_train_batch_size": 2, "steps_per_generation": 1, "num_generations": 2}
    args = SimpleNamespace(**args, num_generations_eval=answers)
    trainer = SimpleNamespace(args=args, train_dataset=range(9), eval_dataset=rows)
    with contextlib.nullcontext() if is_right else pytest.raises(UserError, match="--num_generations_eval"):
        generation.check_prompts(trainer)


def test_reference_model_without_weights_is_an_error(build_trainer, error_of):
    trainer = build_trainer("qwen2_chat")
    trainer.ref_model = torch.nn.Linear(2, 2, device="meta")
    assert "fsdp_cpu_ram_efficient_loading: false" in error_of(training.check_second_models, trainer)
