"""Runs on a GPU narrow the ranges of the plans for it, and never make its reserve smaller."""

import dataclasses
import importlib.metadata
import json

from harness.plan import cards, pages
from harness.run import forecast

import pytest
from test_cards import CARDS, FOUND

CARD = CARDS["RTX 3090"]
ONE_GPU = dataclasses.replace(
    FOUND, processes=1, shards=1, copies=1, reserved=21 * 10**9, step=dataclasses.replace(FOUND.step, moved={}, touched=2e11)
)
PARTS = cards.step_parts(CARD, ONE_GPU)
VERSIONS = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}


def results_of(place: float = 0.5, **changes) -> dict:
    """What train_results.json has after a run that was as fast as this place in the range, with as much memory as planned."""
    plan = cards.make_plan(ONE_GPU) | {"step_parts": {CARD.name: PARTS._asdict()}}
    seconds = cards.seconds_at_place(PARTS, place)
    results = {
        "recipe": "qwen2_chat",
        "config": "1x3090",
        "device": "NVIDIA GeForce RTX 3090",
        "world_size": 1,
        "num_nodes": 1,
        "global_step": 100,
        "resumed_from_step": 0,
        "tokens": 100 * plan["tokens_per_step"],
        "tokens_per_second": plan["tokens_per_step"] / seconds,
        "gpu_utilization": [97.0],
        "peak_gpu_gb": 20.0,
        "peak_gpu_reserved_gb": 21.0,
        "peak_host_gb": 4.0,
        "finished": f"2026-11-22T12:00:{int(100 * place) % 60:02}",
        "versions": VERSIONS,
        "forecast": forecast.forecast_of(json.loads(json.dumps(plan)), "NVIDIA GeForce RTX 3090"),
    }
    return results | changes


def record_of(place: float = 0.5, **changes) -> dict:
    return forecast.measurement_of(results_of(place, **changes))


@pytest.mark.parametrize("place", [-0.5, 0.0, 0.3, 1.0, 1.2])
def test_forecast_of_a_calibrated_card_is_what_was_measured(place):
    """Also where the run was slower or faster than the whole range."""
    record = record_of(place)
    assert cards.place_of(record) == pytest.approx(place, abs=1e-6)
    card = cards.calibrate_card(CARD, [record])
    best, worst = cards.step_seconds(card, ONE_GPU)
    assert worst == pytest.approx(record["step_seconds"] / 0.9, rel=0.01)
    assert best == pytest.approx(record["step_seconds"] / 1.1, rel=0.01)
    assert (card.runs, card.more_reserve) == (1, 0.0)


def test_transfers_that_are_not_hidden_are_no_compute():
    """Four GPUs over PCIe: at this place in the ranges of rates, links and overlap, the step takes what was measured."""
    parts = cards.step_parts(CARD, FOUND)
    results = results_of(tokens_per_second=8192 / cards.seconds_at_place(parts, 0.4), tokens=819200)
    results["forecast"] |= {"step_parts": parts._asdict(), "tokens_per_step": 8192}
    record = forecast.measurement_of(results)
    assert cards.place_of(record) == pytest.approx(0.4, abs=1e-6)
    best, worst = cards.step_seconds(cards.calibrate_card(CARD, [record]), FOUND)
    assert best < record["step_seconds"] < worst
    assert worst - best < 0.8 * (cards.step_seconds(CARD, FOUND)[1] - cards.step_seconds(CARD, FOUND)[0])


def test_median_of_runs_and_at_least_what_they_measured():
    card = cards.calibrate_card(CARD, [record_of(place) for place in (0.2, 0.25, 0.9)])
    assert card.product_rate == (pytest.approx(0.9 * 0.5), pytest.approx(0.76)) and card.runs == 3
    assert card.memory_rate == (pytest.approx(0.9 * 0.625, abs=0.001), pytest.approx(0.95))


