"""A recipe for test_first_process.py: after `parse`, each process writes what its checks could have left behind."""

import hashlib
import json
import os
import random
import runpy
import threading
from pathlib import Path

import harness

import numpy
import torch

parse = harness.parse


def parse_and_describe(*arguments, **values):
    parsed = parse(*arguments, **values)
    states = [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), repr(numpy.random.get_state()).encode()]
    names = [thread.name for thread in threading.enumerate()]
    found = {
        "threads of torch": torch.get_num_threads(),
        "threads of Python": sorted(name for name in names if name != "tqdm_monitor"),  # of progress bars
        "random numbers": [hashlib.sha256(state).hexdigest() for state in states],
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "device": str(torch.get_default_device()),
        "arguments": [{name: repr(value) for name, value in vars(part).items() if name in COMPARED} for part in parsed],
    }
    Path(parsed[1].output_dir, f"process-{os.environ['RANK']}.json").write_text(json.dumps(found))
    return parsed


COMPARED = ("model_name_or_path", "model_revision", "attn_implementation", "dtype", "load_in_4bit", "model_init_kwargs")
COMPARED += ("gradient_accumulation_steps", "max_steps", "per_device_train_batch_size", "dataset_name", "bf16")
harness.parse = parse_and_describe
runpy.run_path(str(Path(__file__).parents[2] / "recipes/llama31_70b_qlora.py"), run_name="__main__")
