"""Makes torchvision importable beside another build of PyTorch. launch.sh copies this file into .venv, for every program there.

transformers imports torchvision wherever it is installed, also for models of texts. PyPI's torchvision, which is for CUDA, cannot
be imported beside a PyTorch for CPUs: "operator torchvision::nms does not exist". pip installs these two where torch comes from
another index than torchvision. Here its operators exist, without a kernel; what reads images needs none of them.
Upstream: no issue found.
Checked with: torchvision 0.28.0, torch 2.13.0.
Remove when: torchvision can be imported without its library.
"""

import importlib.machinery
import importlib.metadata
import sys
from types import ModuleType
from typing import Any


class TorchvisionLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        import torch

        self.library = torch.library.Library("torchvision", "DEF")  # its end would be that of the operators
        for name in ("nms", "qnms"):
            self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        super().exec_module(module)


class TorchvisionFinder:
    """Finds torchvision with `TorchvisionLoader`. To look for torchvision does not import torch."""

    @staticmethod
    def find_spec(name: str, *args: Any) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name) if name == "torchvision" else None
        if spec and spec.origin:
            spec.loader = TorchvisionLoader(name, spec.origin)
        return spec


def install() -> None:
    """Does nothing unless torchvision is installed, and for another build than that of torch. Does not import torch."""
    try:
        of_torch, of_torchvision = (importlib.metadata.version(name).partition("+")[2] for name in ("torch", "torchvision"))
    except importlib.metadata.PackageNotFoundError:
        return
    if of_torch == "cpu" and of_torchvision != "cpu":
        sys.meta_path.insert(0, TorchvisionFinder)
