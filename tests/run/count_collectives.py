"""A recipe for test_sharding.py: counts what FSDP sends in every optimizer step, into collectives.json of the run."""

import json
import runpy
from pathlib import Path

import harness
from harness.run import session

import torch.distributed as dist
from transformers import TrainerCallback

KINDS = ("all_gather_single", "reduce_scatter_single", "all_reduce")


class Count(TrainerCallback):
    """Notes kind, processes and elements of every collective between the beginning and the end of a step."""

    def __init__(self, out: Path):
        self.out, self.steps, self.counting = out, [], False
        for kind in KINDS:
            setattr(dist, kind, self.wrap(kind, getattr(dist, kind)))

    def wrap(self, kind, collective):
        def counted(*args, **kwargs):
            if self.counting:
                # The larger of the two tensors is what a gather makes and a reduction takes.
                tensors = [value for value in (*args, *kwargs.values()) if hasattr(value, "numel")]
                ranks = dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)
                self.steps[-1].append((kind, ranks, max(tensor.numel() for tensor in tensors)))
            return collective(*args, **kwargs)

        return counted

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps.append([])
        self.counting = True

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.counting = False
        if dist.get_rank() == 0:
            parameters = sum(weight.numel() for weight in model.parameters())
            self.out.write_text(json.dumps({"parameters": parameters, "steps": self.steps}))


def train(trainer):
    trainer.add_callback(Count(Path(trainer.args.output_dir, "collectives.json")))
    session.train(trainer)


harness.train = train
runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
