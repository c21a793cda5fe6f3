"""Fused layers in a plan: what a compiled layer reads, writes and keeps."""

from harness.compat.transformers import transformer_layers
from planner import fused
from planner.ledger import Ledger, tensors_in

import pytest
import torch
from conftest import ROOT, slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZES = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2, "num_attention_heads": 14, "vocab_size": 100}
TOKENS = 256


def test_operators_between_two_products_are_one_kernel():
    ledger, kib = Ledger(), 1024
    with FakeTensorMode(), ledger:
        x, weight = torch.empty(256, kib), torch.empty(kib, kib)  # 1 and 4 MiB
        ledger.is_fused = True
        y = torch.sin(2 * x) + x
        assert ledger.touched == kib**2, "x is read once"
        assert ledger.peaks()["load"].bytes == 5 * kib**2, "nothing is written"
        product = y @ weight
        assert ledger.touched == 2 * kib**2 and ledger.peaks()["load"].bytes == 7 * kib**2, "y and the product are"
        product.mul_(2)
        assert ledger.touched == 4 * kib**2, "a product is in memory"
        y.add_(product)
        assert ledger.touched == 6 * kib**2, "a kernel reads it once, and writes y again"


def test_backward_pass_keeps_what_it_computes_unwritten_tensors_from():
    """Of a sum that no kernel writes, the product in it; until the sum is written."""
    ledger, kib = Ledger(), 1024
    with FakeTensorMode(), ledger:
        x, weight = torch.empty(256, kib), torch.empty(kib, kib)  # 1 and 4 MiB
        ledger.is_fused = True
        total = 2 * (x @ weight) + x
        assert held(ledger) == 6 * kib**2, "the product"
        ledger.write(total)
        assert held(ledger) == 6 * kib**2, "the sum in its place"
        del total
        assert held(ledger) == 5 * kib**2
        adapted = 2 * (x @ weight + x @ weight)
        assert held(ledger) == 6 * kib**2, "the sum of two products is smaller than both"
    del adapted


def test_fused_layer_casts_a_tensor_once_and_a_weight_with_a_kernel():
    ledger, kib = Ledger(), 1024
    with FakeTensorMode(), ledger:
        x, weight = torch.empty(256, kib), torch.empty(kib, kib)
        ledger.is_fused, ledger.weight_shapes = True, {(kib, kib)}
        half, y = weight.bfloat16(), 2 * x
        casts = (3 * x).bfloat16(), y.bfloat16(), y.bfloat16()
        products = [cast @ half for cast in casts]
        assert held(ledger) == (5 + 2 + 2 * 0.5 + 3 * 0.5) * kib**2, "x and the weight, its cast, two others, three products"
        assert ledger.launches == 1 + 2 + 3
    del products


def held(ledger: Ledger) -> int:
    """Bytes that are allocated now."""
    return sum(event.change for event in ledger.events)


class Products(TorchDispatchMode):
    """The bytes that matrix products and attention read and write."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.bytes = ledger, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func.overloadpacket in self.ledger.flop_counters:
            self.bytes += sum(tensor.nbytes for tensor in tensors_in((result, *args)))
        return result


def step(model: Qwen2ForCausalLM, ledger: Ledger, is_compiled: bool) -> tuple[int, int]:
    """The bytes that the layers of a step on fake tensors touch, and those that the second one keeps for the backward pass."""
    with FakeTensorMode() as mode:
        model = Qwen2ForCausalLM(model.config).model
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    for weight in model.parameters():
        ledger.mark(weight, "weights")
    if is_compiled:
        fused.compile_layers(model, ledger)
    kept = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *args: kept.append(held(ledger)))
    products = Products(ledger)
    with mode, ledger, products, torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(input_ids=ids).last_hidden_state
        with ledger.within(moment="backward"):
            hidden.sum().backward()
    return ledger.touched + products.bytes, kept[1] - kept[0]


def results(call, layer: torch.nn.Module, hidden: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """Output and gradients of a layer. (Its keys' biases change no attention: their gradients are rounding errors.)"""
    hidden = hidden.detach().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(hidden, **options)
    (output * output.detach().cos()).sum().backward()
    weights = {name: weight.grad for name, weight in layer.named_parameters() if name != "self_attn.k_proj.bias"}
    return {"output": output.detach(), "input": hidden.grad} | weights


@slow
def test_bytes_are_those_that_inductor_counts(monkeypatch):
    """Inductor counts what its kernels and the products read and write when it compiles a layer for this CPU.

    What it compiles keeps as much for the backward pass, and computes what the layer computes.
    """
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    monkeypatch.setattr(config, "force_disable_caches", True)  # what it compiled before is not counted again
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2))
    assert len(transformer_layers(model)) == 2
    (eager, _), (compiled, kept) = (step(model, Ledger(), is_compiled) for is_compiled in (False, True))
    layer = model.model.layers[0]
    hidden, positions = torch.randn(1, TOKENS, 896, requires_grad=True), torch.arange(TOKENS)[None]
    angles = model.model.rotary_emb(hidden, positions)
    plain = results(layer, layer, hidden, position_embeddings=angles, position_ids=positions)
    metrics.reset()
    monkeypatch.setattr(inductor_metrics_log, "isEnabledFor", lambda level: True)  # otherwise it counts nothing
    fast_layer = torch.compile(layer)
    fast = results(fast_layer, layer, hidden, position_embeddings=angles, position_ids=positions)
    for name, value in plain.items():
        assert (value - fast[name]).norm() < 0.02 * value.norm(), name  # bf16 keeps eight bits
    counted = 2 * metrics.num_bytes_accessed
    assert compiled == pytest.approx(counted, rel=0.05) and compiled < 0.8 * eager, (compiled, counted, eager)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        saved = fast_layer(hidden, position_embeddings=angles, position_ids=positions).grad_fn.saved_tensors
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    for tensor in (*layer.parameters(), *angles):  # in memory anyway
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    assert kept == pytest.approx(sum(sizes.values()), rel=0.002)


@slow
def test_compiled_layers_count_in_a_plan(simulate):
    """The products are as without them, less memory is touched, and fewer activations are kept. Liger's kernels do not count."""
    pair = (ROOT / "recipes/qwen2_fineweb_edu.py", ROOT / "accelerate_configs/1x3090.yaml")
    flags = ([], ["--use_liger_kernel", "true"], ["--torch_compile", "true"])
    plain, liger, compiled = simulate([(*pair, words, "cuda") for words in flags])
    assert plain["step"] == liger["step"] and plain["peaks"] == liger["peaks"]
    assert plain["step"]["flops"] == compiled["step"]["flops"]
    assert plain["step"]["launches"] / 8 == pytest.approx(3849, rel=0.04), "measured on an H100, of each of 8 micro-batches"
    assert compiled["step"]["touched"] < 0.6 * plain["step"]["touched"]
    peaks = [max(peak["bytes"] for peak in found["peaks"].values()) for found in (plain, compiled)]
    assert peaks[1] < peaks[0], peaks
