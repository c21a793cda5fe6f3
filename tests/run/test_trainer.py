"""What a run overrides in a recipe's trainer."""

import os
import signal
from types import SimpleNamespace

from harness.compat.transformers import TrainerWithHooks
from harness.run import session
from harness.run.trainer import keep_workers_after_sigterm

import pytest
import torch
from datasets import Dataset
from runs import add_parts, train
from torch.utils.data import DataLoader
from trl import SFTTrainer


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


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_trainer_without_rows_is_an_error(error_of, name):
    empty, rows = (Dataset.from_dict({"input_ids": ids}) for ids in ([], [[1]]))
    trainer = SimpleNamespace(**{"train_dataset": rows, "eval_dataset": rows, name: empty})
    assert f"{name} of the trainer has no row" in error_of(session.check_trainer, trainer)


def test_workers_are_initialized_as_before():
    found = []
    loader = keep_workers_after_sigterm(DataLoader(range(2), worker_init_fn=found.append))
    before = signal.getsignal(signal.SIGTERM)
    loader.worker_init_fn(3)
    assert found == [3] and signal.signal(signal.SIGTERM, before) == signal.SIG_IGN


def test_class_of_the_recipe_stays(build_trainer):
    trainer = build_trainer("qwen2_chat")
    own = type(trainer)
    add_parts(trainer)
    assert isinstance(trainer, SFTTrainer) and isinstance(trainer, TrainerWithHooks)
    assert type(trainer).__module__ == own.__module__ and own is SFTTrainer


def test_methods_that_a_recipe_sets_on_its_trainer_are_called(build_trainer):
    """They would hide those of the class, without which a run neither logs nor saves completely."""
    trainer, calls = build_trainer("qwen2_chat", "--max_steps", "2", "--save_strategy", "no", "--max_length", "32"), []
    log, loader = trainer.log, trainer.get_train_dataloader
    trainer.log = lambda logs, *args: (calls.append(logs), log(logs, *args))
    trainer.get_train_dataloader = lambda: (calls.append("loader"), loader())[1]
    train(trainer)
    assert "loader" in calls and any("tokens_per_second" in logs for logs in calls if isinstance(logs, dict))


def test_a_trainer_trains_once(build_trainer, error_of):
    trainer = build_trainer("qwen2_chat")
    add_parts(trainer)
    assert "train() was called a second time" in error_of(session.check_trainer, trainer)


def test_reference_model_without_weights_is_an_error(build_trainer, error_of):
    trainer = build_trainer("qwen2_chat")
    trainer.ref_model = torch.nn.Linear(2, 2, device="meta")
    assert "fsdp_cpu_ram_efficient_loading: false" in error_of(session.check_trainer, trainer)
