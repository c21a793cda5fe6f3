"""PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp in 2.13), replayed without a GPU: what it reserves and needs.

It takes memory from CUDA in segments, cuts blocks out of them, and keeps what is freed for later allocations on the same stream.
Small allocations (up to 1 MiB) and large ones have segments of their own. With `expandable_segments:True`, which launch.sh sets,
each of these has one segment that grows. Before it runs out of memory, the allocator gives back what is free: whole segments, or
the free pages of expandable ones.
"""

import bisect
import collections
from collections.abc import Iterable, Iterator

MIB = 2**20
SMALL = MIB  # up to here an allocation is small
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # also the pages by which expandable segments grow
ROUNDED_FROM = 10 * MIB  # larger allocations get a segment of their own size, rounded up to 2 MiB
SMALLEST_BLOCK = 512


class Block:
    """A part of a segment, between two neighbours in it. Addresses count from 0 through all segments of a pool."""

    __slots__ = ("address", "before", "is_free", "next", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.is_free = True
        self.before: Block | None = None
        self.next: Block | None = None


class Pool:
    """The segments of a stream for small allocations, or for large ones."""

    def __init__(self, is_small: bool, is_expandable: bool) -> None:
        self.is_small = is_small
        self.is_expandable = is_expandable
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        self.reserved = 0  # bytes
        self.held = 0  # bytes that cannot be given back, because a block in them is in use
        self.free: list[tuple[int, int, Block]] = []  # by size and address
        self.last: Block | None = None  # the end of the expandable segment
        self.segments: list[tuple[int, int]] = []  # address and size of those that do not grow
        self.users: collections.Counter = collections.Counter()  # blocks in use, by the address of their page or segment

    def allocate(self, size: int) -> Block:
        """A free block of at least `size` bytes, split if it is larger; its pages are counted as held."""
        block = self._take(size) or self._grow(size)
        rest = block.size - size
        if rest >= SMALLEST_BLOCK and (self.is_small or self.is_expandable or rest > SMALL):
            block.size = size
            remaining = Block(block.address + size, rest)
            self._link(remaining, block.next)
            self._link(block, remaining)
            self._keep(remaining)
        block.is_free = False
        for address, length in self._pages(block):
            if not self.users[address]:
                self.held += length
            self.users[address] += 1
        return block

    def release(self, block: Block) -> None:
        """Frees a block, and joins it with free neighbours."""
        for address, length in self._pages(block):
            self.users[address] -= 1
            if not self.users[address]:
                self.held -= length
        before = block.before
        after = block.next
        if after is not None and after.is_free:
            self._drop(after)
            block.size += after.size
            self._link(block, after.next)
        if before is not None and before.is_free:
            self._drop(before)
            before.size += block.size
            self._link(before, block.next)
            block = before
        self._keep(block)

    def _take(self, size: int) -> Block | None:
        """The smallest free block that is large enough; the end of an expandable segment only if there is no other."""
        place = bisect.bisect_left(self.free, (size,))
        if place < len(self.free) and self.free[place][2] is self.last and place + 1 < len(self.free):
            place += 1
        return self.free.pop(place)[2] if place < len(self.free) else None

    def _grow(self, size: int) -> Block:
        """A new segment, or the end of the expandable one after it has grown."""
        if not self.is_expandable:
            segment = self.page
            if not self.is_small and size >= ROUNDED_FROM:
                segment = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
            self.segments.append((self.reserved, segment))
            self.reserved += segment
            return Block(self.reserved - segment, segment)
        end = self.last
        if end is not None and end.is_free:
            self._drop(end)
        else:
            end, before = Block(self.reserved, 0), end
            self._link(end, None)
            if before is not None:
                self._link(before, end)
        grown = -(-(size - end.size) // self.page) * self.page
        end.size += grown
        self.reserved += grown
        return end

    def _pages(self, block: Block) -> Iterator[tuple[int, int]]:
        """Address and size of the pages, or of the segment, that a block is in."""
        if self.is_expandable:
            first = block.address // self.page * self.page
            yield from ((address, self.page) for address in range(first, block.address + block.size, self.page))
        else:
            yield self.segments[bisect.bisect_right(self.segments, (block.address, self.reserved)) - 1]

    def _link(self, block: Block, after: Block | None) -> None:
        block.next = after
        if after is not None:
            after.before = block
        elif self.is_expandable:
            self.last = block

    def _keep(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self.free, (block.size, block.address, block))

    def _drop(self, block: Block) -> None:
        """Removes a block from the free ones."""
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]


def replay(events: Iterable[tuple[object, str, int]], is_expandable: bool = True) -> tuple[int, int]:
    """The most bytes that are reserved at once, if there is room for all; and how many of them are needed at least.

    Args:
        events: (what, stream, bytes) in the order in which they happen. `what` is any object that can be a key: it has so many
            bytes from now on, multiples of 512, and 0 after it is freed.
        is_expandable: with `expandable_segments:True`.
    """
    pools: dict[tuple[str, bool], Pool] = {}
    blocks: dict[object, tuple[Pool, Block]] = {}
    needed = 0
    for what, stream, size in events:
        if what in blocks:
            pool, block = blocks.pop(what)
            pool.release(block)
        if size:
            is_small = size <= SMALL
            pool = pools.setdefault((stream, is_small), Pool(is_small, is_expandable))
            blocks[what] = pool, pool.allocate(size)
            needed = max(needed, sum(pool.held for pool in pools.values()))
    return sum(pool.reserved for pool in pools.values()), needed
