"""Attention within packed documents (`varlen`) is that of SDPA with a mask; and which attention a run uses."""

from types import SimpleNamespace

from harness.messages import UserError
from harness.model import attention
from harness.rehearsal import tiny
from harness.runs import GpuFeatures, Run

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from trl import ModelConfig, SFTConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# Grouped-query attention, sliding windows in some or all layers, latent attention, experts, norms of query and key, biases.
FAMILIES = [
    *("qwen2", "qwen3", "llama", "mistral", "mixtral", "gemma3_text", "cohere2", "olmo3", "phi3", "gpt2", "gpt_neox"),
    *("starcoder2", "granite", "deepseek_v3"),
]


def make_model(family: str, **sizes: int) -> torch.nn.Module:
    attention.register_varlen()
    config = tiny.shrink(AutoConfig.for_model(family), TOKENS | sizes)
    if getattr(config, "sliding_window", None):
        config.sliding_window = 5
    set_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def packed_batch(*lengths: int) -> dict:
    tokens = torch.randint(1, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0)).tolist()
    return DataCollatorForLanguageModeling(0, padding_free=True)([{"input_ids": tokens, "seq_lengths": list(lengths)}])


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_are_those_of_sdpa(family):
    """Documents of one token, shorter than the window of a sliding layer, and longer."""
    model = make_model(family).eval()  # without dropout
    batch = packed_batch(9, 1, 4, 17)
    found = {}
    for implementation in ("sdpa", "varlen"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        output = model(**batch, use_cache=False)
        output.loss.backward()
        found[implementation] = [output.logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)]
    assert len(found["sdpa"]) == len(found["varlen"]) > 10
    for expected, value in zip(found["sdpa"], found["varlen"], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item() + 1e-7)


class CountIntegers(TorchDispatchMode):
    """Counts the operators that return integers or booleans."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.count += isinstance(result, torch.Tensor) and not result.is_floating_point()
        return result


def test_ends_of_documents_are_computed_once_per_batch():
    """Not in each layer, and the host reads none of them: of a fake tensor it could not."""
    counts = []
    for layers in (2, 4):
        batch = packed_batch(9, 4)
        with FakeTensorMode(allow_non_fake_inputs=True), CountIntegers() as counted:
            model = make_model("qwen3", num_hidden_layers=layers, layer_types=["full_attention"] * layers)
            model.set_attn_implementation("varlen")
            model(**batch, use_cache=False).loss.backward()
        counts.append(counted.count)
    assert counts[1] == counts[0] + 2, "in each layer one: the state of random numbers that the attention returns"


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_without_documents_it_is_sdpa(family):
    """Evaluation with and without a padding mask, and text that is generated with a cache."""
    model = make_model(family).eval()
    tokens = torch.arange(1, 25).view(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    found = {}
    for implementation in ("sdpa", "varlen"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            padded = model(input_ids=tokens, attention_mask=mask).logits
            generated = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
            found[implementation] = padded[mask.bool()], model(input_ids=tokens, use_cache=False).logits, generated
    for expected, value in zip(found["sdpa"], found["varlen"], strict=True):
        torch.testing.assert_close(value, expected)


def test_what_it_cannot_compute_is_refused(error_of):
    model = make_model("qwen2")
    model.set_attn_implementation("varlen")
    batch = packed_batch(4, 4)
    assert "no lengths of documents" in error_of(model.train(), input_ids=batch["input_ids"])
    module, tensor = SimpleNamespace(training=True, is_causal=True), torch.ones(1, 2, 8, 16)
    for name, value in {"dropout": 0.1, "softcap": 5.0, "s_aux": tensor, "position_bias": tensor}.items():
        options = {name: value, "cu_seq_lens_q": batch["cu_seq_lens_q"], "max_length_q": 4}
        message = error_of(attention.attend_within_documents, module, tensor, tensor, tensor, None, **options)
        assert f"varlen has no {name}" in message


GPU = Run("a.py", gpu=GpuFeatures(["varlen", "flash_attention_2"]))
OLD_GPU = Run("a.py")
CPU = Run("a.py", on_cpu=True)
PACKED = {"packing": True, "packing_strategy": "bfd_split", "bf16": True}


@pytest.mark.parametrize(
    ("family", "sizes", "arguments", "run", "expected"),
    [
        ("qwen2", {}, {}, GPU, "varlen"),
        ("qwen2", {}, {}, CPU, "varlen"),
        ("qwen2", {}, {}, OLD_GPU, None),
        ("qwen2", {}, {"packing_strategy": "wrapped"}, CPU, None),
        ("qwen2", {}, {"activation_checkpointing_kwargs": {"selective": True}}, GPU, "flash_attention_2"),
        ("qwen2", {}, {"packing": False, "padding_free": True, "max_length": None}, CPU, "varlen"),
        ("qwen2", {}, {"bf16": False}, GPU, None),
        ("qwen2", {"attention_dropout": 0.1}, {}, GPU, "flash_attention_2"),
        ("gemma2", {}, {}, GPU, "flash_attention_2"),
        ("gpt_oss", {}, {}, CPU, None),
        ("gpt_oss", {}, {}, GPU, None),  # its FlashAttention is another one
        ("gemma4_text", {}, {}, GPU, None),
        ("llama", {"head_dim": 68}, {}, CPU, None),
        ("deepseek_v3", {}, {}, GPU, "varlen"),
        ("nemotron", {"num_key_value_heads": 8}, {}, CPU, None),  # its layers do not pass the lengths on
        ("gpt_neo", {}, {"packing": False}, GPU, "flash_attention_2"),
    ],
)
def test_choice(tmp_path, family, sizes, arguments, run, expected):
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path)
    training_args, model_args = SFTConfig(use_cpu=True, **PACKED | arguments), ModelConfig(str(tmp_path), dtype="float32")
    assert attention.choose_attention(training_args, model_args, run) == expected
    model_args.attn_implementation = "varlen"
    if expected != "varlen":
        with pytest.raises(UserError, match="--attn_implementation"):
            attention.set_attention(training_args, model_args, run)
    else:
        attention.set_attention(training_args, model_args, run)
