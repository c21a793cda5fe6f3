"""Runs Triton's kernels on CPU, in its interpreter. Prints as JSON how far their results are from those of PyTorch."""

import copy
import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import numpy
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from triton.runtime import interpreter
from trl.kernels import chunked_logprob

SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = [(Qwen2ForCausalLM, Qwen2Config(**SIZES, num_key_value_heads=2)), (LlamaForCausalLM, LlamaConfig(**SIZES))]


convert = interpreter._implicit_cvt


def convert_floats(value: object) -> object:
    """The interpreter passes Python's floats to a kernel as they are; compiled kernels get them as float32."""
    if not isinstance(value, float):
        return convert(value)
    return tl.tensor(interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), tl.float32), tl.float32)


interpreter._implicit_cvt = convert_floats
rms_norm.rsqrt = lambda value: tl.math.rsqrt(value)  # in place of CUDA's own function, which the interpreter does not have


def results_of_loss(uses_triton: bool) -> list[torch.Tensor]:
    """The outputs and gradients of TRL's loss."""
    chunked_logprob._use_triton = lambda device: uses_triton
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 32, requires_grad=True), torch.randn(3000, 32, requires_grad=True)
    function = chunked_logprob.ChunkedLogProbFunction.apply
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")  # of DPOTrainer; the others ask for some of these
    logprobs, entropy, _, mean_logits, is_top1 = function(hidden, weight, None, torch.arange(6), 1.0, 2048, None, 1.0, outputs)
    logprobs.sum().backward()
    return [logprobs, entropy, mean_logits, is_top1.float(), hidden.grad, weight.grad]


def results_of_model(model: PreTrainedModel) -> list[torch.Tensor]:
    """The loss of a padded batch and the gradients."""
    ids = torch.arange(2 * 24).view(2, 24) % 50
    mask = torch.ones_like(ids)
    mask[1, 16:] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters())]


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest value of each tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(first, second, strict=True))


found = {"loss of TRL": distance(results_of_loss(uses_triton=True), results_of_loss(uses_triton=False))}
for kind, config in MODELS:
    torch.manual_seed(0)
    plain = kind(config)
    patched = copy.deepcopy(plain)
    _apply_liger_kernel_to_instance(patched, fused_linear_cross_entropy=False)  # as SFTTrainer
    found[f"Liger's {kind.__name__}"] = distance(results_of_model(patched), results_of_model(plain))
print(json.dumps(found))
