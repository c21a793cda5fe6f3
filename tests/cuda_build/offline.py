"""Compiles Triton's kernels for a GPU that is not there: a kernel is compiled when it is called, and not launched."""

import contextlib
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver(DriverBase):
    """Answers for a GPU of this compute capability, such as 86."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # a kernel keeps what was compiled by the number of the device

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, type_: str) -> str:
        raise NotImplementedError("nothing is launched")

    get_active_torch_device = get_benchmarker = map_python_to_cpp_type


@contextlib.contextmanager
def compiled_for(capability: int) -> Iterator[dict[str, bytes]]:
    """Within the block, kernels are compiled for this capability. Yields their cubins by name of the module and the function."""
    cubins, run = {}, JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        cubins[f"{kernel.__module__}.{kernel.__name__}"] = compiled.asm["cubin"]
        return compiled

    driver.set_active(Driver(capability))
    JITFunction.run = compile_only
    try:
        yield cubins
    finally:
        JITFunction.run = run
        driver.set_active(None)
