"""A rehearsal multiplies bf16 and fp16 matrices in float32, because many CPUs have no fast arithmetic for these dtypes."""

from harness.compat.torch import multiply_in_float32

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrices", "batches of matrices"])
def test_products_are_float32_products_rounded_once(batch, dtype):
    """In the forward and the backward pass. Products of other dtypes do not change."""
    torch.manual_seed(0)
    a, b = (torch.randn(*batch, 40, 40).to(dtype).requires_grad_() for _ in range(2))
    a32, b32 = (x.detach().float().requires_grad_() for x in (a, b))
    expected = a32 @ b32
    expected.sum().backward()
    multiply_in_float32()
    product = a @ b
    product.sum().backward()
    assert product.dtype == dtype and torch.equal(product, expected.to(dtype))
    assert torch.equal(a.grad, a32.grad.to(dtype)) and torch.equal(b.grad, b32.grad.to(dtype))
    assert torch.equal(a32 @ b32, expected)


PRODUCTS = {
    "mm": lambda a, b: a @ b,
    "mm.out": lambda a, b: torch.mm(a, b, out=torch.empty_like(a)),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "bmm": lambda a, b: a[None] @ b[None],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_factors_are_copied_to_float32(product, dtype):
    """Some CPUs round the product itself to the same values, only slowly."""
    multiply_in_float32()
    a, b = (torch.randn(8, 8).to(dtype) for _ in range(2))
    with torch.profiler.profile() as profile:
        product(a, b)
    assert sum(event.name == "aten::_to_copy" for event in profile.events()) >= 2


def test_product_is_added_or_written_to_another_matrix():
    multiply_in_float32()
    a, b, bias = (torch.randn(8, 8) for _ in range(3))
    half = [x.bfloat16() for x in (bias, a, b)]
    bias32, a32, b32 = (x.float() for x in half)
    assert torch.equal(torch.addmm(*half, beta=2), torch.addmm(bias32, a32, b32, beta=2).bfloat16())
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(8, 8, dtype=dtype)
        torch.mm(a32.to(dtype), b32.to(dtype), out=out)
        assert torch.equal(out, (a32 @ b32).to(dtype))
