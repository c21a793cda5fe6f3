"""From bytes and FLOPs to cards, hours and money."""

from harness.plan import cards, proposals

import pytest
from conftest import ROOT

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
    "global_batch_size": False,
    "checkpointing": True,
    "max_length": 1024,
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


def test_what_crosses_nodes():
    def across(**changes):
        return cards.plan(FOUND | changes)["moved_gb"].get("across_nodes")

    assert across() is None
    assert across(nodes=4) == pytest.approx(4 * 3 / 4), "each of four nodes has one of four shards"
    assert across(nodes=2) == pytest.approx(4 * 2 / 4)
    reduced = {**FOUND["step"], "moved": {"gathered": 4e9, "all_reduced": 1e9}}
    assert across(processes=8, nodes=2, replicas=2, step=reduced) == pytest.approx(1), "a shard's gradients, in and out"


def needs(gigabytes: float) -> dict:
    return FOUND | {"peaks": {"forward": {"bytes": gigabytes * 1e9, "by": {}}}}


def test_proposals_are_tried_on_top_of_those_that_helped():
    """The cheapest first; one that is refused is passed over, and the first that fits is the last."""
    config, asked = str(ROOT / "accelerate_configs/4gpu_full_shard.yaml"), []

    def run(config, flags):
        asked.append(flags)
        answers = {"--per_device_train_batch_size": needs(40), "--use_peft": {"refused": "it is"}, "--load_in_4bit": needs(10)}
        return next(answer for flag, answer in reversed(answers.items()) if flag in flags)

    found = needs(60)
    tried = proposals.tried(cards.plan(found), found, config, run)
    smaller = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"]
    assert asked == [smaller, [*smaller, "--use_peft", "true"], [*smaller, "--use_peft", "true", "--load_in_4bit", "true"]]
    assert [(row["needs"], row["fits"]) for row in tried] == [(pytest.approx(43), "no"), (pytest.approx(11.5), "yes")]
    assert all(row["card"] == "RTX 3090" for row in tried) and "--load_in_4bit" in tried[-1]["change"]


def test_proposals_keep_the_global_batch_a_person_gave():
    config = str(ROOT / "accelerate_configs/4gpu_full_shard.yaml")
    (flags,) = (
        flags
        for _, flags in proposals.changes(FOUND | {"global_batch_size": True}, config)
        if "--per_device_train_batch_size" in flags
    )
    assert flags == ["--per_device_train_batch_size", "1"]


def test_proposals_aim_at_the_card_of_the_config():
    """What fits 24 GB and not a T4 gets proposals under a config for T4s, and none under one for 3090s."""
    found = needs(20) | {"bf16": False}
    for config, card in (("3xt4_full_shard", "T4"), ("4gpu_full_shard", None)):
        path = str(ROOT / f"accelerate_configs/{config}.yaml")
        tried = proposals.tried(cards.plan(found), found, path, lambda *change: needs(8) | {"bf16": False})
        assert [row["card"] for row in tried] == ([card] if card else [])
