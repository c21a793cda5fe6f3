"""What a run overrides in a recipe's trainer."""

import os
import signal

from harness.compat.transformers import TrainerWithHooks
from harness.run.settings import RunSettings
from harness.run.trainer import add_parts, keep_workers_after_sigterm

import pytest
from torch.utils.data import DataLoader
from trl import SFTTrainer


@pytest.mark.parametrize("split", ["train", "eval"])
def test_data_workers_survive_sigterm(build_trainer, split):
    """SLURM and launchers send it to all processes: a worker that exits ends the run before its checkpoint is written."""
    trainer = build_trainer(
        "qwen2_chat", "--dataloader_num_workers", "1", "--dataloader_prefetch_factor", "1", "--max_length", "32"
    )
    add_parts(trainer, None, None, RunSettings())
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


def test_class_of_the_recipe_stays(build_trainer):
    trainer = build_trainer("qwen2_chat")
    own = type(trainer)
    add_parts(trainer, None, None, RunSettings())
    assert isinstance(trainer, SFTTrainer) and isinstance(trainer, TrainerWithHooks)
    assert type(trainer).__module__ == own.__module__ and own is SFTTrainer