@pytest.mark.parametrize(
    "changes",
    [{"gpu_utilization": [97.0, 60.0]}, {"tokens_per_second": 10.0}],
    ids=["GPU waits", "slower than any GPU"],
)
def test_run_that_says_nothing_about_rates(changes):
    """The memory that it needed counts."""
    card = cards.calibrate_card(CARD, [record_of(**changes, peak_gpu_gb=21.0)])
    assert (card.product_rate, card.memory_rate) == (cards.PRODUCT_RATE, cards.MEMORY_RATE)
    assert card.more_reserve == pytest.approx(0.05)


def test_run_with_short_rows_says_nothing_about_rates():
    """Its steps take as long as forecast, but are other steps."""
    results = results_of()
    for share, is_told in ((0.95, True), (0.85, False)):
        shorter = {name: share * results[name] for name in ("tokens", "tokens_per_second")}
        assert (cards.place_of(forecast.measurement_of(results | shorter)) is not None) is is_told


def test_run_that_waits_for_the_host_says_nothing_about_rates():
    record = record_of()
    record["forecast"]["step_parts"]["waiting"] = [0.6 * record["step_seconds"]] * 2
    assert cards.place_of(record) is None


@pytest.mark.parametrize(
    ("measured", "more"),
    [({}, 0), ({"peak_gpu_gb": 15.0, "peak_gpu_reserved_gb": 15.0}, 0), ({"peak_gpu_reserved_gb": 23.1}, 0.1)],
)
def test_reserve_is_never_smaller(measured, more):
    card = cards.calibrate_card(CARD, [record_of(**measured), record_of()])
    assert cards.reserve(ONE_GPU, 20e9, card) == pytest.approx(cards.reserve(ONE_GPU, 20e9) + more * 20e9)
    assert cards.fits(dataclasses.replace(card, memory=22e9), ONE_GPU, 20e9) is (more == 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"resumed_from_step": 50},
        {"global_step": 4},
        {"tokens": 1000},
        {"tokens_per_second": 0.0},
        {"forecast": None},
        {"forecast": {"card": None, "peak_gpu_gb": 1.0}},
    ],
    ids=["resumed", "few steps", "few seconds", "no step", "no forecast", "unknown GPU"],
)
def test_run_that_is_not_kept(changes):
    assert record_of(**changes) is None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for module in (forecast, cards):
        monkeypatch.setattr(module, "measurements_folder", lambda: tmp_path / "measurements")
    return tmp_path / "measurements"


def test_plan_says_what_it_is_calibrated_by(folder, capsys):
    before = cards.make_plan(ONE_GPU)
    assert cards.calibrate(cards.CARDS) == cards.CARDS and "calibrated" not in before
    for place in (0.4, 0.5):
        forecast.keep_measurement(results_of(place))
    forecast.keep_measurement(results_of(0.6, resumed_from_step=50))
    forecast.keep_measurement(results_of(0.7, versions=VERSIONS | {"torch": "2.0.0"}))
    (folder / "half.json").write_text("{")
    (folder / "other.json").write_text("{}")
    (folder / "list.json").write_text("[]")
    all_cards = cards.calibrate(cards.CARDS)
    plan = cards.make_plan(ONE_GPU, all_cards=all_cards)
    assert [card.name for card in all_cards if card.runs] == list(plan["calibrated"]) == ["RTX 3090"]
    others = {name: seconds for name, seconds in plan["step_seconds"].items() if name != "RTX 3090"}
    assert others.items() <= before["step_seconds"].items()
    pages.print_plan(plan)
    expected = "calibrated by 2 runs on this machine: matrix products at 52–64 % of the card's rate"
    assert f"RTX 3090: {expected}, other operators at 65–80 % of its memory bandwidth\n" in capsys.readouterr().out


def test_folder_that_cannot_be_written(folder):
    folder.write_text("")
    forecast.keep_measurement(results_of())
    assert cards.read_measurements() == []
