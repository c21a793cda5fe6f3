"""4-bit layers in a simulation: as large as those of bitsandbytes, whose own kind of parameter cannot be fake."""

from typing import Any

from planner.ledger import Ledger

import bitsandbytes
import torch
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer

BLOCK_SIZE = 64  # weights with a common scale


def quantize(model: torch.nn.Module, settings: BitsAndBytesConfig, ledger: Ledger) -> None:
    """Replaces linear layers by 4-bit ones, all but the head, as transformers does."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) in (torch.nn.Linear, Conv1D) and module is not head:
            rows, columns = module.weight.shape
            if type(module) is Conv1D:
                rows, columns = columns, rows
            model.set_submodule(name, Linear4bit.of_size(rows, columns, module.bias, settings, ledger))
    model.hf_quantizer = AutoHfQuantizer.from_config(settings)  # the Trainer asks it whether the model can be trained
    model.is_loaded_in_4bit = model.is_quantized = True
    model.config.quantization_config = settings


class Linear4bit(bitsandbytes.nn.Linear4bit):
    """A 4-bit layer whose weight is a plain tensor: bitsandbytes' own kind of parameter cannot be fake."""

    @classmethod
    def of_size(
        cls, rows: int, columns: int, bias: torch.Tensor | None, settings: BitsAndBytesConfig, ledger: Ledger
    ) -> "Linear4bit":
        """A layer of this size, with tensors as large as bitsandbytes' packed weight and the scales of its blocks."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.in_features = columns
        layer.out_features = rows
        layer.bias = bias
        layer.ledger = ledger
        layer.compute_dtype = settings.bnb_4bit_compute_dtype
        layer.compute_type_is_set = True
        storage = settings.bnb_4bit_quant_storage
        layer.is_nested = settings.bnb_4bit_use_double_quant
        count = rows * columns
        packed = torch.empty(count // 2 // storage.itemsize, 1, dtype=storage)
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        layer.weight.compress_statistics = layer.is_nested
        layer.weight.quant_type = settings.bnb_4bit_quant_type
        blocks = count // BLOCK_SIZE
        kind = torch.float32
        if layer.is_nested:
            kind = torch.uint8
        layer.register_buffer("scales", torch.empty(blocks, dtype=kind), persistent=False)
        if layer.is_nested:
            layer.register_buffer("scales_of_scales", torch.empty(-(-blocks // 256)), persistent=False)
        return layer

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the product reads. Counts the bytes that bitsandbytes' kernels read and write to make it.

        bitsandbytes 0.50, `dequantize_4bit` in functional.py and `_dequant_linear_fallback` in backends/cuda/ops.py: one kernel
        reads the packed weight and a float32 scale for each of its blocks. With nested quantization, two more make these scales:
        from bytes, and then an offset is added. (In forward, with at most 1,536 tokens and some sizes, a kernel multiplies
        without unpacking: `_gemm_4bit_use_custom_cuda`.)
        """
        with self.ledger.within(holder="gathered"):  # it is as large for any micro-batch
            weight = torch.empty(self.out_features, self.in_features, dtype=dtype)
        count = weight.numel()
        per_scale = 4
        if self.is_nested:
            per_scale += 1 + 4 + 4 + 4
        self.ledger.touched += count // 2 + weight.nbytes
        self.ledger.touched += count // BLOCK_SIZE * per_scale
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = Product4bit.apply(x.to(self.compute_dtype), self)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(x.dtype)


class Product4bit(torch.autograd.Function):
    """As bitsandbytes on a GPU, for more than a few rows: the weight is unpacked in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Linear4bit) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.unpacked(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


def quantized_bytes(model: torch.nn.Module) -> int:
    """Bytes of the folder that keeps a 4-bit model: packed weights and their scales, embedding, head and norms."""
    layers = [module for module in model.modules() if hasattr(getattr(module, "weight", None), "quant_type")]
    scales = sum(buffer.nbytes for layer in layers for buffer in layer.buffers(recurse=False))
    return scales + sum(weight.nbytes for weight in model.parameters() if not weight.requires_grad)
