"""From bytes and FLOPs to cards and hours."""

import dataclasses

from planner import cards, links, memory, proposals, roofline, summary
from planner.ledger import Counts, Peak
from planner.simulation import Simulation

import pytest

CARDS = {card.name: card for card in cards.CARDS}
FOUND = Simulation(
    recipe="any",
    config="any",
    model="any",
    processes=4,
    nodes=1,
    shards=4,
    replicas=1,
    parameters=10**9,
    trained=10**9,
    trained_here=25 * 10**7,
    optimizer=2 * 10**9,
    quantized=0,
    is_adapter=False,
    hub_bytes=2,
    needs_bf16=True,
    copies=4,
    tokens=2048,
    micro_batch=2,
    accumulation=2,
    max_steps=1000,
    epochs=3.0,
    peaks={"forward": Peak(20 * 10**9, {"weights": 8 * 10**9, "activations": 12 * 10**9})},
    host_peaks={"load": Peak(4 * 10**9, {})},
    hull=[(8 * 10**9, 12 * 10**9)],
    step=Counts(flops={"torch.bfloat16": 312e12}, moved={"gathered": 4e9}, touched=0),
)


def found_with(**changes) -> Simulation:
    return dataclasses.replace(FOUND, **changes)


def moving(**moved: float) -> Counts:
    """The counts of FOUND's step with other transfers."""
    return dataclasses.replace(FOUND.step, moved=moved)


def test_card_must_hold_peak_and_reserve():
    """That of the user comes first."""
    own, smaller = (cards.card_of_user("A4000", size, 155, 768) for size in (24.2, 21.9))
    plan = summary.make_plan(FOUND, all_cards=(own, *cards.CARDS))
    assert plan["peak_gpu_gb"] == 20.0 and plan["reserve_gb"] == pytest.approx(2.0)
    assert next(iter(plan["fits"])) == "A4000" and [name for name, fits in plan["fits"].items() if not fits] == ["T4"]
    assert plan["free_gb"]["A4000"] == pytest.approx(24.2 - 20 - 2.0) and not memory.fits(smaller, FOUND, 20e9)
    assert plan["step_seconds"]["A4000"] == pytest.approx(312 / 155 / 0.60, abs=0.001)
    assert plan["largest_micro_batch"]["RTX 3090"] == 2 and plan["largest_micro_batch"]["A100 80 GB"] == 11
    assert "T4" not in plan["tokens_per_second"], "a T4 has no bf16"


def test_nccl_buffers_of_each_communicator():
    """Of all processes, and with hybrid sharding of the shards and of the replicas."""
    alone, hybrid = found_with(processes=1, shards=1), found_with(processes=8, shards=4, replicas=2)
    for name, expected in (("RTX 3090", 3 * 0.5), ("A100 80 GB", 0.72 + 0.72 + 0.57)):
        difference = memory.reserve(hybrid, 20e9, CARDS[name]) - memory.reserve(alone, 20e9, CARDS[name])
        assert difference == pytest.approx(expected * cards.GB)
    assert memory.nccl_buffers(hybrid, links.with_links(CARDS["A100 80 GB"], has_nvlink=False)) == 3 * 0.5 * cards.GB


def test_step_takes_as_long_as_its_host():
    """A host starts a kernel in 26 µs, in 17 µs if it generates; the slower of GPU and host counts."""
    card = CARDS["H100 80 GB"]
    few, many = (found_with(step=dataclasses.replace(FOUND.step, launches=count)) for count in (1_000, 200_000))
    assert roofline.step_seconds(card, few) == roofline.step_seconds(card, FOUND) < 2.0
    assert roofline.step_seconds(card, many) == pytest.approx(5.2)
    generating = found_with(completion=100, generations=1, token=Counts({}, {}, 0, launches=10_000))
    assert roofline.generating_seconds(card, generating) == pytest.approx(17)


def test_transfers_overlap_with_compute():
    card = CARDS["A100 80 GB"]
    assert roofline.step_seconds(card, FOUND) == pytest.approx(1 / 0.60), "3 GB over NVLink take 0.014 s"
    assert roofline.step_seconds(card, found_with(nodes=4)) == pytest.approx(1 / 0.60), "and 1 s at 25 Gbit/s"
    long = found_with(nodes=4, step=moving(gathered=8e9))
    assert roofline.step_seconds(card, long) == pytest.approx(8e9 * 3 / 4 / 3e9)
    offloaded = found_with(is_offloaded=True, step=moving(to_gpu=190e9))
    assert roofline.step_seconds(card, offloaded) == pytest.approx(10 + 25e7 * 1.35e-9), "PCIe 4, and Adam on the host"


def test_gpu_waits_for_offload():
    """With one process for the weights, and for gradients that are added on the host, although other transfers overlap."""
    card, one_process = CARDS["A100 80 GB"], {"processes": 1, "shards": 1, "is_offloaded": True}

    def seconds(**moved: float) -> float:
        return roofline.step_seconds(card, found_with(**one_process, step=moving(**moved)))

    compute = 1 / 0.60 + 25e7 * 1.35e-9
    assert seconds() == pytest.approx(compute)
    assert seconds(to_gpu=19e9) == pytest.approx(compute + 1)
    assert seconds(to_host=4e9) == pytest.approx(compute + 1), "memory is pinned, the copy itself overlaps"
    assert seconds(to_host=19e9, added_on_host=19e9) == pytest.approx(compute + 1 + 19e9 / 4 * 0.85e-9)


def test_host_memory_and_disk_space():
    adapter = {"is_adapter": True, "trained": 10**7, "optimizer": 2 * 10**7}
    expected = [
        ({}, 4 * 4, 2 + 2 * 12 + 2),  # every process reads the whole model
        ({"copies": 1}, 4, 2 + 2 * 12 + 2),
        ({"optimizer": 5 * 10**8}, 4 * 4, 2 + 2 * 6 + 2),  # 8-bit states
        (adapter, 4 * 4, 2 + 2 * 0.12 + 0.04),
        (adapter | {"quantized": 3 * 10**9}, 4 * 1, 2 + 3 + 2 * 0.12 + 0.04),  # the mapped file can be dropped
    ]
    for changes, host, disk in expected:
        plan = summary.make_plan(found_with(**changes))
        assert (plan["peak_host_gb"], plan["disk_gb"]) == pytest.approx((4 * 2.5 + host, disk)), changes


def test_bytes_across_nodes():
    """Each of four nodes has one of four shards; with replicas, a GPU sends and receives the gradients of a shard."""
    hybrid = {"processes": 8, "nodes": 2, "replicas": 2, "step": moving(gathered=4e9, all_reduced=1e9)}
    for changes, expected in (({}, 0), ({"nodes": 4}, 4 * 3 / 4), ({"nodes": 2}, 4 * 2 / 4), (hybrid, 1)):
        moved = summary.make_plan(found_with(**changes))["moved_gb"]
        assert moved.get("across_nodes", 0) == pytest.approx(expected), changes


def test_flags_for_less_memory():
    slower = ["--activation_checkpointing", "true", "--per_device_train_batch_size", "1"]
    smaller = ["--use_peft", "true", "--load_in_4bit", "true"]
    assert proposals.flags_for_less(found_with(has_global_batch_flag=True)) == [slower, slower + smaller]
    assert proposals.flags_for_less(FOUND)[0] == [*slower, "--gradient_accumulation_steps", "4"], "as many rows per step"
