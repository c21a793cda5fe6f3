"""Extends what was recorded of a model with few layers to all of its layers.

If the layers of a model are alike, a run of it with one layer more records the same events, and at some places a block of events
once more: the new layer's. Two runs, with n and n + 1 layers, show where, and each block must follow an equal one, of the layer
before. In the run of the whole model, these blocks are repeated. Which of several equal storages an event frees, and the bytes of
what grows with the number of layers, are linear in the number of layers, and along the blocks.
"""

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

from planner.ledger import Counts, Event, Storage, combine_counts, in_order, rounded_up

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


class Recorded(NamedTuple):
    """An event."""

    change: Change
    storage: int  # a number of its storage
    held: int  # bytes before it, rounded up
    holds: int  # bytes after it, rounded up


class Recording(NamedTuple):
    """What a run of a model with so many layers recorded."""

    layers: int
    events: list[Recorded]
    live: list[tuple[int, tuple]]  # before the run: numbers and keys of storages, in the order of their allocation
    counts: list[Counts]
    sizes: list[int]  # other numbers that are linear in the number of layers


class Block(NamedTuple):
    """Events of `more` that are repeated for each layer: those of `copies` layers, `length` for each, before `end`."""

    end: int
    length: int
    copies: int
    missing: int  # events that `few` has less before `end`: it has one copy less of this block, and of those before it

    @property
    def start(self) -> int:
        return self.end - self.copies * self.length


class Place(NamedTuple):
    """Which storage an event changes."""

    key: Any  # see `key_of`; None: one that is new
    rank: int  # how many older storages with this key are allocated


class Line(NamedTuple):
    """The places of the same event for all layers."""

    key: Any
    first: int  # the rank in the first copy
    along: int  # how much more it is in each following copy
    per_layer: int  # how much more it is for each layer of the model

    def at(self, copy: int, added: int) -> Place:
        """The place in a copy, with so many layers on top of those of `more`; -1: of `few`."""
        return Place(self.key, self.first + copy * self.along + added * self.per_layer)


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
    held: collections.Counter = collections.Counter()
    asked: collections.Counter = collections.Counter()
    for event in events[:start]:
        held[event.storage] += event.change
        asked[event.storage] = event.asked
    names: dict[Storage, int] = {}
    recorded = []
    for event in in_order(events, start):
        storage = event.storage
        before = held[storage]
        after = before + event.change
        kind = (event.moment, event.place, storage.holder, storage.stream, storage.is_pinned, not before, not after)
        change = Change(kind, asked[storage] if before else 0, event.asked)
        recorded.append(Recorded(change, names.setdefault(storage, len(names)), before, after))
        held[storage] = after
        asked[storage] = event.asked
    live = []
    for key, storages in live_storages(events[:start]).items():
        for storage in storages:
            live.append((names.setdefault(storage, len(names)), key))
    return Recording(layers, recorded, live, counts, sizes)


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
    """The blocks in `more` that `few` has once less.

    Also the events of `more` whose bytes depend on the number of layers, each with its index in `few`.
    """
    ours = [event.change for event in few.events]
    theirs = [event.change for event in more.events]
    growth = more.layers / few.layers

    def grows(one: Change, two: Change) -> bool:
        """Whether two events differ in bytes only, as much as the number of layers allows."""
        if one.kind != two.kind:
            return False
        return one.before <= two.before <= growth * one.before and one.after <= two.after <= growth * one.after

    def count_alike(here: int, there: int) -> int:
        """How many events are alike from here on; if it is all of both, more than any other number."""
        count = 0
        for one, two in zip(ours[here:], theirs[there:], strict=False):
            if one != two and not grows(one, two):
                return count
            count += 1
        return count if len(ours) - here != len(theirs) - there else len(theirs)

    blocks: list[Block] = []
    growing = {}
    missing = 0  # so many events are in `theirs` and not in `ours`, up to here
    end = 0  # of the last block
    there = 0
    while there < len(theirs):
        here = there - missing
        if here < len(ours) and ours[here] == theirs[there]:
            there += 1
            continue
        longest = len(theirs) - len(ours) - missing
        lengths = [length for length in range(longest + 1) if theirs[there : there + length] == theirs[there - length : there]]
        length = max(lengths, key=lambda length: count_alike(here, there + length))
        if length:
            copies = 1
            while there - copies * length >= end and theirs[there - copies * length :][:length] == theirs[there:][:length]:
                copies += 1
            there += length
            missing += length
            end = there
            blocks.append(Block(end, length, copies, missing))
        elif here < len(ours) and grows(ours[here], theirs[there]):
            if ours[here].after != theirs[there].after:
                growing[there] = here
            there += 1
        else:
            raise Unlike(f"no block of events fits at {theirs[there].kind}")
    return blocks, growing


def places(recording: Recording, growing: dict[int, Any]) -> list[Place]:
    """The storage of every event.

    `growing`: keys of storages whose bytes depend on the number of layers, by the event that allocates them.
    """
    live: dict[Any, list[int]] = collections.defaultdict(list)
    keys: dict[int, Any] = {}
    for storage, key in recording.live:
        live[key].append(storage)
        keys[storage] = key
    found = []
    for index, event in enumerate(recording.events):
        place = Place(None, 0)
        if event.held:
            key = keys[event.storage]
            place = Place(key, live[key].index(event.storage))
            live[key].remove(event.storage)
        if event.holds:
            key = growing.get(index) or key_of(event.change, event.holds)
            keys[event.storage] = key
            live[key].append(event.storage)
        found.append(place)
    return found


