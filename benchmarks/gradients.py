"""The 70B recipe for on_gpu.py: also saves every gradient of every step, before the optimizer's step.

They are in `gradients/STEP-RANK.safetensors` in the output directory; of a DTensor this process's shard.
"""

import runpy
from pathlib import Path

import harness

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class SaveGradients(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **kwargs: object
    ) -> None:
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        local = {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
        self.folder.mkdir(exist_ok=True)
        copies = {name: gradient.detach().float().cpu().contiguous() for name, gradient in local.items()}
        save_file(copies, self.folder / f"{state.global_step + 1}-{args.process_index}.safetensors")


def train(trainer: Trainer) -> None:
    trainer.add_callback(SaveGradients(Path(trainer.args.output_dir, "gradients")))
    train_as_usual(trainer)


if __name__ == "__main__":
    train_as_usual, harness.train = harness.train, train
    runpy.run_path(str(Path(__file__).parents[1] / "recipes/llama31_70b_qlora.py"), run_name="__main__")
