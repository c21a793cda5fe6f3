"""Every pair of README's table, simulated at full size: it fits the card its config is for, and holds what it should."""

import os
import re

from harness.plan import cards

import pytest
from conftest import ROOT, readme_pairs

# One of each kind. All of them take minutes: SIMULATE_ALL=1 asks for them, as the workflow on GitHub does.
CHEAP = [("qwen2_fineweb_edu", config) for config in ("1x3090", "1x3090_offload", "4gpu_ddp")]
CHEAP += [("gpt2_xl_wikitext", "3xt4_shard_grad_op")]
ALL = "SIMULATE_ALL" in os.environ
CARDS = {card.name: card for card in cards.CARDS}
PAIRS = [pair[:2] for pair in readme_pairs() if ALL or pair[:2] in CHEAP]
dear = pytest.mark.skipif(not ALL, reason="simulated with SIMULATE_ALL=1 only")
PARAMETERS = {  # as the models' cards on the hub say
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2-0.5B-Instruct": 494_032_768,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "openai-community/gpt2-xl": 1_557_611_200,
}


@pytest.fixture(scope="module")
def found(drive):
    """What was found for every pair. A config of N machines is simulated from one."""
    how = "cuda to the end" if ALL else "cuda"  # evaluation and sample as well
    runs = [(ROOT / f"recipes/{recipe}.py", ROOT / f"accelerate_configs/{config}.yaml", [], how) for recipe, config in PAIRS]
    return dict(zip(PAIRS, drive(runs), strict=True))


def peak(found: dict) -> int:
    return max(moment["bytes"] for moment in found["peaks"].values())


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_pair_fits_the_card_its_config_is_for(pair, found):
    card = CARDS["T4" if "t4" in pair[1] else "RTX 3090"]
    assert cards.fits(card, found[pair], peak(found[pair]))
    assert found[pair]["parameters"] == PARAMETERS[found[pair]["names"]["model"]]
    assert {"load", "forward", "backward", "save"} <= found[pair]["peaks"].keys()


def test_the_readme_says_what_was_simulated(found):
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|.*?\| ([\d.]+) GB \*\(forecast", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows
    for recipe, config, size in (row for row in rows if row[:2] in PAIRS):
        assert float(size) == pytest.approx(peak(found[recipe, config]) / 1e9, abs=0.06), (recipe, config)


def test_the_readme_says_how_fast_that_would_be(found):
    row = re.compile(r"^\| `(\w+)` \| `(\w+)` \|.*\| ([\d,]+)–([\d,]+)(?: on (\w+)s)? \*\(forecast", re.MULTILINE)
    rows = row.findall((ROOT / "README.md").read_text())
    assert len(rows) == len(readme_pairs())  # as long as all of them are forecasts
    for *pair, low, high, card in (said for said in rows if said[:2] in PAIRS):
        run = found[tuple(pair)]
        tokens = run["tokens"] * run["accumulation"] * run["processes"]
        best, worst = cards.step_seconds(CARDS[{"A100": "A100 80 GB", "T4": "T4"}.get(card, "RTX 3090")], run)
        said = [float(number.replace(",", "")) for number in (low, high)]
        assert said == [pytest.approx(tokens / worst, rel=0.06), pytest.approx(tokens / best, rel=0.06)], pair


@dear
def test_nothing_of_70b_is_ever_whole_on_a_card(found):
    """From load to save, of 35 GB in 4 bits and 4 GB in bf16 there are two layers, the head and the embedding at most."""
    run = found["llama31_70b_qlora", "2x3090_qlora"]
    for moment, held in run["peaks"].items():
        base = held["by"].get("weights", 0) + held["by"].get("gathered", 0)
        assert base < 9e9, moment
    assert run["peaks"]["load"]["bytes"] < 9e9 and run["peaks"]["save"]["bytes"] < 9e9
    assert run["host_peaks"]["load"]["bytes"] > 35e9, "it waits in host memory"


def test_what_was_simulated_before_differs_little(found):
    """Two simulations that were made independently of this one, GB at the peak; see docs/will-it-fit.md for the others."""
    assert peak(found["qwen2_fineweb_edu", "1x3090"]) == pytest.approx(13.07e9, rel=0.01)
    assert peak(found["qwen2_fineweb_edu", "1x3090_offload"]) == pytest.approx(1.34e9, rel=0.05)


def test_what_moves_is_what_the_config_says(found):
    offload = found["qwen2_fineweb_edu", "1x3090_offload"]["step"]["moved"]
    assert offload["to_gpu"] == pytest.approx(27.3e9, rel=0.01)  # 8 micro-batches fetch the model twice, a tied head once
    assert offload["to_host"] == pytest.approx(8 * 4 * 494_032_768, rel=0.001)
    ddp = found["qwen2_fineweb_edu", "4gpu_ddp"]["step"]["moved"]
    assert ddp["all_reduced"] == pytest.approx(4 * 494_032_768, rel=0.001)
    once = found["gpt2_xl_wikitext", "3xt4_shard_grad_op"]["step"]["moved"]
    assert once["gathered"] == pytest.approx(2 * 1_557_611_200, rel=0.01)
    assert once["reduced"] == pytest.approx(2 * 1_557_611_200, rel=0.01)


@dear
def test_the_recipe_of_the_published_numbers_can_be_simulated(drive):
    recipe, config = ROOT / "benchmarks/published_recipe.py", ROOT / "accelerate_configs/4gpu_full_shard.yaml"
    flags = ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--use_peft", "--load_in_4bit", "--max_length", "512"]
    (run,) = drive([(recipe, config, flags, "cuda")])
    assert run["packed"] > 0 and run["adapter"]


@dear
def test_across_nodes_go_gradients_only(found):
    """A micro-batch gathers and reduces as on one node; across nodes go the adapter's gradients, a quarter on each GPU, once."""
    hybrid, flat = (found["llama31_8b_lora", config] for config in ("2x4gpu_hybrid_shard", "4gpu_full_shard"))
    for kind in ("gathered", "reduced"):
        once, often = (run["step"]["moved"][kind] / run["accumulation"] for run in (hybrid, flat))
        assert once == pytest.approx(often, rel=0.01)
    assert hybrid["step"]["moved"]["all_reduced"] == pytest.approx(41_943_040, rel=0.01)
    assert "all_reduced" not in flat["step"]["moved"]
