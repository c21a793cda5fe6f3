"""The arithmetic a simulation is held against: bytes of weights, gradients and optimizer states from shapes alone."""

import math

import torch


def shapes(model) -> dict[str, tuple]:
    """Of every parameter, before it is sharded: shape, bytes an element, trained or not."""
    return {name: (tuple(w.shape), w.element_size(), w.requires_grad) for name, w in model.named_parameters()}


def expected(shapes: dict[str, tuple], shards: int, upcast: bool) -> dict[str, int]:
    """Bytes on one process. FSDP2 cuts the first dimension, rounded up; what is trained is float32 with `upcast`."""
    local = {name: math.ceil(shape[0] / shards) * math.prod(shape[1:]) if shape else 1 for name, (shape, _, _) in shapes.items()}
    weights = {name: local[name] * (4 if upcast and trained else size) for name, (_, size, trained) in shapes.items()}
    trained = {name: weights[name] for name, (_, _, is_trained) in shapes.items() if is_trained}
    return {"weights": sum(weights.values()), "gradients": sum(trained.values()), "optimizer": 2 * sum(trained.values())}


def compare(what: str, tensors, wanted: int):
    """Raises RuntimeError when `tensors` do not have the bytes that arithmetic says, what lies on one another counted once."""
    held = sum({(t.untyped_storage()._cdata, t.storage_offset()): t.nbytes for t in tensors if t.numel()}.values())
    if held != wanted:
        raise RuntimeError(
            f"the simulation holds {held:,} bytes of {what}, arithmetic says {wanted:,}: something was not "
            "simulated as it runs, so there is no plan"
        )


def whole_step(parts: list[dict], accumulation: int) -> dict:
    """What a step of `accumulation` micro-batches computes and moves, from its last one, or from its first and its last one.

    What crosses replicas does so once a step. With two, a micro-batch in between does what both do: what only the first
    gathers, or only the last reduces, it leaves out.
    """
    first, last = parts[0], parts[-1]
    total = {}
    for kind in ("flops", "moved"):
        total[kind] = {}
        for name in first[kind].keys() | last[kind].keys():
            pair = first[kind].get(name, 0), last[kind].get(name, 0)
            once = len(parts) == 1 and name in ("all_reduced", "broadcast")
            total[kind][name] = pair[1] if once else _whole(*pair, len(parts), accumulation)
    total["touched"] = _whole(first["touched"], last["touched"], len(parts), accumulation)
    return total


def _whole(first: float, last: float, counted: int, accumulation: int) -> float:
    return last * accumulation if counted == 1 else first + last + (accumulation - 2) * min(first, last)


def curve(ledger, points: int = 1500) -> list[dict]:
    """Memory over the simulation: bytes by holder, at most `points` times, the highest of each stretch."""
    steps = sum(1 for _ in ledger.timeline())
    stretch, kept, top = max(1, steps // points), [], -1
    for number, (moment, total, held) in enumerate(ledger.timeline()):
        if total > top:
            top, best = total, {"moment": moment, "by": dict(held)}
        if number % stretch == stretch - 1 or number == steps - 1:
            kept.append(best)
            top = -1
    return kept


def hull(ledger) -> list[tuple[int, int]]:
    """Pairs of bytes, at the moments that can be the highest: what does not grow with the micro-batch, and what does."""
    pairs = set()
    for moment, total, held in ledger.timeline():
        if moment not in ("load", "first step"):
            growing = held["activations"] + held["loss"]
            pairs.add((total - growing, growing))
    kept = []
    for fixed, growing in sorted(pairs, reverse=True):  # the highest one that does not grow first
        if not kept or growing > kept[-1][1]:
            kept.append((fixed, growing))
    return kept


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)
