"""What the intervals of a trace were for: arithmetic, collectives, copies, waiting."""

import bisect
import re
from collections import defaultdict

ARITHMETIC, WAITING, COMMUNICATION = "arithmetic", "waiting", "all communication"
# A name stands before those that are a part of it.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "recv", "reduce", "gather")
COPIES = {"HtoD": "host to GPU", "DtoH": "GPU to host"}
CATEGORIES = (ARITHMETIC, *COLLECTIVES, "other collectives", "GPU to GPU", *COPIES.values())
# Runs on the CPU and is no arithmetic: calls of collectives, and autograd's wrappers around whatever a hook does.
NO_ARITHMETIC = re.compile(r"_?c10d|autograd::|torch::autograd")


def sort_out(events: list[tuple[str, str, int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Category to its intervals, (start, end) in ns.

    Args:
        events: (name, kind, start, end) of all that one process did, kind as `cat` in a Chrome trace. Where kernels ran on a
            GPU, only they and its copies count; the host's part shows as waiting. Without a GPU, gloo's transfers count, and
            of the operators those that call no collective, in which they would wait.
    """
    found, pending = defaultdict(list), []
    if any(kind == "kernel" for _, kind, _, _ in events):
        for name, kind, start, end in events:
            if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
                found[_on_gpu(name, kind)].append((start, end))
        return found
    began = sorted(start for name, kind, start, _ in events if kind == "cpu_op" and name.startswith(("c10d", "_c10d")))

    def calls(start: int, end: int) -> bool:
        return bisect.bisect(began, start) < bisect.bisect(began, end)

    for name, kind, start, end in sorted(events, key=lambda event: event[2]):
        if name.startswith("gloo:"):
            # gloo reduces and scatters by an all-reduce: which it is, its calls know, and are answered in their order.
            own = _collective(name)
            what = next((call for call in pending if call == own or (call, own) == ("reduce-scatter", "all-reduce")), None)
            if what:
                pending.remove(what)
            found[what or own].append((start, end))
        elif kind == "cpu_op" and name.startswith("c10d::"):
            pending.append(_collective(name))
        elif kind == "cpu_op" and "::" in name and not NO_ARITHMETIC.match(name) and not calls(start, end):
            found[ARITHMETIC].append((start, end))
    return found


def _on_gpu(name: str, kind: str) -> str:
    if "nccl" in name.lower():
        return _collective(name)
    directions = COPIES | {"PtoP": "GPU to GPU"}
    return next((what for word, what in directions.items() if kind == "gpu_memcpy" and word in name), ARITHMETIC)


def _collective(name: str) -> str:
    """`ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(…)` and `c10d::_reduce_scatter_base_` are both a reduce-scatter."""
    letters = re.sub("[^a-z]", "", name.lower().split("(")[0])
    return next((kind for kind in COLLECTIVES if kind.replace("-", "") in letters), "other collectives")


def covered(intervals: list[tuple[int, int]]) -> int:
    """How much time lies in at least one of the intervals."""
    total, until = 0, float("-inf")
    for start, end in sorted(intervals):
        total, until = total + max(0, end - max(start, until)), max(until, end)
    return total


def measure(found: dict[str, list[tuple[int, int]]], begin: int, end: int) -> dict[str, tuple[int, int]]:
    """Category to (time it takes between `begin` and `end`, time of that which is hidden behind arithmetic), in ns.

    Waiting is when nothing of the rest goes on. Other categories may overlap, so all together are more than the whole.
    """
    rows = {
        what: [(max(s, begin), min(e, end)) for s, e in found[what] if s < end and e > begin]
        for what in CATEGORIES
        if what in found
    }
    everything = [interval for intervals in rows.values() for interval in intervals]
    arithmetic = rows.pop(ARITHMETIC, [])
    rows = {what: intervals for what, intervals in rows.items() if intervals}
    if transfers := [interval for what, intervals in rows.items() if what not in COPIES.values() for interval in intervals]:
        rows[COMMUNICATION] = transfers
    took = {what: covered(intervals) for what, intervals in rows.items()}
    hidden = {what: took[what] + covered(arithmetic) - covered(rows[what] + arithmetic) for what in rows}
    return {
        ARITHMETIC: (covered(arithmetic), 0),
        **{what: (took[what], hidden[what]) for what in rows},
        WAITING: (end - begin - covered(everything), 0),
    }
