"""A recipe for test_sharding.py: counts FSDP's collectives in every optimizer step, and writes collectives.json."""

import json
import runpy
from pathlib import Path

import harness

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

KINDS = {"all_gather_single": dist, "reduce_scatter_single": dist, "all_reduce": dist, "full_tensor": DTensor}


class CountCollectives(TrainerCallback):
    """Records kind, ranks and number of elements of every collective from the beginning of a step to the optimizer's update."""

    def __init__(self, file: Path):
        self.file, self.steps, self.is_counting = file, [], False
        for kind, owner in KINDS.items():
            setattr(owner, kind, self.wrap(kind, getattr(owner, kind)))

    def wrap(self, kind, collective):
        def counted(*args, **kwargs):
            if self.is_counting:
                # The output of an all-gather and the input of a reduction is the larger of the two tensors.
                tensors = [value for value in (*args, *kwargs.values()) if hasattr(value, "numel")]
                ranks = dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)
                self.steps[-1].append((kind, ranks, max(tensor.numel() for tensor in tensors)))
            return collective(*args, **kwargs)

        return counted

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps.append([])
        self.is_counting = True

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.is_counting = False
        if dist.get_rank() == 0:
            parameters = sum(weight.numel() for weight in model.parameters())
            head = model.get_output_embeddings().weight.numel()
            self.file.write_text(json.dumps({"parameters": parameters, "head": head, "steps": self.steps}))


def train(trainer):
    trainer.add_callback(CountCollectives(Path(trainer.args.output_dir, "collectives.json")))
    train_as_usual(trainer)


train_as_usual, harness.train = harness.train, train
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
