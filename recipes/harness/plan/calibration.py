"""Cards with the rates and the reserve that runs on this machine have measured, from the files of `run/forecast.py`.

A run says how long a step took, and its forecast says of which parts the step consists. One number cannot say which of them was
slower than assumed, so matrix products and other operators are taken to be at the same place between the slow and the fast end of
their ranges, and links and overlap too. Between two runs on the same card the median counts.
"""

import dataclasses
import importlib.metadata
import statistics
from typing import Any

from harness.folder import read_json
from harness.plan.cards import MEMORY_RATE, PRODUCT_RATE, Card, StepParts, seconds_at
from harness.run.forecast import measurements_folder

SPREAD = 0.10  # up and down from the median of the runs; more if the runs differ by more
PLACES = (-0.9, 1.25)  # beyond both ends of the ranges: matrix products at 4 % to 90 % of the card's rate
LEAST_COMPUTE = 0.5  # of the time of a step; a run that mostly waits for links or the host says nothing about the GPU
LEAST_TOKENS = 0.9  # of the forecast's; a step with shorter rows is another step
LEAST_UTILIZATION = 90  # percent; a run below waits for something that no forecast has


def calibrate(all_cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """The cards, those on which runs have measured with their rates and reserve. Runs count with the same PyTorch only."""
    records, here = read_measurements(), importlib.metadata.version("torch")
    records = [record for record in records if record["versions"]["torch"] == here]
    return tuple(calibrate_card(card, [r for r in records if r["forecast"]["card"] == card.name]) for card in all_cards)


def read_measurements() -> list[dict[str, Any]]:
    """What runs have kept, [] without any. A file that cannot be read is ignored."""
    records = []
    for path in sorted(measurements_folder().glob("*.json")):
        try:
            record = read_json(path)
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and {"versions", "forecast", "step_seconds"} <= record.keys():
            records.append(record)
    return records


def calibrate_card(card: Card, records: list[dict[str, Any]]) -> Card:
    """`card` with narrower rates, and with a larger reserve if a run needed more memory than its forecast; never with a smaller.

    `records` are of runs on such a card. Without one, the card is returned as it is.
    """
    if not records:
        return card
    more = max(more_memory(record) for record in records)
    card = dataclasses.replace(card, runs=len(records), more_reserve=round(max(card.more_reserve, more), 4))
    places = [place for place in map(place_of, records) if place is not None]
    if not places:
        return card
    return dataclasses.replace(
        card,
        product_rate=range_of([rate_at(PRODUCT_RATE, place) for place in places]),
        memory_rate=range_of([rate_at(MEMORY_RATE, place) for place in places]),
    )


def range_of(rates: list[float]) -> tuple[float, float]:
    middle = statistics.median(rates)
    return round(min((1 - SPREAD) * middle, *rates), 3), round(max((1 + SPREAD) * middle, *rates), 3)


def rate_at(ends: tuple[float, float], place: float) -> float:
    return (1 - place) * ends[0] + place * ends[1]


def place_of(record: dict[str, Any]) -> float | None:
    """Where between the slow end (0) and the fast end (1) of the assumptions a step takes what was measured.

    None if the run says nothing about the rates: it waited, had other steps than its forecast, or no rate explains its time.
    """
    forecast, measured = record["forecast"], record["step_seconds"]
    if record["tokens_per_step"] < LEAST_TOKENS * forecast["tokens_per_step"]:
        return None
    if min(record["gpu_utilization"] or [100]) < LEAST_UTILIZATION:
        return None
    parts, (slow, fast) = StepParts(**forecast["step_parts"]), PLACES
    for _ in range(40):  # halves the range each time
        middle = (slow + fast) / 2
        if seconds_at_place(parts, middle) > measured:
            slow = middle
        else:
            fast = middle
    if not 0.99 < seconds_at_place(parts, slow) / measured < 1.01:
        return None
    compute = parts.products / rate_at(PRODUCT_RATE, slow) + parts.others / rate_at(MEMORY_RATE, slow)
    return slow if compute >= LEAST_COMPUTE * measured else None


def seconds_at_place(parts: StepParts, place: float) -> float:
    """Seconds of a step; beyond the ends, links and overlap stay at their ends."""
    return seconds_at(parts, rate_at(PRODUCT_RATE, place), rate_at(MEMORY_RATE, place), min(1.0, max(0.0, place)))


def more_memory(record: dict[str, Any]) -> float:
    """By which share a run allocated or reserved more than its forecast, 0 if it did not."""
    forecast = record["forecast"]
    allocated = record["peak_gpu_gb"] / forecast["peak_gpu_gb"]
    reserved = record["peak_gpu_reserved_gb"] / forecast["reserved_gb"]
    return max(1.0, allocated, reserved) - 1


def describe(calibrated: dict[str, Any]) -> str:
    """What `make_plan` has under "calibrated" of a card, in words."""
    words = [f"calibrated by {calibrated['runs']} run{'s' if calibrated['runs'] > 1 else ''} on this machine"]
    for name, (low, high) in (
        ("matrix products at {} % of the card's rate", calibrated["product_rate"]),
        ("other operators at {} % of its memory bandwidth", calibrated["memory_rate"]),
    ):
        words.append(name.format(f"{100 * low:.0f}–{100 * high:.0f}"))
    if calibrated["more_reserve"]:
        words.append(f"{100 * calibrated['more_reserve']:.1f} % of the peak more in the reserve")
    return f"{words[0]}: {', '.join(words[1:])}"
