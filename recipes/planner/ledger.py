"""Counts what a run allocates, computes and moves: every new storage, every matrix product, every collective."""

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from harness.compat.guards import changes, expected_names
from planner.attention import flops_of_solve, flops_of_varlen, flops_of_varlen_backward

import torch
from torch.distributed.tensor import DTensor

with expected_names():
    from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward  # noqa: F401, makes the operators below
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry
    from torch.utils.weak import WeakIdKeyDictionary

VARLEN = torch.ops.torch_attn._varlen_attn
VARLEN_BACKWARD = torch.ops.torch_attn._varlen_attn_backward
BLOCK = 512  # bytes; CUDA's allocator rounds up to multiples of it
FOUND_LATER = ("activations", "loss", "rest", "gathered", "gradients")  # holders of what FSDP gathers or reduces, at first
LARGER = 16  # times as large a micro-batch, in `Ledger.highest`
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
    is_pinned: bool = False  # host memory that the GPU can reach, which PyTorch rounds up to powers of two
    is_unwritten: bool = False  # in a fused layer: computed within a kernel, and not written to memory so far
    is_product: bool = False  # the output of a matrix product or of attention
    sources: set[torch.UntypedStorage] = dataclasses.field(default_factory=set)  # from which an unwritten one is computed
    casts: weakref.WeakValueDictionary | None = None  # in fused layers, which make none twice


class Event(NamedTuple):
    """A change of a storage's size."""

    moment: str
    storage: Storage
    place: str
    change: int  # bytes, rounded up to BLOCK
    asked: int  # bytes of the storage from now on, before they are rounded up


class Held(NamedTuple):
    """Bytes by holder after an allocation."""

    moment: str
    place: str
    by_holder: dict[str, int]


@dataclasses.dataclass
class Peak:
    """The largest memory in one moment of a run."""

    bytes: int
    by_holder: dict[str, int]


@dataclasses.dataclass
class Counts:
    """What was computed and moved."""

    flops: dict[str, float] = dataclasses.field(default_factory=dict)  # by dtype
    moved: dict[str, float] = dataclasses.field(default_factory=dict)  # bytes by kind of collective or copy
    touched: float = 0  # bytes that all other operators read and write on the GPU
    launches: float = 0  # kernels that the host starts on the GPU


