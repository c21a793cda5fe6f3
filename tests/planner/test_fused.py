"""Fused layers in a plan: what a compiled layer reads, writes and keeps."""

from planner.ledger import Ledger

import pytest
import torch
from conftest import ROOT, slow
from torch._subclasses.fake_tensor import FakeTensorMode

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


def held(ledger: Ledger) -> int:
    """Bytes that are allocated now."""
    return sum(event.change for event in ledger.events)


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
