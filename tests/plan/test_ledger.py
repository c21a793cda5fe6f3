"""Bytes that come and go, by moment, place and holder."""

from harness.plan.ledger import Ledger

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

MEGA = 2**20


def test_what_comes_and_goes_is_counted_once():
    ledger = Ledger()
    with ledger, ledger.within(moment="forward", holder="activations"):
        kept = torch.zeros(MEGA)  # 4 MiB
        view = kept.view(1024, 1024)[1:]
        gone = kept + 1
        del gone
        with ledger.within(moment="backward"):
            product = view @ view.T
    peaks = ledger.peaks()
    assert peaks["forward"]["bytes"] == 8 * MEGA
    assert peaks["backward"]["by"]["activations"] == 4 * MEGA + -(-1023 * 1023 * 4 // 512) * 512
    assert ledger.flops == {"torch.float32": 2 * 1023 * 1024 * 1023}
    ledger.mark(kept, "weights", "host")
    assert ledger.peaks("host")["load"]["by"] == {"weights": 4 * MEGA}
    assert ledger.peaks()["forward"]["by"]["weights"] == 4 * MEGA  # for all its life
    del product


def test_a_storage_that_is_resized_is_what_it_is_then():
    ledger = Ledger()
    with ledger, ledger.within(moment="forward"):
        gathered = torch.zeros(MEGA)
        gathered.untyped_storage().resize_(0)
        torch.zeros(MEGA // 2)
        gathered.untyped_storage().resize_(8 * MEGA)
    assert ledger.peaks()["forward"]["bytes"] == 8 * MEGA


def test_a_copy_of_weights_is_no_activation_and_logits_are_of_the_loss():
    ledger = Ledger(vocabulary=1000)
    weight = torch.zeros(64, 1000)
    with ledger, ledger.within(moment="forward", holder="activations"):
        ledger.mark(weight, "weights")
        low = weight.to(torch.bfloat16)
        logits = torch.zeros(8, 64, dtype=torch.bfloat16) @ low
    by = ledger.peaks()["forward"]["by"]
    assert (by["gathered"], by["loss"]) == (64 * 1000 * 2, -(-8 * 1000 * 2 // 512) * 512)
    assert ledger.count()["flops"] == {"torch.bfloat16": 2 * 8 * 64 * 1000} and not ledger.count()["flops"]
    del logits


def test_what_operators_read_and_write():
    """Asking a fake tensor where it is, or for a view of it, touches none of its bytes; products are counted otherwise."""
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        tensor = torch.empty(MEGA)
        assert tensor.device.type == "cpu" and tensor.view(1024, 1024).T.device == tensor.device
        torch.ops.aten._unsafe_view(tensor, [1024, 1024])
        assert ledger.touched == 0
        tensor.view(1024, 1024) @ tensor.view(1024, 1024)
        assert ledger.touched == 0
        tensor + 1
    assert ledger.touched == 8 * MEGA  # read and written


def test_labels_end_with_their_block():
    ledger = Ledger()
    with pytest.raises(ValueError), ledger.within(moment="save", place="host"):
        raise ValueError
    assert (ledger.moment, ledger.place) == ("load", "gpu")
