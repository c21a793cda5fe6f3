"""Extends what was recorded of a model with few layers to all of its layers.

If the layers of a model are alike, a run of it with one layer more records the same events, and at some places a block of events
once more: the new layer's. Two runs, with n and n + 1 layers, show where, and each block must follow an equal one, of the layer
before. In the run of the whole model, these blocks are repeated. Which of several equal storages an event frees, and the bytes of
what grows with the number of layers, are linear in the number of layers, and along the blocks.
"""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from planner.ledger import Counts, Event, Storage, in_order, rounded_up

import torch

FEW = (4, 5)  # layers that are simulated
FEWEST = 8  # layers of a model for which this pays


class Unlike(Exception):
    """The events do not repeat as those of equal layers do."""


class Change(NamedTuple):
    """An event without its storage. Bytes are as asked for, before they were rounded up."""

    kind: tuple[Any, ...]  # moment, place, holder, stream, pinned or not, whether it is allocated, whether it is freed
    before: int
    after: int


class Recording(NamedTuple):
    """What a run of a model with so many layers recorded."""

    layers: int
    changes: list[Change]
    storages: list[int]  # of each change, a number of its storage
    rounded: list[tuple[int, int]]  # bytes before and after each change
    live: list[tuple[int, tuple]]  # before the run: numbers and keys of storages, in the order of their allocation
    counts: list[Counts]
    sizes: list[int]  # other numbers that are linear in the number of layers


class Block(NamedTuple):
    """Events of `more` that are repeated for each layer: those of `copies` layers, `length` for each, before `end`."""

    end: int
    end_of_few: int  # of the same events in `few`, which has one copy less
    length: int
    copies: int


