"""What a rehearsal on the CPU computes in another way than the libraries would."""

from harness.rehearsal import fsdp_on_cpu

import pytest
import torch


@pytest.mark.parametrize("shape", [(), (3,)], ids=["matrices", "batches"])
def test_fp16_products_are_those_of_float32_rounded_once(shape):
    """Also in the backward pass; other types are left alone."""
    torch.manual_seed(0)
    a, b = (torch.randn(*shape, 40, 40).half().requires_grad_() for _ in range(2))
    wide = [x.detach().float().requires_grad_() for x in (a, b)]
    (wide[0] @ wide[1]).sum().backward()
    with fsdp_on_cpu.Fp16InFloat32():
        product = a @ b
        product.sum().backward()
        assert torch.equal((wide[0] @ wide[1]), torch.matmul(*wide))
    assert product.dtype == torch.float16 and torch.equal(product, (wide[0] @ wide[1]).half())
    assert torch.equal(a.grad, wide[0].grad.half()) and torch.equal(b.grad, wide[1].grad.half())
