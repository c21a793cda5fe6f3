"""A rehearsal multiplies bf16 and fp16 matrices in float32, because many CPUs have no fast arithmetic for these dtypes."""

from harness.compat.torch import multiply_in_float32

import pytest
import torch

PRODUCTS = {
    "mm": lambda a, b: a @ b,
    "mm.out": lambda a, b: torch.mm(a, b, out=torch.empty_like(a)),
    "addmm": lambda a, b: torch.addmm(b, a, b, beta=2),
    "bmm": lambda a, b: a[None] @ b[None],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_factors_are_copied_to_float32(product, dtype):
    """Some CPUs round the product itself to the same values, only slowly. Products of other dtypes do not change."""
    torch.manual_seed(0)
    a, b = (torch.randn(40, 40).to(dtype) for _ in range(2))
    expected = product(a.float(), b.float())
    multiply_in_float32()
    assert torch.equal(product(a.float(), b.float()), expected)
    with torch.profiler.profile() as profile:
        found = product(a, b)
    assert torch.equal(found, expected.to(dtype))
    assert sum(event.name == "aten::_to_copy" for event in profile.events()) >= 2


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrices", "batches of matrices"])
def test_gradients_are_float32_products_rounded_once(batch):
    torch.manual_seed(0)
    a, b = (torch.randn(*batch, 40, 40).bfloat16().requires_grad_() for _ in range(2))
    a32, b32 = (x.detach().float().requires_grad_() for x in (a, b))
    (a32 @ b32).sum().backward()
    multiply_in_float32()
    (a @ b).sum().backward()
    assert torch.equal(a.grad, a32.grad.bfloat16()) and torch.equal(b.grad, b32.grad.bfloat16())
