"""From bytes and FLOPs to cards, hours and money."""

from harness.plan import cards

import pytest

CARDS = {card.name: card for card in cards.CARDS}
FOUND = {
    "recipe": "any",
    "config": "any",
    "processes": 4,
    "nodes": 1,
    "shards": 4,
    "replicas": 1,
    "parameters": 10**9,
    "trained": 10**9,
    "trained_here": 25 * 10**7,
    "packed": 0,
    "adapter": False,
    "hub_bytes": 2,
    "download": 2 * 10**9,
    "bf16": True,
    "offloaded": False,
    "copies": 4,
    "tokens": 2048,
    "micro_batch": 2,
    "accumulation": 2,
    "max_steps": 1000,
    "peaks": {"forward": {"bytes": 20 * 10**9, "by": {"weights": 8 * 10**9, "activations": 12 * 10**9}}},
    "host_peaks": {"load": {"bytes": 4 * 10**9, "by": {}}},
    "hull": [(8 * 10**9, 12 * 10**9)],
    "step": {"flops": {"torch.bfloat16": 312e12}, "moved": {"gathered": 4e9}, "touched": 0},
}


def test_a_card_must_hold_the_peak_and_the_reserve():
    plan = cards.plan(FOUND)
    assert plan["peak_gpu_gb"] == 20.0 and plan["reserve_gb"] == pytest.approx(2.0)
    assert [name for name, fits in plan["fits"].items() if not fits] == ["T4"]
    assert plan["largest_micro_batch"]["RTX 3090"] == 2 and plan["largest_micro_batch"]["A100 80 GB"] == 11
    assert "T4" not in plan["tokens_per_second"], "a T4 has no bf16"
    assert cards.plan(FOUND | {"bf16": False})["fits"]["T4"] is False


def test_time_is_between_all_hidden_and_nothing_hidden():
    low, high = cards.step_seconds(CARDS["A100 80 GB"], FOUND)
    assert low == pytest.approx(1 / 0.80) and high == pytest.approx(1 / 0.40 + 3e9 / 25e9)
    slow, _ = cards.step_seconds(CARDS["A100 80 GB"], FOUND | {"nodes": 4})
    assert slow == pytest.approx(low), "over 100 Gbit/s, 3 GB still hide behind the arithmetic"
    offloaded = FOUND | {"offloaded": True, "step": {**FOUND["step"], "moved": {"to_gpu": 240e9}}}
    assert cards.step_seconds(CARDS["A100 80 GB"], offloaded)[0] == pytest.approx(10 + 25e7 * 0.95e-9)


def test_hours_and_money():
    plan = cards.plan(FOUND, price=2.0)
    low, high = plan["step_seconds"]["A100 80 GB"]
    assert plan["hours"]["A100 80 GB"] == [
        pytest.approx(low * 1000 / 3600, abs=0.01),
        pytest.approx(high * 1000 / 3600, abs=0.01),
    ]
    assert plan["price"]["A100 80 GB"][1] == pytest.approx(plan["hours"]["A100 80 GB"][1] * 4 * 2.0)
    assert plan["tokens_a_step"] == 2048 * 2 * 4 and plan["tokens_per_second"]["A100 80 GB"][1] == round(16384 / (1 / 0.80))
    assert cards.plan(FOUND | {"max_steps": -1})["hours"] == {}, "without data nobody knows how long an epoch is"


def test_host_and_disk():
    plan = cards.plan(FOUND)
    assert plan["peak_host_gb"] == pytest.approx(4 * 2.5 + 4 * 4), "every process reads the whole model"
    assert cards.plan(FOUND | {"copies": 1})["peak_host_gb"] == pytest.approx(4 * 2.5 + 4)
    assert plan["disk_gb"] == pytest.approx(2 + 2 * 12 + 2)
    adapter = cards.plan(FOUND | {"adapter": True, "trained": 10**7})
    assert adapter["disk_gb"] == pytest.approx(2 + 2 * 0.12 + 0.04)
