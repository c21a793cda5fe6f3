"""Run in place of a recipe, by test_sharding.py: compares each loss with float32 arithmetic on the same forward pass.

    accelerate launch … measure_loss.py RECIPE OUT.json [--flag value …]

With HARNESS_PRECISION=off the harness leaves accelerate's own precision policy in place.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import harness
from harness.run import sharding

import torch


def measure(trainer, out: str):
    """Trains; writes the largest relative difference between the loss and its float32 recomputation."""
    if os.environ.get("HARNESS_PRECISION") != "off":
        sharding.set_precision(trainer)
    compute, differences = trainer.compute_loss, []

    def compute_loss(model, inputs, num_items_in_batch=None, **kwargs):
        labels, seen = inputs["labels"].clone(), {}
        decoder = model.get_decoder()
        hook = decoder.register_forward_hook(lambda module, args, output: seen.update(hidden=output.last_hidden_state))
        loss = compute(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)
        hook.remove()
        head = model.get_output_embeddings().weight
        head = (head.full_tensor() if hasattr(head, "full_tensor") else head).detach().bfloat16().float()
        logits = seen["hidden"].detach().float() @ head.T
        exact = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum") / num_items_in_batch
        differences.append(abs(loss.item() / exact.item() - 1))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    Path(out).write_text(json.dumps(differences))


recipe, out = sys.argv[1:3]
sys.argv = [recipe, *sys.argv[3:]]
harness.train = lambda trainer: measure(trainer, out)
runpy.run_path(recipe, run_name="__main__")
