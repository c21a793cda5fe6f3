"""The recipes and configs of docs/which-recipe.md, simulated: each fits the card of its config, and has these numbers."""

import os
import re

from planner import cards, memory, roofline
from planner.cache import simulation_of
from planner.simulation import Simulation

import pytest
from conftest import ROOT, TABLE, TABLE_PAIRS

# SIMULATE_ALL=1 simulates all pairs, which takes minutes, as the workflow on GitHub does.
QUICK = [("qwen2_fineweb_edu", "1x3090_offload")]
ALL = "SIMULATE_ALL" in os.environ
CARDS = {card.name: card for card in cards.CARDS}
ALL_PAIRS = [pair[:2] for pair in TABLE_PAIRS if pair[1] != "cpu"]
PAIRS = [pair for pair in ALL_PAIRS if ALL or pair in QUICK]
slow = pytest.mark.skipif(not ALL, reason="simulated with SIMULATE_ALL=1 only")
PARAMETERS = {  # from the page of each model on the Hub
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3.5-4B": 4_539_265_536,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "openai-community/gpt2-xl": 1_557_611_200,
}


@pytest.fixture(scope="module")
def both(simulate) -> dict[tuple[str, str], tuple[Simulation, Simulation]]:
    """The simulation of every pair, with a few of its layers extended to all, and with all layers."""
    kinds = ["cuda to the end", "cuda to the end with all layers"]
    files = [(ROOT / f"recipes/{recipe}.py", ROOT / f"accelerate_configs/{config}.yaml") for recipe, config in PAIRS]
    found = [simulation_of(fields) for fields in simulate([(*pair, [], kind) for pair in files for kind in kinds])]
    return dict(zip(PAIRS, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.fixture(scope="module")
def found(both) -> dict[tuple[str, str], Simulation]:
    return {pair: extended for pair, (extended, _) in both.items()}


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_few_layers_give_what_all_layers_give(pair, both):
    """Counts are equal; memory, also with a micro-batch twice as large, to 0.01 %, in each moment to 1 %."""
    extended, every = both[pair]
    assert (extended.simulated_layers, every.simulated_layers) == (0 if "ddp" in pair[1] else 5, 0)
    assert (extended.step, extended.token) == (every.step, every.token)
    for place in ("peaks", "host_peaks"):
        few, expected = ({moment: peak.bytes for moment, peak in getattr(one, place).items()} for one in both[pair])
        assert few == pytest.approx(expected, rel=1e-2), place
    assert extended.peak.bytes == pytest.approx(every.peak.bytes, rel=1e-4)
    sizes = [max(fixed + 2 * growing for fixed, growing in one.hull) for one in (extended, every)]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-4)


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_pair_fits_the_card_of_its_config(pair, found):
    run = found[pair]
    assert memory.fits(CARDS["T4" if "t4" in pair[1] else "RTX 3090"], run, run.peak.bytes)
    assert run.parameters == PARAMETERS.get(run.model, run.parameters)
    assert {"load", "forward", "backward", "save"} <= run.peaks.keys()


def test_table_has_the_simulated_memory_and_speed(found):
    row = re.compile(r"^\| `(\w+)` \| `(\w+)` \|.*\| ([\d.]+) GB \| ([\d,]+)(?: on (\w+)s)? \|$", re.MULTILINE)
    rows = {(recipe, config): rest for recipe, config, *rest in row.findall(TABLE)}
    assert len(rows) == len(ALL_PAIRS)  # as long as all are forecasts
    for pair in PAIRS:
        run, (size, speed, name) = found[pair], rows[pair]
        assert float(size) == pytest.approx(run.peak.bytes / 1e9, abs=0.06), pair
        card = CARDS[{"A100": "A100 80 GB", "T4": "T4"}.get(name, "RTX 3090")]
        expected = run.tokens * run.accumulation * run.processes / roofline.step_seconds(card, run)
        assert float(speed.replace(",", "")) == pytest.approx(expected, rel=0.06), pair


@slow
def test_no_gpu_holds_the_whole_70b(found):
    """Of 35 GB in 4 bits and 4 GB in bf16, a GPU holds at most two layers, the head and the embedding, also to load and save."""
    run = found["llama31_70b_qlora", "2x3090_qlora"]
    for moment, peak in run.peaks.items():
        assert peak.by_holder.get("weights", 0) + peak.by_holder.get("gathered", 0) < 9e9, moment
    assert run.peaks["load"].bytes < 9e9 and run.peaks["save"].bytes < 9e9
    assert run.host_peaks["load"].bytes > 35e9, "it is loaded into host memory"
    assert run.quantized == pytest.approx(39.5e9, rel=0.01)


def test_flops_of_packed_documents(found):
    """6 per weight and token, the head once more, and attention within documents of 1,024 tokens instead of all 2,048.

    The backward pass computes the layers again, up to their last product.
    """
    run = found["qwen2_fineweb_edu", "1x3090_offload"]
    weights, head, layers, hidden, intermediate, length = 357_897_600, 151_936 * 896, 24, 896, 4864, 1024
    attention = layers * hidden * (length + 1) / 2
    computed_again = 2 * (weights - layers * hidden * intermediate) + 4 * attention
    of_a_token = 6 * weights + 8 * head + 14 * attention + computed_again
    assert run.tokens == 2 * length
    flops = sum(run.step.flops.values()) / run.tokens / run.accumulation
    assert flops == pytest.approx(of_a_token, rel=0.01)
    of_whole_rows = of_a_token - 14 * attention + 14 * layers * hidden * 2 * length
    assert flops < 0.9 * of_whole_rows


def test_moved_bytes_and_states_of_the_optimizer(found):
    """AdamW's two states, in float32, are kept through a step; with offload on the host."""
    run = found["qwen2_fineweb_edu", "1x3090_offload"]
    # 8 micro-batches copy the model to the GPU twice, the tied head once.
    assert run.step.moved["to_gpu"] == pytest.approx(27.3e9, rel=0.01)
    assert run.step.moved["to_host"] == pytest.approx(4 * 494_032_768, rel=0.001) and "added_on_host" not in run.step.moved
    assert run.optimizer == 8 * 494_032_768
    for moment in ("backward", "optimizer step"):
        assert run.host_peaks[moment].by_holder["optimizer"] == pytest.approx(run.optimizer, rel=0.001), moment


@slow
def test_hybrid_sharding_moves_only_gradients_across_nodes(found):
    """A micro-batch gathers and reduces as on one node. Once per step, nodes all-reduce a quarter of the adapter's gradients."""
    hybrid, one_node = (found["llama31_8b_lora", config] for config in ("2x4gpu_hybrid_shard", "4gpu_full_shard"))
    for kind in ("gathered", "reduced"):
        per_micro_batch = [run.step.moved[kind] / run.accumulation for run in (hybrid, one_node)]
        assert per_micro_batch[0] == pytest.approx(per_micro_batch[1], rel=0.01)
    assert hybrid.step.moved["all_reduced"] == pytest.approx(41_943_040, rel=0.01)
    assert "all_reduced" not in one_node.step.moved
