"""Small models on the CPU do not call the kernels that installed packages have for GPUs."""

import json
import os
import subprocess
import sys

from conftest import ROOT

# Every function of these packages refuses tensors, as Triton does for those on a CPU.
PACKAGE = """
import sys

class Kernels:
    def __getattr__(self, name):
        return self if name[:2] != "__" else object.__getattribute__(self, name)

    def __call__(self, *tensors, **options):
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

sys.modules[__name__] = Kernels()
"""
# None of these models keeps documents apart on a CPU; a model that cannot be computed gives None.
PROGRAM = """
import json, pathlib
import harness  # makes transformers importable beside a torchvision for GPUs
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5  # a recipe may import a model before `parse`
from harness.commands import saved
from harness.model import packing
from harness.rehearsal import tiny
import torch

folder = pathlib.Path("model")
tiny.make_tiny_model("Qwen/Qwen3.5-4B", "main", folder)
apart = [packing.keeps_documents_apart(AutoConfig.for_model(kind), None) for kind in ("qwen3_5_text", "mamba2", "falcon_mamba")]
try:
    AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.arange(9)[None])
    kernels = "lost for the rest of the process"
except ValueError as error:
    kernels = "kept" if "Triton" in str(error) else str(error)
logits = saved.load_model(folder)(input_ids=torch.arange(9)[None]).logits
print(json.dumps([apart, kernels, list(logits.shape[:2])]))
"""


def test_kernels_that_refuse_tensors_on_a_cpu(environment, tmp_path):
    for name in ("fla", "causal_conv1d", "mamba_ssm"):
        (tmp_path / f"{name}.py").write_text(PACKAGE)
    variables = environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "recipes")])}
    process = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == [[False, False, False], "kept", [1, 9]]