def equal_layers(model: torch.nn.Module) -> torch.nn.ModuleList | None:
    """The list of a model's layers, None unless it is the only long one and all of its layers are alike."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) >= FEWEST]
    if len(lists) != 1:
        return None
    first, *others = (description(layer, index) for index, layer in enumerate(lists[0]))
    return lists[0] if all(other == first for other in others) else None


def description(layer: torch.nn.Module, index: int) -> list[tuple]:
    """The modules, weights, buffers and plain attributes of a layer, without its index."""
    found = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | tuple | None) and (key, value) != ("layer_idx", index)
        }
        found.append((name, type(module), plain))
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return found + [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]


def record(events: list[Event], start: int, layers: int, counts: list[Counts], sizes: list[int]) -> Recording:
    """The events from `start` on, in a form that can be sent to another process."""
    asked: dict[Storage, int] = {}
    held: dict[Storage, int] = {}
    names: dict[Storage, int] = {}
    live = live_storages(events[:start])
    for event in events[:start]:
        asked[event.storage] = event.asked
        held[event.storage] = held.get(event.storage, 0) + event.change
    changes, storages, rounded = [], [], []
    for event in in_order(events, start):
        storage = event.storage
        before, asked_before = held.get(storage, 0), asked.get(storage, 0)
        after = before + event.change
        held[storage], asked[storage] = after, event.asked
        kind = (event.moment, event.place, storage.holder, storage.stream, storage.is_pinned, not before, not after)
        changes.append(Change(kind, asked_before if before else 0, event.asked))
        storages.append(names.setdefault(storage, len(names)))
        rounded.append((before, after))
    numbered = [(names.setdefault(storage, len(names)), key) for key, of_key in live.items() for storage in of_key]
    return Recording(layers, changes, storages, rounded, numbered, counts, sizes)


def live_storages(events: Iterable[Event]) -> dict[tuple, list[Storage]]:
    """The storages that are allocated after these events, by their key and in the order of their allocation."""
    live: dict[tuple, list[Storage]] = collections.defaultdict(list)
    keys: dict[Storage, tuple] = {}
    sizes: collections.Counter = collections.Counter()
    for event in events:
        if sizes[event.storage]:
            live[keys[event.storage]].remove(event.storage)
        sizes[event.storage] += event.change
        if sizes[event.storage]:
            key = keys[event.storage] = (event.moment, event.place, event.storage.holder, sizes[event.storage])
            live[key].append(event.storage)
    return live


def find_blocks(few: Recording, more: Recording) -> tuple[list[Block], dict[int, int]]:
    """The blocks in `more` that `few` has once less; and for every other event of `more`, the index of the same one in `few`."""
    ours, theirs = few.changes, more.changes
    growth = more.layers / few.layers

    def grows(index: int, other: int) -> bool:
        """Whether two events differ in bytes only, as much as the number of layers allows."""
        one, two = ours[index], theirs[other]
        return one.kind == two.kind and all(a <= b <= a * growth for a, b in ((one.before, two.before), (one.after, two.after)))

    def count_equal(index: int, other: int) -> int:
        count = 0
        while index < len(ours) and other < len(theirs):
            if ours[index] != theirs[other] and not grows(index, other):
                return count
            index, other, count = index + 1, other + 1, count + 1
        return count if len(ours) - index != len(theirs) - other else len(theirs)

    blocks, pairs, here, there = [], {}, 0, 0
    while there < len(theirs):
        if here < len(ours) and ours[here] == theirs[there]:
            pairs[there] = here
            here, there = here + 1, there + 1
            continue
        missing = len(theirs) - len(ours) - (there - here)
        lengths = [length for length in range(missing + 1) if theirs[there : there + length] == theirs[there - length : there]]
        length = max(lengths, key=lambda length: count_equal(here, there + length))
        if not length:
            if here >= len(ours) or not grows(here, there):
                raise Unlike(f"no block of events fits at {theirs[there].kind}")
            pairs[there] = here
            here, there = here + 1, there + 1
            continue
        first = blocks[-1].end if blocks else 0
        copies, block = 1, theirs[there : there + length]
        while there - copies * length >= first and theirs[there - copies * length :][:length] == block:
            copies += 1
        there += length
        blocks.append(Block(there, here, length, copies))
    return blocks, pairs


def places(recording: Recording, growing: dict[int, Any]) -> list[tuple[Any, int] | None]:
    """For every event that changes a storage: the storage's key, and how many older storages with this key are allocated.

    `growing`: keys of storages whose bytes depend on the number of layers, by the event that allocates them.
    """
    live: dict[Any, list[int]] = collections.defaultdict(list)
    keys: dict[int, Any] = {}
    for storage, key in recording.live:
        live[key].append(storage)
        keys[storage] = key
    found: list[tuple[Any, int] | None] = []
    for index, change in enumerate(recording.changes):
        storage, (before, after) = recording.storages[index], recording.rounded[index]
        found.append(None)
        if before:
            key = keys[storage]
            found[-1] = key, live[key].index(storage)
            live[key].remove(storage)
        if after:
            keys[storage] = growing.get(index) or key_of(change, after)
            live[keys[storage]].append(storage)
    return found


def key_of(change: Change, size: int) -> tuple:
    moment, place, holder, *_ = change.kind
    return moment, place, holder, size


def extend(few: Recording, more: Recording, layers: int, live: dict[tuple, list[Storage]]) -> list[Event]:
    """The events of a model with so many layers. `live`: its storages before the run."""
    blocks, pairs = find_blocks(few, more)
    added = layers - more.layers
    growing = {there: ("growing", there) for there, here in pairs.items() if few.changes[here].after != more.changes[there].after}
    of_more = places(more, growing)
    of_few = places(few, {pairs[there]: key for there, key in growing.items()})
    writer = Writer(more, live)
    index = 0
    for block in [*blocks, Block(len(more.changes), len(few.changes), 0, 0)]:
        steps: list | None = []
        if block.length:
            for turned in turns(block, index, more.changes):
                steps = linear_places(turned, of_few, of_more)
                if steps is not None:
                    break
            if steps is None:
                raise Unlike(f"the events of {more.changes[block.end - 1].kind} do not free what those of other layers do")
            pairs |= {block.end - count: block.end_of_few - count for count in range(1, 1 + block.end - turned.end)}
            block = turned
        start = block.end - block.copies * block.length
        for there in range(index, start):
            one, two = few.changes[pairs[there]], more.changes[there]
            old, new = of_few[pairs[there]], of_more[there]
            if (old and old[0]) != (new and new[0]):
                raise Unlike(f"events of {two.kind} free different storages")
            after = two.after + added * (two.after - one.after)
            writer.write(there, after, new and (new[0], new[1] + added * (new[1] - old[1])), growing.get(there))
        for copy in range(block.copies + added if block.length else 0):
            for offset in range(block.length):
                there = start + offset
                if there in growing:
                    raise Unlike("a layer allocates more, the more layers there are")
                step = steps[offset]
                rank = step and (step[0], step[1] + copy * step[2] + added * step[3])
                writer.write(there, more.changes[there].after, rank, None)
        index = block.end
    return writer.events


def turns(block: Block, start: int, changes: list[Change]) -> Iterator[Block]:
    """Blocks that stand for the same repetition: with fewer copies, as the first layers can be special, or some events earlier.

    None begins before `start`.
    """
    for earlier in range(block.length):
        end = block.end - earlier
        for copies in range(block.copies, 1, -1):
            begin = end - copies * block.length
            if begin >= start and changes[begin : end - block.length] == changes[begin + block.length : end]:
                yield Block(end, block.end_of_few - earlier, block.length, copies)


def linear_places(block: Block, of_few: list, of_more: list) -> list[tuple[Any, int, int, int] | None] | None:
    """For each event of a block: None, or the key and three numbers of what it changes: the place in the first copy, and how much
    more it is for each copy and for each layer of the model. None if it is not so in all copies.
    """
    steps = []
    start, start_of_few = block.end - block.copies * block.length, block.end_of_few - (block.copies - 1) * block.length
    for offset in range(block.length):
        seen = [of_more[start + copy * block.length + offset] for copy in range(block.copies)]
        seen_in_few = [of_few[start_of_few + copy * block.length + offset] for copy in range(block.copies - 1)]
        if len({place and place[0] for place in (*seen, *seen_in_few)}) > 1:
            return None
        if seen[0] is None:
            steps.append(None)
            continue
        ranks, ranks_in_few = [rank for _, rank in seen], [rank for _, rank in seen_in_few]
        if block.copies < 3:  # any three numbers fit
            return None
        along, per_layer = ranks[1] - ranks[0], ranks[0] - ranks_in_few[0]
        expected = [ranks[0] + copy * along for copy in range(block.copies)]
        if ranks != expected or ranks_in_few != [rank - per_layer for rank in expected[:-1]]:
            return None
        steps.append((seen[0][0], ranks[0], along, per_layer))
    return steps


class Writer:
    """Writes events of the whole model, and follows which storages are allocated."""

    def __init__(self, recording: Recording, live: dict[tuple, list[Storage]]) -> None:
        self.recording, self.events = recording, []
        self.live: dict[Any, list[Storage]] = collections.defaultdict(
            list, {key: list(storages) for key, storages in live.items()}
        )
        self.sizes = {storage: storage.size for storages in live.values() for storage in storages}  # bytes

    def write(self, index: int, asked: int, place: tuple[Any, int] | None, key: Any) -> None:
        """An event like that of the recording, to `asked` bytes, of the storage at a place if it is not new.

        `key`: of the changed storage, if its bytes depend on the number of layers.
        """
        change, after = self.recording.changes[index], self.recording.rounded[index][1]
        moment, where, holder, stream, is_pinned, *_ = change.kind
        if place is None:
            storage = Storage(0, where, holder, stream, is_pinned)
        else:
            storages = self.live[place[0]]
            if not 0 <= place[1] < len(storages):
                raise Unlike(f"storage {place[1]} of {len(storages)} with {place[0]} is not there for an event of {change.kind}")
            storage = storages.pop(place[1])
        if asked != change.after:
            if is_pinned:
                raise Unlike("pinned memory depends on the number of layers")
            after = rounded_up(asked)
        self.events.append(Event(moment, storage, where, after - self.sizes.get(storage, 0), asked))
        self.sizes[storage] = after
        if after:
            self.live[key or key_of(change, after)].append(storage)


def linear(few: float, more: float, added: int) -> float:
    """What is `few` with n layers and `more` with n + 1, for so many layers on top of these."""
    return more + added * (more - few)


def linear_counts(few: Counts, more: Counts, added: int) -> Counts:
    """The same for counts."""

    def extend(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
        return {name: linear(one.get(name, 0), size, added) for name, size in other.items()}

    touched, launches = linear(few.touched, more.touched, added), linear(few.launches, more.launches, added)
    return Counts(extend(few.flops, more.flops), extend(few.moved, more.moved), touched, launches)
