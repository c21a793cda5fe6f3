"""Counts what a run allocates, computes and moves: every new storage, every matrix product, every collective.

The second part compares the result with arithmetic on shapes, and adds up micro-batches to a step. The third replays the
allocations with the rules of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp in 2.13), without a GPU: it takes
memory from CUDA in segments, cuts blocks out of them, and keeps what is freed for later allocations on the same stream. Small
allocations (up to 1 MiB) and large ones have segments of their own. With `expandable_segments:True`, which launch.sh sets, each
of these has one segment that grows. Before it runs out of memory, the allocator gives back what is free: whole segments, or the
free pages of expandable ones.
"""

import bisect
import collections
import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from harness.compat.guards import changes, expected_names

import torch
from torch.distributed.tensor import DTensor

with expected_names():
    from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward  # noqa: F401, makes the operators below
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import _offsets_to_lengths, flop_registry
    from torch.utils.weak import WeakIdKeyDictionary

VARLEN, VARLEN_BACKWARD = torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward
BLOCK = 512  # bytes; CUDA's allocator rounds up to multiples of it
# Of PyTorch's caching allocator
MIB = 2**20
SMALL = MIB  # up to here an allocation is small
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB  # also the pages by which expandable segments grow
ROUNDED_FROM = 10 * MIB  # larger allocations get a segment of their own size, rounded up to 2 MiB
SMALLEST_BLOCK = 512
# Kinds of collectives by operator. The larger side of a gather or a reduction counts, once.
COLLECTIVES = {
    "_allgather_base_": "gathered",
    "allgather_": "gathered",
    "allgather_into_tensor_coalesced_": "gathered",
    "all_gather_into_tensor": "gathered",
    "_reduce_scatter_base_": "reduced",
    "reduce_scatter_": "reduced",
    "allreduce_": "all_reduced",
    "all_reduce": "all_reduced",
    "broadcast_": "broadcast",
}


@dataclasses.dataclass(slots=True, eq=False)
class Storage:
    size: int  # bytes
    place: str  # "gpu" or "host"
    holder: str  # what it is for: weights, gathered, gradients, optimizer, activations, loss, rest
    stream: str = ""  # of CUDA, if it is not the one that computes; a freed block is reused on its own stream only
    is_pinned: bool = False  # host memory that the GPU can reach, which PyTorch rounds up to powers of two


@dataclasses.dataclass
class Peak:
    """The largest memory in one moment of a run."""

    bytes: int
    by_holder: dict[str, int]


@dataclasses.dataclass
class Counts:
    """What was computed and moved."""

    flops: dict[str, float]  # by dtype
    moved: dict[str, float]  # bytes by kind of collective or copy
    touched: float  # bytes that all other operators read and write on the GPU


