"""A few layers that are simulated are extended to all, if the layers are alike and their events repeat."""

from planner import layers
from planner.ledger import Counts, Event, Ledger, Storage, in_order

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 8


@pytest.fixture
def model():
    with torch.device("meta"):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def test_equal_layers(model):
    assert layers.equal_layers(model) is model.model.layers
    del model.model.layers[-1]
    assert layers.equal_layers(model) is None, "it does not pay"


@pytest.mark.parametrize("change", ["frozen", "width", "module", "attribute"])
def test_layers_that_differ(model, change):
    layer = model.model.layers[5]
    if change == "frozen":
        layer.mlp.up_proj.weight.requires_grad_(False)
    elif change == "width":
        layer.mlp.up_proj = torch.nn.Linear(16, 33, bias=False, device="meta")
    elif change == "module":
        layer.post_attention_layernorm = torch.nn.Identity()
    else:
        layer.self_attn.sliding_window = 128
    assert layers.equal_layers(model) is None


def run(count: int, *, seen: int = 0, last: int = 64) -> Ledger:
    """Events of a model with so many layers: each allocates in forward, and frees in backward what it has allocated.

    `seen`: layers that were loaded; `last`: bytes that the last layer allocates.
    """
    ledger = Ledger()
    weights = [Storage(0, "gpu", "weights") for _ in range(seen or count)]
    held = []

    def change(storage: Storage, size: int, moment: str) -> None:
        ledger.events.append(Event(moment, storage, "gpu", -(-size // 512) * 512 - storage.size, size))
        storage.size = -(-size // 512) * 512

    for weight in weights:
        change(weight, 4096, "load")
    for weight in weights[count:]:
        change(weight, 0, "load")
    ledger.start = len(ledger.events)
    for index in range(count):
        for size in (640, 1024, last if index == count - 1 else 64):
            held.append(Storage(0, "gpu", "activations"))
            change(held[-1], size, "forward")
        temporary = Storage(0, "gpu", "rest")
        change(temporary, 2048, "forward")
        change(temporary, 0, "forward")
    norms = Storage(0, "gpu", "rest")
    change(norms, 300 * count, "forward")
    for weight in reversed(weights[:count]):
        gradient = Storage(0, "gpu", "gradients")
        change(gradient, 4096, "backward")
        for _ in range(3):
            change(held.pop(), 0, "backward")
        change(weight, 0, "backward")
    change(norms, 0, "backward")
    return ledger


def recording(count: int, **options: int) -> layers.Recording:
    ledger = run(count, seen=30, **options)
    return layers.record(ledger.events, ledger.start, count, [Counts({}, {}, 0)], [])


def test_events_are_extended():
    whole = run(30)
    before = whole.events[: whole.start]
    live = layers.live_storages(before)
    for storage in (event.storage for event in before):
        storage.size = 4096
    events = before + layers.extend(recording(4), recording(5), 30, live)
    extended = Ledger()
    extended.events = in_order(events)
    whole.events = in_order(whole.events)
    assert numbered(extended.events) == numbered(whole.events)
    assert extended.peaks() == whole.peaks() and extended.hull() == whole.hull()


def numbered(events: list[Event]) -> list[tuple]:
    """Events with a number instead of each storage, and with its holder."""
    numbers: dict[Storage, int] = {}
    return [(*event._replace(storage=numbers.setdefault(event.storage, len(numbers))), event.storage.holder) for event in events]


@pytest.mark.parametrize("last", [128, 4096])
def test_events_that_do_not_repeat(last):
    """The last layer allocates more if there are five."""
    with pytest.raises(layers.Unlike):
        layers.extend(recording(4), recording(5, last=last), 30, layers.live_storages(run(30).events[:30]))


def test_counts_are_linear():
    few = Counts({"bf16": 10}, {"gathered": 4}, 100)
    more = Counts({"bf16": 12}, {"gathered": 5, "reduced": 1}, 110)
    assert layers.linear_counts(few, more, 3) == Counts({"bf16": 18}, {"gathered": 8, "reduced": 4}, 140)
