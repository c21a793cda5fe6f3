"""Counts what a run allocates, computes and moves while it runs: every new storage, every product, every collective."""

import collections
import contextlib
import dataclasses
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

BLOCK = 512  # bytes; CUDA's allocator hands out multiples of it
# Collectives by what moves: the larger side of a gather or a reduction counts, once.
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
    holder: str


def _tensors(values) -> list[torch.Tensor]:
    """The tensors among some values and the lists among them; torch's own way to find them would take most of the time."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += _tensors(value)
    return found


class Ledger(TorchDispatchMode):
    """Notes `(moment, storage, place, bytes)` for whatever is allocated (or, negative, freed) while it is entered.

    A storage has a holder (of `pages.NAMES`) from its birth; when it turns out to be something else, as a gradient does,
    that counts for its whole life.
    """

    def __init__(self, vocabulary: int = 0):
        super().__init__()
        self.moment, self.place, self.holder = "load", "gpu", "rest"
        self.paused = False  # while a library only looks what shapes would come out
        self.vocabulary = vocabulary  # what ends in this size is of the loss
        self.events = []
        self.flops = collections.Counter()  # by dtype
        self.touched = 0  # bytes read and written by all that is no product, for the time they take
        self.moved = collections.Counter()  # bytes by kind
        self._storages = WeakIdKeyDictionary()
        self._resize = torch.UntypedStorage.resize_

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local part comes by in its turn
        result = function(*arguments, **keywords or {})
        if self.paused:
            return result
        if function.is_view:
            return result
        outputs, inputs = _tensors((result,)), _tensors(arguments)
        if keywords:
            inputs += _tensors(keywords.values())
        holder = None
        if function.namespace == "aten":
            if function is torch.ops.aten._to_copy.default and self.holder_of(inputs[0]) == "weights":
                holder = "gathered"
        elif function.namespace == "fsdp":
            self._of_fsdp(function.name(), arguments, outputs + inputs)
        elif kind := COLLECTIVES.get(function.name().split("::")[1]):
            self.moved[kind] += max((t.numel() * t.element_size() for t in outputs + inputs), default=0)
        for tensor in outputs:
            self.see(tensor, holder)
        if count := flop_registry.get(function._overloadpacket):
            self.flops[str(inputs[0].dtype)] += count(*arguments, **keywords or {}, out_val=result)
        elif function.namespace not in ("c10d", "prim") and not any(word in function.name() for word in ("empty", "_view")):
            self.touched += sum(t.numel() * t.element_size() for t in outputs + inputs)
        return result

    def _of_fsdp(self, name: str, arguments, tensors):
        for tensor in tensors:
            self.see(tensor)
            if self.holder_of(tensor) != "weights":
                self._storages[tensor.untyped_storage()].holder = "gradients" if "chunk_cat" in name else "gathered"

    def see(self, tensor: torch.Tensor, holder: str | None = None):
        """Notes the tensor's storage unless it is known."""
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        if holder is None:
            of_loss = self.vocabulary and tensor.dim() > 1 and self.vocabulary in (tensor.shape[-1], tensor.shape[-1] + 1)
            holder = "loss" if of_loss and self.holder == "activations" else self.holder
        entry = self._storages[storage] = Storage(0, self.place, holder)
        self._note(entry, storage.nbytes())
        weakref.finalize(storage, self._note, entry, 0).atexit = False

    def _note(self, entry: Storage, size: int):
        size = -(-size // BLOCK) * BLOCK
        if size != entry.size:
            self.events.append((self.moment, entry, entry.place, size - entry.size))
            entry.size = size

    def holder_of(self, tensor: torch.Tensor) -> str | None:
        entry = self._storages.get(tensor.untyped_storage())
        return entry and entry.holder

    def mark(self, tensor: torch.Tensor, holder: str | None = None, place: str | None = None):
        """Says what a tensor is for, and where it is from now on."""
        self.see(tensor)
        entry = self._storages[tensor.untyped_storage()]
        entry.holder = holder or entry.holder
        if place and place != entry.place:
            size = entry.size
            self._note(entry, 0)
            entry.place = place
            self._note(entry, size)

    def spike(self, size: int, holder: str):
        """Bytes on the GPU that were there for a moment."""
        entry = Storage(0, "gpu", holder)
        self._note(entry, size)
        self._note(entry, 0)

    def count(self) -> dict:
        """What was computed and moved since the last time."""
        counted = {"flops": dict(self.flops), "moved": dict(self.moved), "touched": self.touched}
        self.flops.clear()
        self.moved.clear()
        self.touched = 0
        return counted

    @contextlib.contextmanager
    def within(self, moment: str | None = None, holder: str | None = None, place: str | None = None):
        kept = self.moment, self.holder, self.place
        self.moment, self.holder, self.place = moment or self.moment, holder or self.holder, place or self.place
        try:
            yield
        finally:
            self.moment, self.holder, self.place = kept

    def __enter__(self):
        def resize(storage, size):
            self._resize(storage, size)
            if storage in self._storages:
                self._note(self._storages[storage], storage.nbytes())

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def timeline(self, place: str = "gpu"):
        """Yields `(moment, bytes now, bytes by holder)` after every event; the dictionary is the same one each time."""
        held, total = collections.Counter(), 0
        for moment, entry, where, change in self.events:
            if where == place:
                held[entry.holder] += change
                total += change
                yield moment, total, held

    def peaks(self, place: str = "gpu") -> dict[str, dict]:
        """For every moment its peak: `{"bytes": …, "by": {holder: bytes}}`."""
        peaks = {}
        for moment, total, held in self.timeline(place):
            if total > peaks.get(moment, {"bytes": -1})["bytes"]:
                peaks[moment] = {"bytes": total, "by": dict(held)}
        return peaks
