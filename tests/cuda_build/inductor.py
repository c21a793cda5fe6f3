"""Inductor's Triton code for a layer, as on a GPU that is not there: its properties are given, and nothing runs.

A layer is traced on CPU, because without a GPU torch runs no backward pass on fake CUDA tensors. Its two graphs are then given to
Inductor with fake CUDA tensors.
"""

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from functorch.compile import make_boxed_func
from offline import Driver
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, scheduler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.runtime import driver

GPU = torch.device("cuda:0")
PROPERTIES = types.SimpleNamespace(  # of an RTX 3090
    name="NVIDIA GeForce RTX 3090",
    major=8,
    minor=6,
    multi_processor_count=82,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=1536,
    max_threads_per_block=1024,
    warp_size=32,
)


class GeneratedError(Exception):
    """Raised in place of compiling or running the code that Inductor has generated."""


@contextlib.contextmanager
def recorded_gpu() -> Iterator[None]:
    """Within the block, torch.cuda answers for the GPU of PROPERTIES."""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: None,
        "device": lambda device: contextlib.nullcontext(),
    }
    # Dynamo has its own references to these.
    of_dynamo = {
        name: staticmethod(answers[name]) for name in ("current_device", "get_device_properties", "synchronize", "device")
    }
    driver.set_active(Driver(10 * PROPERTIES.major + PROPERTIES.minor))
    try:
        with (
            mock.patch.multiple(torch.cuda, **answers),
            mock.patch.multiple(CudaInterface, **of_dynamo),
            mock.patch.object(scheduler, "has_triton", lambda: True),
            mock.patch.object(pad_mm, "has_triton", lambda: True),
            mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None),
            mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            yield
    finally:
        driver.set_active(None)


def generate(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> list[CachingAutotuner]:
    """The kernels of the layer's forward and backward pass under autocast in bf16."""
    sources: list[str] = []

    def keep_source(graph: GraphLowering) -> None:
        sources.append(graph.codegen()[0].value)
        raise GeneratedError

    def run(*args: Any) -> None:
        raise GeneratedError

    def compile_for_gpu(graph: torch.fx.GraphModule, inputs: list[Any], is_backward: bool) -> Callable:
        mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
        with recorded_gpu(), mode, torch._guards.tracing(torch._guards.TracingContext(mode)):
            fakes = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
                if isinstance(value, torch.Tensor)
                else value
                for value in inputs
            ]
            FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*fakes)
            try:
                compile_fx.compile_fx_inner(graph, fakes, is_backward=is_backward, static_input_idxs=[], cudagraphs=False)
            except InductorError as error:
                if not isinstance(error.inner_exception, GeneratedError):
                    raise
        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: compile_for_gpu(graph, inputs, is_backward=False),
        bw_compiler=lambda graph, inputs: compile_for_gpu(graph, inputs, is_backward=True),
        decompositions=select_decomp_table(),
        partition_fn=compile_fx.partition_fn,
    )
    torch._dynamo.reset()
    layer.compile(backend=backend)
    with (
        mock.patch.object(GraphLowering, "compile_to_module", keep_source),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch.autocast("cpu", torch.bfloat16),
        contextlib.suppress(GeneratedError),
    ):
        layer(*args, **kwargs)
    assert len(sources) == 2  # forward and backward
    kernels = re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", "\n".join(sources), re.DOTALL | re.MULTILINE)
    with recorded_gpu():
        return [getattr(PyCodeCache.load(source), name) for name, source in kernels]


def compile_kernel(kernel: CachingAutotuner, capability: int) -> list[bytes]:
    """The cubins of a kernel for a GPU of this compute capability, one for each configuration that Inductor would measure."""
    kernel.device_props = kernel.device_props._replace(cc=capability, major=capability // 10)
    with recorded_gpu(), torch._inductor.config.patch(use_static_cuda_launcher=False):  # with it, the kernel has no `asm`
        return [kernel._precompile_config(config).kernel.asm["cubin"] for config in kernel.configs]
