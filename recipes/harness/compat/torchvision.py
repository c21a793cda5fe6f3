"""A change to torchvision, made before it is imported."""

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from types import ModuleType
from typing import Any

from harness.compat.guards import changes


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Lets `define_operators` be called when torchvision is imported, and not yet when it is only looked for."""

    @classmethod
    def install(cls) -> None:
        """Does nothing unless torchvision is installed, and for another build than that of torch. Does not import torch."""
        try:
            builds = [importlib.metadata.version(name).partition("+")[2] for name in ("torch", "torchvision")]
        except importlib.metadata.PackageNotFoundError:
            return
        if builds[0] == "cpu" != builds[1]:
            sys.meta_path.insert(0, cls())

    def find_spec(self, name: str, *args: Any) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name) if name == "torchvision" else None
        if spec and spec.origin:
            spec.loader = TorchvisionLoader(name, spec.origin)
        return spec


class TorchvisionLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        define_operators()
        super().exec_module(module)


@functools.cache  # once per process; the cache keeps the library, whose end would be that of the operators
@changes("torch.library:Library.define")
def define_operators() -> Any:
    """Makes a torchvision for CUDA importable beside a torch for CPUs: its operators exist, without a kernel.

    transformers imports torchvision wherever it is installed, also for models of texts, which fails: "operator torchvision::nms
    does not exist". pip installs these two where torch comes from another index than torchvision. What reads images needs none
    of the operators.
    Upstream: no issue found.
    Checked with: torchvision 0.28.0, torch 2.13.0.
    Remove when: torchvision can be imported without its library.
    """
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
