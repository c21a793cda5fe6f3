"""A recipe for test_sharding.py: compares every loss with the loss computed in float32 from the same forward pass.

Trains twice: with this project's mixed precision policy, then with accelerate's. Writes the relative differences of both runs
into differences.json.
"""

import json
import runpy
import sys
from pathlib import Path

import harness
from harness import runs
from harness.run import sharding

import torch

measured, folders = [], []


def measure(trainer):
    runs.started().trainer = trainer  # an end without it is an error
    sharding.set_offload(trainer)
    if not measured:
        sharding.set_mixed_precision(trainer, "float32")
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
    measured.append(differences)
    folders.append(trainer.args.output_dir)
    sys.argv += ["--output_dir", f"{folders[0]}-again"]  # of the second run: this process holds the lock of the first
    Path(folders[0], "differences.json").write_text(json.dumps(measured))


harness.train = measure
for _ in range(2):
    runpy.run_path(str(Path(__file__).parents[2] / "recipes/qwen2_fineweb_edu.py"), run_name="__main__")
