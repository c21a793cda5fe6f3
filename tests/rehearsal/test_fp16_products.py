"""A rehearsal multiplies fp16 matrices in float32, because many CPUs have no fast fp16 arithmetic."""

from harness.compat.torch import Fp16ProductsInFloat32

import pytest
import torch


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrices", "batches of matrices"])
def test_fp16_products_are_float32_products_rounded_once(batch):
    """In the forward and the backward pass. Products of other dtypes do not change."""
    torch.manual_seed(0)
    a, b = (torch.randn(*batch, 40, 40).half().requires_grad_() for _ in range(2))
    a32, b32 = (x.detach().float().requires_grad_() for x in (a, b))
    expected = a32 @ b32
    expected.sum().backward()
    with Fp16ProductsInFloat32():
        product = a @ b
        product.sum().backward()
        assert torch.equal(a32 @ b32, expected)
    assert product.dtype == torch.float16 and torch.equal(product, expected.half())
    assert torch.equal(a.grad, a32.grad.half()) and torch.equal(b.grad, b32.grad.half())
