"""What a simulation is held against, and how a step is put together from its micro-batches."""

from harness.plan import arithmetic

import pytest
import torch

SHAPES = {"head.weight": ((10, 4), 2, False), "layer.weight": ((6, 4), 2, True), "norm.weight": ((3,), 4, True)}


def test_bytes_of_one_process():
    assert arithmetic.expected(SHAPES, shards=1, upcast=False) == {"weights": 80 + 48 + 12, "gradients": 60, "optimizer": 120}
    # Over four, the first dimension is cut and rounded up: 3 rows of 10, 2 of 6, 1 of 3; what is trained is float32.
    assert arithmetic.expected(SHAPES, shards=4, upcast=True) == {"weights": 24 + 32 + 4, "gradients": 36, "optimizer": 72}


def test_what_is_missing_is_an_error():
    held = torch.zeros(8)
    arithmetic.compare("gradients", [held[:4], held[4:], held[:4]], 32)
    with pytest.raises(RuntimeError, match="holds 16 bytes of gradients, arithmetic says 32"):
        arithmetic.compare("gradients", [held[:4]], 32)


def test_a_step_of_many_micro_batches():
    first = {"flops": {"bf16": 5}, "moved": {"gathered": 8}, "touched": 1}
    last = {"flops": {"bf16": 5}, "moved": {"reduced": 4}, "touched": 2}
    whole = arithmetic.whole_step([first, last], 8)
    assert whole == {"flops": {"bf16": 40}, "moved": {"gathered": 8, "reduced": 4}, "touched": 9}
    both = {**first, "moved": {"gathered": 8, "reduced": 4}}
    assert arithmetic.whole_step([both, both], 3)["moved"] == {"gathered": 24, "reduced": 12}
    assert arithmetic.whole_step([both], 2)["moved"] == {"gathered": 16, "reduced": 8}
    assert arithmetic.whole_step([{**both, "moved": {"all_reduced": 4}}], 8)["moved"] == {"all_reduced": 4}
