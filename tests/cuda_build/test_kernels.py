"""Every Triton kernel of TRL and Liger that a run can take compiles for the GPUs of docs/which-recipe.md."""

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("needs PyTorch's CUDA build: ./launch.sh --test --cuda_build", allow_module_level=True)

from liger_kernel.transformers import _apply_liger_kernel_to_instance
from offline import compiled_for
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from trl.kernels import chunked_logprob, logprob_entropy

# T4, A100, RTX 3090, RTX 4090, H100, RTX 5090. Triton compiles for the T4, but does not run there (triton-lang/triton#10918).
CAPABILITIES = [75, 80, 86, 89, 90, 120]
# What SFTTrainer, DPOTrainer and its reference model ask the loss for; each is a kernel of its own.
OUTPUTS = [("log_probs", "entropy", "is_top1"), ("log_probs", "entropy", "mean_logits", "is_top1"), ("log_probs",)]
LOSS = ("_forward_kernel", "_backward_kernel")
LIGER = (
    "_rms_norm_forward_kernel",
    "_rms_norm_backward_kernel",
    "_triton_rope",
    "_swiglu_forward_kernel",
    "_swiglu_backward_kernel",
)
SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
MODELS = [(Qwen2ForCausalLM, Qwen2Config(**SIZES, num_key_value_heads=2)), (LlamaForCausalLM, LlamaConfig(**SIZES))]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile(monkeypatch, capability):
    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda device: True)
    for module, prefix in ((modeling_qwen2, "Qwen2"), (modeling_llama, "Llama")):
        for name in ("apply_rotary_pos_emb", f"{prefix}RMSNorm", f"{prefix}MLP"):
            monkeypatch.setattr(module, name, getattr(module, name))  # Liger replaces them for the whole process
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    hidden, weight = (torch.randn(rows, 64, dtype=dtype, requires_grad=True) for rows in (8, 5000))
    logits = torch.randn(2, 4, 5000, dtype=dtype, requires_grad=True)
    function = chunked_logprob.ChunkedLogProbFunction.apply
    with compiled_for(capability) as cubins:
        for outputs in OUTPUTS:
            logprobs, *_ = function(hidden, weight, None, torch.arange(8), 1.0, 4096, None, 1.0, outputs)
            logprobs.sum().backward()
        # of trainers that have the logits
        logprobs, entropy = logprob_entropy.selective_log_softmax_and_entropy(logits, torch.zeros(2, 4, dtype=torch.long))
        (logprobs.sum() + entropy.sum()).backward()
        for kind, config in MODELS:
            model = kind(config).to(dtype)
            _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
            model(input_ids=torch.arange(16).view(2, 8)).logits.sum().backward()
    modules = ("trl.kernels.chunked_logprob", "trl.kernels.logprob_entropy")
    expected = {f"{module}.{name}" for module in modules for name in LOSS}
    assert cubins.keys() >= expected and {name.rsplit(".", 1)[-1] for name in cubins} == {*LOSS, *LIGER, "_triton_rope"}
    assert all(cubins.values())
