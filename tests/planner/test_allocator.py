"""PyTorch's caching allocator, by its rules: what it reserves, what it reuses, what it can give back."""

import random

from planner.allocator import MIB, replay

import pytest

pytestmark = pytest.mark.unit


def mib(*events, is_expandable=True) -> tuple[float, float]:
    """(reserved, needed) in MiB. An event is (name, MiB), or (name, stream, MiB)."""
    whole = [(event[0], event[1] if len(event) == 3 else "", int(event[-1] * MIB)) for event in events]
    reserved, needed = replay(whole, is_expandable)
    return reserved / MIB, needed / MIB


@pytest.mark.parametrize(("size", "expandable", "segments"), [(0.5, 2, 2), (1, 2, 2), (2, 20, 20), (11, 20, 12), (50.5, 60, 52)])
def test_first_allocation(size, expandable, segments):
    assert mib(("a", size)) == (expandable, expandable)
    assert mib(("a", size), is_expandable=False) == (segments, segments)


def test_freed_block_is_reused_and_split():
    assert mib(("a", 18), ("a", 0), ("b", 9), ("c", 9)) == (20, 20)
    # Of a large segment, less than 1 MiB is not cut off; of an expandable one it is.
    assert mib(("a", 20), ("a", 0), ("b", 19.5), ("c", 0.5), is_expandable=False)[0] == 22
    assert mib(("a", 19.5), ("b", 1.5), ("b", 0), ("a", 0), ("c", 38))[0] == 40


def test_neighbours_are_joined():
    events = [("a", 15), ("b", 15), ("c", 15), ("a", 0), ("b", 0), ("d", 30)]
    assert mib(*events)[0] == 60
    assert mib(*events, is_expandable=False)[0] == 16 * 3 + 30  # three segments have no neighbours


def test_end_of_an_expandable_segment_grows():
    assert mib(("a", 30), ("b", 30), ("b", 0), ("c", 40))[0] == 80
    # A hole in the middle is too small: the segment grows behind the last block.
    assert mib(("a", 30), ("b", 30), ("a", 0), ("c", 40))[0] == 100


def test_block_of_another_stream_is_not_reused():
    assert mib(("a", "gather", 40), ("a", "gather", 0), ("b", 40)) == (80, 40)
    assert mib(("a", "gather", 40), ("a", "gather", 0), ("b", "gather", 40)) == (40, 40)


def test_size_of_a_storage_changes():
    """FSDP frees the weights of a layer by resizing them to 0, and allocates them again."""
    assert mib(("a", 40), ("a", 0), ("a", 40), ("a", 20), ("b", 20)) == (40, 40)


@pytest.mark.parametrize("is_expandable", [True, False])
def test_bounds(is_expandable):
    """Never less than is allocated; what is freed can be used again."""
    generator, sizes, events, largest = random.Random(0), {}, [], 0
    for number in range(3000):
        if sizes and generator.random() < 0.5:
            name = generator.choice(sorted(sizes))
            del sizes[name]
            events.append((name, "", 0))
        else:
            sizes[number] = 512 * generator.randrange(1, 2 ** generator.randrange(1, 17))
            events.append((number, "", sizes[number]))
            largest = max(largest, sum(sizes.values()))
    reserved, needed = replay(events, is_expandable)
    assert largest <= needed <= reserved < 1.5 * largest
    renamed = [((name, "again"), stream, size) for name, stream, size in events]
    freed = [(name, "", 0) for name in sizes]
    assert replay([*events, *freed, *renamed], is_expandable)[0] == reserved
