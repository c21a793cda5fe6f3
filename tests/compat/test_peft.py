"""While a model generates, its adapter is merged into its weights; afterwards they are as before. Masks are converted once."""

import contextlib
from types import SimpleNamespace

from harness.compat.peft import merge_for_generation, round_to
from harness.compat.transformers import convert_masks_once
from planner.ledger import Ledger

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from transformers import Qwen3Config, Qwen3ForCausalLM

TOKENS = torch.arange(24).view(2, 12)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def make_adapter(dtype=torch.float32, targets="all-linear", **options):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=80, num_hidden_layers=2, tie_word_embeddings=True, **SIZES)).to(dtype)
    model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False, **options))
    return model.train()


def generating(model, is_fsdp2=False):
    return merge_for_generation(model, SimpleNamespace(is_fsdp2=is_fsdp2))


def merged_layers(model):
    return {name.split(".")[-1] for name, layer in model.named_modules() if getattr(layer, "merged", False)}


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_the_same_afterwards(dtype):
    """After 50 contexts, one with an exception, with two adapters and trained modules; `unmerge` changes some."""
    model = make_adapter(dtype, modules_to_save=["embed_tokens"], lora_dropout=0.5)
    model.add_adapter("second", LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    tensors = [*model.named_parameters(), *model.named_buffers()]
    before = {name: (tensor.data_ptr(), tensor.requires_grad, tensor.detach().clone()) for name, tensor in tensors}
    for time in range(50):
        try:
            with generating(model):
                if time == 20:
                    raise KeyboardInterrupt
                assert merged_layers(model) >= {"q_proj", "down_proj"}
        except KeyboardInterrupt:
            assert time == 20
        assert not merged_layers(model) and model.training
    for name, tensor in tensors:
        address, is_trained, values = before[name]
        assert torch.equal(tensor, values) and (tensor.data_ptr(), tensor.requires_grad) == (address, is_trained), name


@pytest.mark.quick
def test_merged_weights_give_the_same_logits_with_fewer_kernels():
    model = make_adapter().eval()
    found, kernels = [], []
    for is_sharded in (True, False):
        with generating(model, is_sharded), torch.no_grad(), Ledger() as ledger:
            found.append(model(TOKENS).logits)
            ledger.take_counts()
            with torch.autocast("cpu", torch.bfloat16):
                model(TOKENS)
            kernels.append(ledger.take_counts().launches)
    assert torch.allclose(*found, atol=1e-5) and not torch.equal(*found)
    assert kernels[1] <= 0.62 * kernels[0]


@pytest.mark.quick
def test_layers_that_stay_as_they_are():
    """The embedding shares its weight with the head: merged into one of them, the adapter would change the other."""
    for model, merged in (
        (make_adapter(use_dora=True), set()),
        (make_adapter(torch.float8_e4m3fn), set()),  # its values have scales of their own
        (make_adapter(targets=["q_proj", "lm_head", "embed_tokens"]), {"q_proj"}),
    ):
        assert any(isinstance(layer, lora.Linear) for layer in model.modules())
        with generating(model):
            assert merged_layers(model) == merged
        with generating(model, is_fsdp2=True):
            assert not merged_layers(model)


@pytest.mark.quick
def test_small_changes_are_not_rounded_away():
    """As large as those of a few steps of training: most are below half the distance of two numbers in bf16."""
    model = make_adapter(torch.bfloat16)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    layer.scale_layer(1e-4)
    before = layer.weight.detach().float()
    delta = layer.get_delta_weight("default").detach().float()
    rounded = (before + delta).bfloat16().float() - before
    with generating(model):
        change = layer.weight.detach().float() - before
    kept, kept_if_rounded = ((found * delta).sum() / delta.square().sum() for found in (change, rounded))
    assert kept_if_rounded < 0.5 and kept == pytest.approx(1, abs=0.2)
    assert round_to(torch.bfloat16, torch.full((9,), 2**31 - 1, dtype=torch.int32).view(torch.float32)).isnan().all()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_that_are_converted_once_give_the_same_answers(dtype):
    """To prompts that are padded; half of the layers attend to a window only, so there are two masks."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=80, pad_token_id=0, **layers, **SIZES)).eval()
    mask = torch.ones_like(TOKENS).index_fill_(1, torch.arange(5), 0)
    options = {"attention_mask": mask, "max_new_tokens": 20, "output_logits": True, "return_dict_in_generate": True}
    answers, kernels = [], []
    for context in (contextlib.nullcontext(), convert_masks_once()):
        with context, torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16), Ledger() as ledger:
            answers.append(model.generate(TOKENS, do_sample=False, **options))
            kernels.append(ledger.take_counts().launches)
    assert all(map(torch.equal, answers[0].logits, answers[1].logits)) and kernels[1] <= kernels[0] - 20 * 4
