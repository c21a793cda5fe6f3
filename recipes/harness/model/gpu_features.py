"""What the GPUs of this machine support."""

import warnings

from harness.messages import last_line
from harness.runs import NO_FEATURES, GpuFeatures

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers.utils import is_flash_attn_2_available

VARLEN = "varlen"  # values of --attn_implementation
FLASH = "flash_attention_2"


def find_gpu_features() -> GpuFeatures:
    """What the GPUs of this machine support."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # `machine.must_use_cpu` reports a driver that is too old
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        return NO_FEATURES
    usable = []
    if has_capability_8():
        usable += [VARLEN] if can_run_varlen() else []
        usable += [FLASH] if is_flash_attn_2_available(kernels_fallback_ok=True) else []
    return GpuFeatures(usable, why_not_triton())


def has_capability_8() -> bool:
    """Whether all GPUs that this process sees have compute capability 8.0 or higher."""
    return all(torch.cuda.get_device_capability(index) >= (8, 0) for index in range(torch.cuda.device_count()))


def why_not_triton() -> str:
    """Why TRL's loss cannot use Triton on the GPUs that this process sees, "" if it can."""
    if not has_capability_8():  # triton-lang/triton#10918
        return "it does not support a compute capability below 8.0"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles the code with which it launches kernels
    except Exception as error:  # no compiler, no Python.h, no libcuda: each raises its own type
        return f"{last_line(error)} (apt install gcc python3-dev)"
    return ""


def can_run_varlen() -> bool:
    """Whether PyTorch's FlashAttention runs on this machine's GPU. Not every build of PyTorch has it."""
    try:
        tokens = torch.zeros(8, 1, 8, dtype=torch.float16, device="cuda")
        ends = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
        varlen_attn(tokens, tokens, tokens, ends, ends, 8, 8, window_size=(-1, 0))
        torch.cuda.synchronize()
    except Exception:  # not built, no kernel for this GPU: each raises its own type
        return False
    return True