def key_of(change: Change, size: int) -> tuple:
    moment, place, holder, *_ = change.kind
    return moment, place, holder, size


def extend(few: Recording, more: Recording, layers: int, live: dict[tuple, list[Storage]]) -> list[Event]:
    """The events of a model with so many layers. `live`: its storages before the run."""
    blocks, growing = find_blocks(few, more)
    writer = Writer(few, more, layers - more.layers, growing, live)
    index = 0
    missing = 0
    for found in blocks:
        block, lines = writer.turn(found, index)
        writer.write_once(index, block.start, missing)
        writer.write_block(block, lines)
        index = block.end
        missing = block.missing
    writer.write_once(index, len(more.events), missing)
    return writer.events


class Writer:
    """Writes events of the whole model, and follows which storages are allocated."""

    def __init__(
        self, few: Recording, more: Recording, added: int, growing: dict[int, int], live: dict[tuple, list[Storage]]
    ) -> None:
        """`added`: layers on top of those of `more`; `growing`: see `find_blocks`; `live`: see `extend`."""
        self.few = few.events
        self.more = more.events
        self.added = added
        self.keys = {there: ("growing", there) for there in growing}
        self.places = places(more, self.keys)
        self.places_in_few = places(few, {here: self.keys[there] for there, here in growing.items()})
        self.live: dict[Any, list[Storage]] = collections.defaultdict(list)
        self.sizes: collections.Counter = collections.Counter()  # bytes
        for key, storages in live.items():
            self.live[key] += storages
            for storage in storages:
                self.sizes[storage] = storage.size
        self.events: list[Event] = []

    def turn(self, block: Block, start: int) -> tuple[Block, list[Line]]:
        """A block that stands for the same repetition and has its places on lines.

        It can have fewer copies, as the first layers can be special, or begin some events earlier, but not before `start`.
        """
        for earlier in range(block.length):
            for copies in range(block.copies, 1, -1):
                turned = block._replace(end=block.end - earlier, copies=copies)
                if turned.start >= start and self.is_repeated(turned) and (lines := self.find_lines(turned)):
                    return turned, lines
        kind = self.more[block.end - 1].change.kind
        raise Unlike(f"the events of {kind} do not free what those of other layers do")

    def is_repeated(self, block: Block) -> bool:
        changes = [event.change for event in self.more[block.start : block.end]]
        return changes[block.length :] == changes[: -block.length]

    def find_lines(self, block: Block) -> list[Line] | None:
        """A line for each event of a block; None if the places of its copies are on none."""
        lines = []
        end_in_few = block.end - block.missing
        for start in range(block.start, block.start + block.length):
            seen = self.places[start : block.end : block.length]
            seen_in_few = self.places_in_few[start - block.missing + block.length : end_in_few : block.length]
            key, rank = seen[0]
            if key and block.copies < 3:  # any two numbers are on a line
                return None
            line = Line(key, rank, seen[1].rank - rank, rank - seen_in_few[0].rank)
            if seen != [line.at(copy, 0) for copy in range(block.copies)]:
                return None
            if seen_in_few != [line.at(copy, -1) for copy in range(block.copies - 1)]:
                return None
            lines.append(line)
        return lines

    def write_once(self, start: int, end: int, missing: int) -> None:
        """The events of `more` that are not repeated, from `start` to `end`. `few` has so many less before them."""
        for there in range(start, end):
            here = there - missing
            old = self.places_in_few[here]
            new = self.places[there]
            change = self.more[there].change
            if old.key != new.key:
                raise Unlike(f"events of {change.kind} free different storages")
            asked = linear(self.few[here].change.after, change.after, self.added)
            self.write(there, asked, Place(new.key, linear(old.rank, new.rank, self.added)))

    def write_block(self, block: Block, lines: list[Line]) -> None:
        """The events of a block, once for each layer."""
        for copy in range(block.copies + self.added):
            for index, line in enumerate(lines, block.start):
                if index in self.keys:
                    raise Unlike("a layer allocates more, the more layers there are")
                self.write(index, self.more[index].change.after, line.at(copy, self.added))

    def write(self, index: int, asked: int, place: Place) -> None:
        """An event like that of `more`, to `asked` bytes, of the storage at a place."""
        change = self.more[index].change
        after = self.more[index].holds
        moment, where, holder, stream, is_pinned, *_ = change.kind
        if place.key is None:
            storage = Storage(0, where, holder, stream, is_pinned)
        else:
            storages = self.live[place.key]
            if not 0 <= place.rank < len(storages):
                raise Unlike(f"there are {len(storages)} storages, and no {place} for an event of {change.kind}")
            storage = storages.pop(place.rank)
        if asked != change.after:
            if is_pinned:
                raise Unlike("pinned memory depends on the number of layers")
            after = rounded_up(asked)
        self.events.append(Event(moment, storage, where, after - self.sizes[storage], asked))
        self.sizes[storage] = after
        if after:
            self.live[self.keys.get(index) or key_of(change, after)].append(storage)


def linear(few: float, more: float, added: int) -> float:
    """What is `few` with n layers and `more` with n + 1, for so many layers on top of these."""
    return more + added * (more - few)


def linear_counts(few: Counts, more: Counts, added: int) -> Counts:
    """The same for counts."""
    return combine_counts(few, more, lambda one, other: linear(one, other, added))