class Ledger(TorchDispatchMode):
    """Records every allocation, and every release as a negative one, while it is entered.

    A storage has a holder from its allocation; when it turns out to be something else, as a gradient does, the new holder
    counts for its whole life.
    """

    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__()
        self.moment, self.place, self.holder = "load", "gpu", "rest"  # the labels of new allocations, see `within`
        self.paused = False  # if True, nothing is recorded
        self.pinned_limit: int | None = None  # bytes; larger pinned allocations are not rounded up
        self.vocabulary = vocabulary  # a tensor whose last dimension has this size belongs to the loss
        self.events: list[tuple[str, Storage, str, int]] = []  # moment, storage, place, bytes
        self.flops: collections.Counter = collections.Counter()  # this one and the next two: see `Counts`
        self.moved: collections.Counter = collections.Counter()
        self.touched = 0
        # For some operators, a function that counts the FLOPs of a call.
        self.flop_counters: dict[Any, Callable[..., int]] = flop_registry | {
            VARLEN: flops_of_varlen,
            VARLEN_BACKWARD: flops_of_varlen_backward,
        }
        # For some operators, a function that counts the bytes which the CUDA kernel allocates, and releases at its end.
        self.workspaces: dict[Any, Callable[..., int]] = {}
        self.restore_resize: Callable[[], None] | None = None  # while the ledger is entered: undoes `watch_resize`
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs an operator on fake tensors, and counts its outputs, its FLOPs, and the bytes that it moves or touches."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensor comes next
        result = func(*args, **kwargs or {})
        if self.paused or func.is_view:
            return result
        outputs, inputs = tensors_in((result,)), tensors_in(args)
        if kwargs:
            inputs += tensors_in(kwargs.values())
        name, namespace = func.name(), func.namespace
        holder = None
        if namespace == "aten":
            if func is torch.ops.aten._to_copy.default and self.holder_of(inputs[0]) == "weights":
                holder = "gathered"
        elif namespace == "fsdp":
            for tensor in outputs + inputs:
                self.see(tensor)
                if self.holder_of(tensor) != "weights":
                    of_fsdp = "gradients" if "chunk_cat" in name else "gathered"
                    entry = self._storages[tensor.untyped_storage()]
                    entry.holder = of_fsdp
                    if "all_gather_copy_in" in name:
                        entry.stream = "all-gather"
        elif kind := COLLECTIVES.get(name.split("::")[1]):
            self.moved[kind] += max((tensor.numel() * tensor.element_size() for tensor in outputs + inputs), default=0)
        for tensor in outputs:
            self.see(tensor, holder)
        if count_workspace := self.workspaces.get(func.overloadpacket):
            self.spike(count_workspace(*args), holder="activations")
        if count_flops := self.flop_counters.get(func.overloadpacket):
            self.flops[str(inputs[0].dtype)] += count_flops(*args, **kwargs or {}, out_val=result)
        elif self.place == "gpu" and namespace not in ("c10d", "prim") and "empty" not in name and "_view" not in name:
            self.touched += sum(tensor.numel() * tensor.element_size() for tensor in outputs + inputs)
        return result

    def see(self, tensor: torch.Tensor, holder: str | None = None) -> None:
        """Records a tensor's storage unless it is known."""
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        if holder is None:
            is_logits = self.vocabulary and tensor.dim() > 1 and self.vocabulary in (tensor.shape[-1], tensor.shape[-1] + 1)
            holder = "loss" if is_logits and self.holder == "activations" else self.holder
        entry = self._storages[storage] = Storage(0, self.place, holder)
        self._record(entry, storage.nbytes())
        weakref.finalize(storage, self._record, entry, 0).atexit = False

    def _record(self, entry: Storage, size: int) -> None:
        if entry.is_pinned and size and (self.pinned_limit is None or size <= self.pinned_limit):
            size = 1 << (size - 1).bit_length()
        size = -(-size // BLOCK) * BLOCK
        if size != entry.size:
            self.events.append((self.moment, entry, entry.place, size - entry.size))
            entry.size = size

    def holder_of(self, tensor: torch.Tensor) -> str | None:
        entry = self._storages.get(tensor.untyped_storage())
        return entry and entry.holder

    def mark(self, tensor: torch.Tensor, holder: str | None = None, place: str | None = None) -> None:
        """Sets what a tensor is for, and where it is from now on."""
        self.see(tensor)
        entry = self._storages[tensor.untyped_storage()]
        entry.holder = holder or entry.holder
        if place and place != entry.place:
            size = entry.size
            self._record(entry, 0)
            entry.place = place
            self._record(entry, size)

    def pin(self, tensor: torch.Tensor) -> None:
        """Makes the memory of a tensor on the host pinned memory."""
        self.see(tensor)
        entry = self._storages[tensor.untyped_storage()]
        entry.is_pinned = True
        self._record(entry, tensor.untyped_storage().nbytes())

    def spike(self, size: int, holder: str) -> None:
        """Records bytes on the GPU that are allocated and released at once."""
        entry = Storage(0, "gpu", holder)
        self._record(entry, size)
        self._record(entry, 0)

    def take_counts(self) -> Counts:
        """What was computed and moved since the last call, and begins to count from zero."""
        counts = Counts(dict(self.flops), dict(self.moved), self.touched)
        self.flops.clear()
        self.moved.clear()
        self.touched = 0
        return counts

    @contextlib.contextmanager
    def within(self, moment: str | None = None, holder: str | None = None, place: str | None = None) -> Iterator[None]:
        """Labels what is allocated within the block: the phase of the run, what it is for (`holder`), and on which memory
        (`place`). None keeps the label of the block around it."""
        before = self.moment, self.holder, self.place
        self.moment, self.holder, self.place = moment or self.moment, holder or self.holder, place or self.place
        try:
            yield
        finally:
            self.moment, self.holder, self.place = before

    def __enter__(self) -> "Ledger":
        self.restore_resize = watch_resize(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.restore_resize()
        return super().__exit__(*error)

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            self._record(self._storages[storage], storage.nbytes())

    def timeline(self, place: str = "gpu") -> Iterator[tuple[str, int, collections.Counter]]:
        """Yields (moment, bytes, bytes by holder) after every event; the counter is the same object each time."""
        held, total = collections.Counter(), 0
        for moment, entry, where, change in self.events:
            if where == place:
                held[entry.holder] += change
                total += change
                yield moment, total, held

    def sizes(self) -> Iterator[tuple[Storage, str, int]]:
        """Yields (storage, its stream, its bytes on the GPU from now on), in order; 0 bytes when it is freed."""
        sizes = collections.Counter()
        for _, entry, place, change in self.events:
            if place == "gpu":
                sizes[entry] += change
                yield entry, entry.stream, sizes[entry]

    def peaks(self, place: str = "gpu") -> dict[str, Peak]:
        """The peak of every moment."""
        peaks = {}
        for moment, total, held in self.timeline(place):
            if moment not in peaks or total > peaks[moment].bytes:
                peaks[moment] = Peak(total, dict(held))
        return peaks

    def curve(self, points: int = 1500) -> list[tuple[str, dict[str, int]]]:
        """(moment, bytes by holder) over the simulation, the largest of each of at most `points` stretches."""
        stretch, curve, largest = max(1, sum(1 for _ in self.timeline()) // points), [], None
        top = -1
        for number, (moment, total, held) in enumerate(self.timeline()):
            if total > top:
                top, largest = total, (moment, dict(held))
            if number % stretch == stretch - 1:
                curve.append(largest)
                top, largest = -1, None
        return curve + ([largest] if largest else [])

    def hull(self) -> list[tuple[int, int]]:
        """(bytes that do not grow with the micro-batch, bytes that do), for the moments that can be the largest."""
        pairs = set()
        for moment, total, held in self.timeline():
            if moment not in ("load", "first step"):
                growing = held["activations"] + held["loss"]
                pairs.add((total - growing, growing))
        hull = []
        for fixed, growing in sorted(pairs, reverse=True):
            if not hull or growing > hull[-1][1]:
                hull.append((fixed, growing))
        return hull


@changes("torch:UntypedStorage.resize_")
def watch_resize(ledger: Ledger) -> Callable[[], None]:
    """Makes `UntypedStorage.resize_` tell the ledger; returns what restores it. FSDP2 frees weights by resizing them to 0.

    Upstream: no issue: dispatch modes do not see storages.
    Checked with: torch 2.13.0.
    Remove when: they do.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        original(storage, size)
        ledger.resized(storage)

    def restore() -> None:
        torch.UntypedStorage.resize_ = original

    torch.UntypedStorage.resize_ = resize
    return restore


def tensors_in(values: Iterable) -> list[torch.Tensor]:
    """The tensors among some values and the lists among them; torch's own function for it would take most of the time."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += tensors_in(value)
    return found


def flops_of_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    *options: Any,
    **out_val: torch.Tensor,
) -> int:
    """FLOPs of FlashAttention over documents: two products for every pair of a token and one that it attends to.

    torch's own formula counts all pairs of a document, also those that a causal mask leaves out.
    """
    # options: ends of the keys' documents, longest document of queries and of keys, is_causal, scale, window, …
    longest, window = options[1], options[5]
    return 4 * query.shape[1] * query.shape[2] * pairs_in_documents(ends, longest, window)


def flops_of_varlen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    ends: torch.Tensor,
    *options: Any,
    **out_val: torch.Tensor,
) -> int:
    """The scores once more, and two products for each of their two factors."""
    longest, window = options[1], options[-1]
    return 10 * query.shape[1] * query.shape[2] * pairs_in_documents(ends, longest, window)


def pairs_in_documents(ends: torch.Tensor, longest: int, window: list[int]) -> int:
    """How often a token attends to one of its document, with a window of so many tokens before and after it (-1: all).

    If the tensor is fake, all documents have the length of the longest, as in a simulated batch.
    """
    pairs = 0
    for tokens in _offsets_to_lengths(ends, longest):
        before, after = (tokens - 1 if limit < 0 else min(limit, tokens - 1) for limit in window)
        # The first tokens of a document have fewer before them, the last fewer after them.
        pairs += tokens * (1 + before + after) - (before * (before + 1) + after * (after + 1)) // 2
    return pairs


Shapes = dict[str, tuple[tuple[int, ...], int, bool]]  # name: shape, bytes per element, trained or not


def shapes_of(model: torch.nn.Module) -> Shapes:
    """The shapes of all parameters, before sharding."""
    return {name: (tuple(w.shape), w.element_size(), w.requires_grad) for name, w in model.named_parameters()}


def expected_bytes(shapes: Shapes, shards: int, upcast: bool) -> dict[str, int]:
    """Bytes on one process. FSDP2 cuts the first dimension, rounded up; with `upcast` trained weights are float32."""
    weights = trained = 0
    for shape, element_size, is_trained in shapes.values():
        elements = math.ceil(shape[0] / shards) * math.prod(shape[1:]) if shape else 1
        size = elements * (4 if upcast and is_trained else element_size)
        weights += size
        trained += size if is_trained else 0
    return {"weights": weights, "gradients": trained, "optimizer": 2 * trained}


@changes("torch:UntypedStorage._cdata")
def check_bytes(what: str, tensors: Iterable[torch.Tensor], expected: int) -> None:
    """Raises RuntimeError unless `tensors` hold `expected` bytes; tensors at the same place count once.

    The address of a storage is private, and a fake storage has no `data_ptr`.
    Upstream: no issue: there is no public name.
    Checked with: torch 2.13.0.
    Remove when: there is one.
    """
    held = sum({(t.untyped_storage()._cdata, t.storage_offset()): t.nbytes for t in tensors if t.numel()}.values())
    if held != expected:
        raise RuntimeError(
            f"the simulation holds {held:,} bytes of {what}, but the shapes give {expected:,}: something was not simulated as it "
            "runs, so there is no plan"
        )


def counts_of_step(parts: list[Counts], accumulation: int) -> Counts:
    """The counts of a step of `accumulation` micro-batches, from those of the last one, or of the first and the last.

    What crosses replicas does so once per step, and the first micro-batch adds no gradients on the host. With two, a micro-batch
    in between does what both do: it leaves out what only the first gathers, or only the last reduces.
    """
    first, last = parts[0], parts[-1]

    def add(of_first: float, of_last: float) -> float:
        if len(parts) == 1:
            return of_last * accumulation
        return of_first + of_last + (accumulation - 2) * min(of_first, of_last)

    flops = {name: add(first.flops.get(name, 0), last.flops.get(name, 0)) for name in first.flops | last.flops}
    moved = {}
    for name in first.moved | last.moved:
        if len(parts) == 1 and name in ("all_reduced", "broadcast"):
            moved[name] = last.moved[name]
        elif len(parts) == 1 and name == "added_on_host":
            moved[name] = last.moved[name] * (accumulation - 1)
        else:
            moved[name] = add(first.moved.get(name, 0), last.moved.get(name, 0))
    return Counts(flops, moved, add(first.touched, last.touched))


class Block:
    """A part of a segment, between two neighbours in it. Addresses count from 0 through all segments of a pool."""

    __slots__ = ("address", "before", "is_free", "next", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.is_free = address, size, True
        self.before: Block | None = None
        self.next: Block | None = None


class Pool:
    """The segments of a stream for small allocations, or for large ones."""

    def __init__(self, is_small: bool, is_expandable: bool) -> None:
        self.is_small, self.is_expandable = is_small, is_expandable
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
        before, after = block.before, block.next
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
