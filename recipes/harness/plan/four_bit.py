"""4-bit layers that hold nothing. See `fakes`."""

import bitsandbytes
import torch
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer


def quantize(model, settings):
    """Puts 4-bit layers in the place of linear ones, as transformers does, all but the head."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) in (torch.nn.Linear, Conv1D) and module is not head:
            rows, columns = module.weight.shape if type(module) is torch.nn.Linear else module.weight.shape[::-1]
            layer = torch.nn.Module.__new__(Linear4bit)
            torch.nn.Module.__init__(layer)
            layer.fill(rows, columns, module.bias, settings)
            model.set_submodule(name, layer)
    model.hf_quantizer = AutoHfQuantizer.from_config(settings)  # which the Trainer asks whether it may train
    model.is_loaded_in_4bit = model.is_quantized = True
    model.config.quantization_config = settings


class Product(torch.autograd.Function):
    """As bitsandbytes on a GPU, from some rows on: the weight is unpacked for a moment, in forward and again in backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.unpacked(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


class Linear4bit(bitsandbytes.nn.Linear4bit):
    """Its weight is a plain tensor: bitsandbytes' own kind of parameter cannot hold nothing."""

    def fill(self, rows: int, columns: int, bias, settings):
        self.in_features, self.out_features, self.bias = columns, rows, bias
        self.compute_dtype, self.compute_type_is_set = settings.bnb_4bit_compute_dtype, True
        storage = settings.bnb_4bit_quant_storage
        packed = torch.empty(rows * columns // 2 // storage.itemsize, 1, dtype=storage)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.weight.compress_statistics = settings.bnb_4bit_use_double_quant
        self.weight.quant_type = settings.bnb_4bit_quant_type
        blocks = rows * columns // 64
        nested = settings.bnb_4bit_use_double_quant
        scales = [torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32)]
        scales += [torch.empty(-(-blocks // 256))] if nested else []
        for number, scale in enumerate(scales):
            self.register_buffer(f"scales_{number}", scale, persistent=False)

    def unpacked(self, dtype):
        return torch.empty(self.out_features, self.in_features, dtype=dtype)

    def forward(self, x):
        x, dtype = x.to(self.compute_dtype), x.dtype
        out = Product.apply(x, self)
        return (out if self.bias is None else out + self.bias.to(out.dtype)).to(dtype)
