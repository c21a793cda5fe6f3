"""What the GPUs of this machine support, and whether they can be used at all."""

import importlib
import re
import warnings

from harness.messages import UserError
from harness.runs import GpuFeatures

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers.utils import is_flash_attn_2_available

VARLEN, FLASH = "varlen", "flash_attention_2"  # values of --attn_implementation


def find_gpu_features() -> GpuFeatures:
    """What the GPUs of this machine support."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # `machine.count_gpus` reports a driver that is too old
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        return GpuFeatures([])
    try:
        no_triton = why_not_triton()
        if not has_capability_8():
            return GpuFeatures([], no_triton=no_triton)
        problems = {VARLEN: problem_of_varlen(), FLASH: problem_of_flash_attn()}
    except UserError as error:
        return GpuFeatures([], problem=str(error))
    if not is_flash_attn_2_available(kernels_fallback_ok=True):
        del problems[FLASH]
    usable = [implementation for implementation, problem in problems.items() if not problem]
    return GpuFeatures(usable, "; ".join(filter(None, problems.values())), no_triton)


def raise_if_gpu_fails(error: Exception) -> None:
    """Raises UserError if `error` is about the GPU itself, such as one that is full or busy, and not about what it lacks."""
    is_of_gpu = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
    if is_of_gpu and not re.search("kernel image|device function|PTX", str(error)):
        raise UserError(
            f"the GPU cannot be used: {_first_line(error)} (`nvidia-smi` lists the programs that use it): stop them, or choose "
            "another GPU with CUDA_VISIBLE_DEVICES"
        ) from error


def has_capability_8() -> bool:
    """Whether all GPUs that this process sees have compute capability 8.0 or higher."""
    return all(torch.cuda.get_device_capability(index) >= (8, 0) for index in range(torch.cuda.device_count()))


def why_not_triton() -> str:
    """Why TRL's loss cannot use Triton on the GPUs that this process sees, "" if it can."""
    if not has_capability_8():  # triton-lang/triton#10918
        oldest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
        return f"it does not support {torch.cuda.get_device_name(oldest)}"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles the code with which it launches kernels
    except Exception as error:  # no compiler, no Python.h, no libcuda: each raises its own type
        raise_if_gpu_fails(error)
        return f"{_first_line(error)} (apt install gcc python3-dev)"
    return ""


def problem_of_varlen() -> str:
    """Why PyTorch's FlashAttention does not run on this machine's GPU, "" if it does. Not every build of PyTorch has it."""
    try:
        tokens = torch.zeros(8, 1, 8, dtype=torch.float16, device="cuda")
        ends = torch.tensor([0, 8], device="cuda")
        varlen_attn(tokens, tokens, tokens, ends.int(), ends.int(), 8, 8, window_size=(-1, 0))
        torch.cuda.synchronize()
    except Exception as error:  # not built, no kernel for this GPU: each raises its own type
        raise_if_gpu_fails(error)
        return f"PyTorch's FlashAttention does not run on this GPU ({_first_line(error)})"
    return ""


def problem_of_flash_attn() -> str:
    """Why the installed flash-attn package cannot be imported; "" if it can, or if there is none.

    transformers asks only whether it is installed. One that was built for another PyTorch raises an error when it is imported.
    """
    if not is_flash_attn_2_available():
        return ""
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # a missing symbol, a missing library, an operator that exists already
        return f"the installed flash-attn cannot be imported ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