class Ledger(TorchDispatchMode):
    """Records every allocation, and every release as a negative one, while it is entered.

    A storage has a holder from its allocation; when it turns out to be something else, as a gradient does, the new holder
    counts for its whole life.
    """

    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__()
        self.moment = "load"
        self.place = "gpu"
        self.holder = "rest"  # the labels of new allocations, see `within`
        self.paused = False  # if True, nothing is recorded
        self.is_bound_by_memory = False  # if True, the bytes of matrix products count: a token of each row has few FLOPs
        self.is_fused = False  # if True, operators between two matrix products are one kernel, see `planner.fused`
        self.weight_shapes: set[tuple] = set()  # of fused layers, `squeezed`; a tensor of such a shape is a weight or a gradient
        self._read: set[Storage] = set()  # what the fused kernel has read so far
        self.pinned_limit: int | None = None  # bytes; larger pinned allocations are not rounded up
        self.vocabulary = vocabulary  # a tensor whose last dimension has this size belongs to the loss
        self.events: list[Event] = []
        self.flops: collections.Counter = collections.Counter()  # this one and the next three: see `Counts`
        self.moved: collections.Counter = collections.Counter()
        self.touched = self.launches = 0
        # For some operators, a function that counts the FLOPs of a call.
        self.flop_counters: dict[Any, Callable[..., int]] = flop_registry | {
            VARLEN: flops_of_varlen,
            VARLEN_BACKWARD: flops_of_varlen_backward,
            torch.ops.aten.linalg_solve_triangular: flops_of_solve,
        }
        # For some operators, a function that counts the bytes which the CUDA kernel allocates, and releases at its end.
        self.workspaces: dict[Any, Callable[..., int]] = {}
        self.restore_resize: Callable[[], None] | None = None  # while the ledger is entered: undoes `watch_resize`
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs an operator on fake tensors, and counts its outputs, its FLOPs, and the bytes that it moves or touches."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensor comes next
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default
        if self.is_fused and is_cast:
            earlier = self._casts_of(args[0]).get(key_of_cast(args[0], kwargs))
            if earlier is not None:
                return earlier.detach()
        result = func(*args, **kwargs)
        is_view = func.is_view or func is torch.ops.aten._unsafe_view.default
        if self.paused or is_view or func.namespace == "prim":
            return result
        outputs = tensors_in((result,))
        inputs = tensors_in((*args, *kwargs.values()))
        is_product = func.namespace != "aten" or func.overloadpacket in self.flop_counters
        is_within_kernel = self.is_fused and not is_product and "empty" not in func.name()
        if self.is_fused and is_product:
            for tensor in inputs:
                self.write(tensor)
        if func.namespace == "fsdp":
            self._label_fsdp(func.name(), outputs + inputs)
        holder = None
        if is_cast and self.holder_of(inputs[0]) == "weights":
            holder = "gathered"
        for tensor in outputs:
            is_unwritten = is_within_kernel and squeezed(tensor) not in self.weight_shapes
            entry = self.see(tensor, holder, is_unwritten)
            entry.is_product |= is_product
        if count_workspace := self.workspaces.get(func.overloadpacket):
            self.spike(count_workspace(*args), holder="activations")
        if is_within_kernel:
            self._count_kernel(inputs, outputs)
            for tensor in outputs:
                self._keep_sources(tensor, inputs)
            if is_cast:
                self._casts_of(args[0])[key_of_cast(args[0], kwargs)] = result
        else:
            self._count(func, args, kwargs, result, outputs + inputs)
        return result

    def _label_fsdp(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Sets what the tensors of one of FSDP's own operators are for: gathered weights, or gradients to reduce."""
        holder = "gathered"
        if "chunk_cat" in name:
            holder = "gradients"
        for tensor in tensors:
            entry = self.see(tensor)
            if entry.holder in FOUND_LATER:
                entry.holder = holder

    def _count(self, func: Any, args: tuple, kwargs: dict, result: Any, tensors: list[torch.Tensor]) -> None:
        """Counts the bytes of a collective, and the FLOPs or the touched bytes of an operator."""
        name = func.name()
        namespace = func.namespace
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        kind = COLLECTIVES.get(name.split("::")[1])
        if kind and namespace not in ("aten", "fsdp"):
            self.moved[kind] += max(sizes, default=0)
        if count_flops := self.flop_counters.get(func.overloadpacket):
            first = tensors_in(args)[0]
            self.flops[str(first.dtype)] += count_flops(*args, **kwargs, out_val=result)
            self.launches += 1
            if self.is_bound_by_memory:
                self.touched += sum(sizes)
        elif self.place == "gpu" and namespace not in ("c10d", "prim") and "empty" not in name:
            self.touched += sum(sizes)
            self.launches += 1

    def _count_kernel(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Counts the bytes of an operator that is a part of a fused kernel: new inputs, and outputs that are in memory."""
        for tensor in inputs:
            entry = self.see(tensor)
            if not entry.is_unwritten and entry not in self._read:
                self._read.add(entry)
                self.touched += tensor.nbytes
        for tensor in outputs:
            if not self.see(tensor).is_unwritten:
                self.touched += tensor.nbytes
                self.launches += 1

    def _casts_of(self, tensor: torch.Tensor) -> weakref.WeakValueDictionary:
        """The casts of a tensor's storage in fused layers, which make none twice."""
        entry = self.see(tensor)
        if entry.casts is None:
            entry.casts = weakref.WeakValueDictionary()
        return entry.casts

    def _keep_sources(self, tensor: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """Keeps that in memory from which a backward pass computes an unwritten tensor again, or writes it if it is smaller."""
        entry = self.see(tensor)
        if not entry.is_unwritten:
            return
        for source in inputs:
            storage = source.untyped_storage()
            of_source = self._storages.get(storage)
            if of_source and of_source.is_unwritten:
                entry.sources |= of_source.sources
            else:
                entry.sources.add(storage)
        products = []
        for storage in entry.sources:
            of_source = self._storages.get(storage)
            if of_source and of_source.is_product:
                products.append(storage.nbytes())
        if torch.is_grad_enabled() and len(products) > 1 and sum(products) > tensor.untyped_storage().nbytes():
            self.write(tensor)  # such as the sum of a layer and its adapter

    def write(self, tensor: torch.Tensor) -> None:
        """Ends a fused kernel, which writes this tensor if no kernel has."""
        self._read.clear()
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage)
        if entry and entry.is_unwritten:
            size = storage.nbytes()
            entry.is_unwritten = False
            entry.sources.clear()
            self._record(entry, size)
            self.touched += size
            self.launches += 1

    def see(self, tensor: torch.Tensor, holder: str | None = None, is_unwritten: bool = False) -> Storage:
        """Records a tensor's storage unless it is known; returns its entry. `is_unwritten`: it takes no memory until `write`."""
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return self._storages[storage]
        if holder is None:
            holder = self._holder_of_new(tensor)
        entry = Storage(0, self.place, holder, is_unwritten=is_unwritten)
        self._storages[storage] = entry
        if not is_unwritten:
            self._record(entry, storage.nbytes())
        weakref.finalize(storage, self._record, entry, 0).atexit = False
        return entry

    def _holder_of_new(self, tensor: torch.Tensor) -> str:
        """The label of the block around, but for logits and what follows from them."""
        size = self.vocabulary
        if not size or tensor.dim() < 2:
            return self.holder
        if self.holder == "activations" and tensor.shape[-1] in (size, size + 1):
            return "loss"
        if self.holder == "loss" and tensor.shape[0] == size:  # it does not grow with the micro-batch
            return "gradients"
        return self.holder

    def _record(self, entry: Storage, size: int) -> None:
        asked = size
        if entry.is_pinned and size and (self.pinned_limit is None or size <= self.pinned_limit):
            size = 1 << (size - 1).bit_length()
        size = rounded_up(size)
        if size != entry.size:
            self.events.append(Event(self.moment, entry, entry.place, size - entry.size, asked))
            entry.size = size

    def holder_of(self, tensor: torch.Tensor) -> str | None:
        entry = self._storages.get(tensor.untyped_storage())
        if entry:
            return entry.holder
        return None

    def mark(self, tensor: torch.Tensor, holder: str | None = None, place: str | None = None) -> None:
        """Sets what a tensor is for, and where it is from now on."""
        with self.within(place=place):
            entry = self.see(tensor)
        if holder:
            entry.holder = holder
        if place and place != entry.place:
            size = entry.size
            self._record(entry, 0)
            entry.place = place
            self._record(entry, size)

    def pin(self, tensor: torch.Tensor) -> None:
        """Makes the memory of a tensor on the host pinned memory."""
        entry = self.see(tensor)
        entry.is_pinned = True
        self._record(entry, tensor.untyped_storage().nbytes())

    def spike(self, size: int, holder: str) -> None:
        """Records bytes on the GPU that are allocated and released at once."""
        entry = Storage(0, "gpu", holder)
        self._record(entry, size)
        self._record(entry, 0)

    def take_counts(self) -> Counts:
        """What was computed and moved since the last call, and begins to count from zero."""
        counts = Counts(dict(self.flops), dict(self.moved), self.touched, self.launches)
        self.flops.clear()
        self.moved.clear()
        self.touched = self.launches = 0
        return counts

    @contextlib.contextmanager
    def within(self, moment: str | None = None, holder: str | None = None, place: str | None = None) -> Iterator[None]:
        """Labels what is allocated within the block: the phase of the run, what it is for (`holder`), and on which memory
        (`place`). None keeps the label of the block around it."""
        before = self.moment, self.holder, self.place, self.is_fused
        self.moment = moment or self.moment
        self.holder = holder or self.holder
        self.place = place or self.place
        try:
            yield
        finally:
            self.moment, self.holder, self.place, self.is_fused = before

    def __enter__(self) -> "Ledger":
        self.restore_resize = watch_resize(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.restore_resize()
        return super().__exit__(*error)

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage in self._storages:
            self._record(self._storages[storage], storage.nbytes())

    def highest(self, start: int = 0) -> dict[tuple, Held]:
        """What is held after the largest allocation of each kind, of the events from `start` on.

        A kind: the part of a moment without another one in between (such as the backward pass of one micro-batch), place, holder
        and bytes. Of each two, which can be the same: the largest one, and the one that would be with a much larger micro-batch.
        """
        found: dict[tuple, Held] = {}
        sizes: dict[tuple, int] = {}
        held: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        part = 0
        moment = ""
        for number, event in enumerate(self.events):
            holders = held[event.place]
            holders[event.storage.holder] += event.change
            if number < start or event.change < 0:
                continue
            part += event.moment != moment
            moment = event.moment
            now = sum(holders.values())
            for more in (0, LARGER * growing_bytes(holders)):
                kind = (part, event.place, event.storage.holder, event.asked, bool(more))
                size = now + more
                if size > sizes.get(kind, -1):
                    sizes[kind] = size
                    found[kind] = Held(moment, event.place, dict(holders))
        return found

    def peaks(self, place: str = "gpu") -> dict[str, Peak]:
        """The peak of every moment."""
        return peaks_of(self.highest().values(), place)

    def curve(self, points: int = 1500) -> list[tuple[str, dict[str, int]]]:
        """(moment, bytes by holder) on the GPU over the simulation, the largest of each of at most `points` stretches."""
        length = len(self.events) // points + 1
        largest: dict[int, tuple[str, dict[str, int]]] = {}
        tops: collections.Counter = collections.Counter()
        held: collections.Counter = collections.Counter()
        for number, event in enumerate(self.events):
            if event.place == "gpu":
                held[event.storage.holder] += event.change
                stretch = number // length
                size = sum(held.values())
                if size > tops[stretch]:
                    tops[stretch] = size
                    largest[stretch] = event.moment, dict(held)
        return list(largest.values())


def growing_bytes(by_holder: dict[str, int]) -> int:
    """Bytes that grow with the micro-batch."""
    return by_holder.get("activations", 0) + by_holder.get("loss", 0)


def peaks_of(found: Iterable[Held], place: str) -> dict[str, Peak]:
    """The peak of every moment."""
    peaks: dict[str, Peak] = {}
    for held in found:
        if held.place != place:
            continue
        size = sum(held.by_holder.values())
        earlier = peaks.get(held.moment)
        if earlier is None or size > earlier.bytes:
            peaks[held.moment] = Peak(size, held.by_holder)
    return peaks


def hull_of(found: Iterable[Held]) -> list[tuple[int, int]]:
    """(bytes that do not grow with the micro-batch, bytes that do) on the GPU, for the moments that can be the largest."""
    pairs = set()
    for held in found:
        if held.place == "gpu" and held.moment not in ("load", "first step"):
            growing = growing_bytes(held.by_holder)
            fixed = sum(held.by_holder.values()) - growing
            pairs.add((fixed, growing))
    hull: list[tuple[int, int]] = []
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


def key_of_cast(tensor: torch.Tensor, options: dict) -> tuple:
    """Equal for casts of a storage that have the same result."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), *sorted(options.items())


def squeezed(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape without dimensions of size 1: a sum that is the gradient of a bias or a norm can have some."""
    return tuple(size for size in tensor.shape if size != 1)


def rounded_up(size: int) -> int:
    """Bytes of the blocks that CUDA's allocator hands out."""
    return -(-size // BLOCK) * BLOCK


def tensors_in(values: Iterable) -> list[torch.Tensor]:
    """The tensors among some values and the lists among them; torch's own function for it would take most of the time."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += tensors_in(value)
    return found


def counts_of_step(parts: list[Counts], accumulation: int) -> Counts:
    """The counts of a step of `accumulation` micro-batches, from those of the last one, or of the first and the last.

    What crosses replicas does so once per step, and the first micro-batch adds no gradients on the host. With two, a micro-batch
    in between does what both do: it leaves out what only the first gathers, or only the last reduces.
    """
    first = parts[0]
    last = parts[-1]
    has_one = len(parts) == 1

    def add(of_first: float, of_last: float) -> float:
        if has_one:
            return of_last * accumulation
        return of_first + of_last + (accumulation - 2) * min(of_first, of_last)

    counts = combine_counts(first, last, add)
    if has_one:
        for name in counts.moved.keys() & {"all_reduced", "broadcast"}:
            counts.moved[name] = last.moved[name]
        if "added_on_host" in counts.moved:
            counts.moved["added_on_host"] = last.moved["added_on_host"] * (accumulation - 1)
    return counts


def add_counts(counts: Counts, others: Counts, times: float) -> Counts:
    """`counts`, and `others` so many times."""
    return combine_counts(counts, others, lambda one, other: one + times * other)


def combine_counts(one: Counts, other: Counts, combine: Callable[[float, float], float]) -> Counts:
    """Counts whose every number is what `combine` makes of those of two others."""

    def combine_all(sizes: dict[str, float], others: dict[str, float]) -> dict[str, float]:
        return {name: combine(sizes.get(name, 0), others.get(name, 0)) for name in sizes | others}

    flops = combine_all(one.flops, other.flops)
    moved = combine_all(one.moved, other.moved)
    touched = combine(one.touched, other.touched)
    launches = combine(one.launches, other.launches)
    return Counts(flops, moved, touched, launches)
