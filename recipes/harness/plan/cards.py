"""From what was counted to cards: which it fits, how long a step takes on them, what that costs. All of it a forecast.

A step's time is a roofline: products at a share of the card's rate, all else at a share of its memory's, and what moves over
the slower and the faster of the usual links. The better end of a range has everything move behind the arithmetic, the other
one nothing.
"""

import dataclasses

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Card:
    """Numbers of the makers' data sheets, dense; memory as the driver leaves it to CUDA, in bytes."""

    name: str
    memory: float  # what torch says of an empty card
    half: float  # FLOP/s in bf16 or fp16, adding in float32
    single: float  # FLOP/s in float32, without TF32
    bandwidth: float  # bytes/s of its memory
    links: tuple[float, float]  # bytes/s between GPUs of a node: PCIe 3 or 4, eight or sixteen lanes; NVLink
    bf16: bool = True


CARDS = (
    Card("T4", 15.6 * GB, 65e12, 8.1e12, 320e9, (5e9, 12e9), bf16=False),
    Card("RTX 3090", 25.4 * GB, 71e12, 35.6e12, 936e9, (6e9, 25e9)),
    Card("RTX 4090", 25.3 * GB, 165e12, 82.6e12, 1008e9, (6e9, 25e9)),
    Card("L4", 23.6 * GB, 121e12, 30.3e12, 300e9, (6e9, 25e9)),
    Card("A100 40 GB", 42.2 * GB, 312e12, 19.5e12, 1555e9, (25e9, 230e9)),
    Card("A100 80 GB", 84.9 * GB, 312e12, 19.5e12, 2039e9, (25e9, 230e9)),
    Card("H100 80 GB", 84.9 * GB, 989e12, 67e12, 3350e9, (50e9, 370e9)),
)
LINES = (16, 24, 40, 80)  # GB, of the picture
PCIE = (10e9, 24e9)  # bytes/s between host and GPU: eight lanes of PCIe 4, or sixteen
NETWORK = (1.1e9, 11e9)  # bytes/s between nodes: 10 or 100 Gbit/s Ethernet
PRODUCTS = (0.40, 0.80)  # shares of the rates above; not measured here
REST = (0.50, 1.00)  # shares of the memory's rate, for whatever is no product
# Seconds a parameter, fused, on one and on two cores (measured, shared with other work).
ADAM_ON_HOST = (1.6e-9, 0.95e-9)

# What a simulation does not see, on top of its peak.
CONTEXT = 0.5 * GB  # CUDA's context and loaded kernels
COLLECTIVES = 0.5 * GB  # NCCL's buffers, with several processes
PROCESS = 2.5 * GB  # of host memory: Python, torch, CUDA's libraries
FRAGMENTS = 0.05  # of the peak: the allocator's blocks, cuBLAS' workspaces


def reserve(peak: float, processes: int) -> float:
    """Bytes that must stay free beside the peak."""
    return CONTEXT + (COLLECTIVES if processes > 1 else 0) + FRAGMENTS * peak


def fits(card: Card, found: dict, peak: float) -> bool:
    return peak + reserve(peak, found["processes"]) <= card.memory and (card.bf16 or not found["bf16"])


def largest(card: Card, found: dict) -> int:
    """The largest micro-batch that fits, 0 for none: what grows with it, activations and loss, is taken to grow as it does."""
    batch = 0
    while batch < 4096:
        peak = max(fixed + growing * (batch + 1) / found["micro_batch"] for fixed, growing in found["hull"])
        if not fits(card, found, peak):
            break
        batch += 1
    return batch


def step_seconds(card: Card, found: dict) -> tuple[float, float]:
    """Seconds of one optimizer step, at best and at worst."""
    step, moved = found["step"], found["step"]["moved"]
    hybrid = found["replicas"] > 1 and found["shards"] > 1
    group = found["processes"] if not hybrid else found["shards"]
    single = step["flops"].get("torch.float32", 0)
    half = sum(step["flops"].values()) - single
    seconds = []
    for end in (1, 0):
        compute = (half / card.half + single / card.single) / PRODUCTS[end] + step["touched"] / card.bandwidth / REST[end]
        near = card.links[end] if hybrid or found["nodes"] == 1 else NETWORK[end]
        far = NETWORK[end] if found["nodes"] > 1 else card.links[end]
        wire = (moved.get("gathered", 0) + moved.get("reduced", 0)) * (group - 1) / group / near
        wire += 2 * moved.get("all_reduced", 0) * (found["replicas"] - 1) / found["replicas"] / far
        wire += (moved.get("to_gpu", 0) + moved.get("to_host", 0)) / PCIE[end]
        adam = found["trained_here"] * ADAM_ON_HOST[end] if found["offloaded"] else 0
        seconds.append((max(compute, wire) if end else compute + wire) + adam)
    return seconds[0], seconds[1]


def plan(found: dict, price: float = 0.0) -> dict:
    """What a person or a program is told; memory in GB (1e9 bytes), time in seconds."""
    peak = max(moment["bytes"] for moment in found["peaks"].values())
    tokens = found["tokens"] * found["accumulation"] * found["processes"]
    steps = found["max_steps"] if found["max_steps"] > 0 else None
    result = {name: found[name] for name in ("recipe", "config", "processes", "nodes", "parameters", "trained", "micro_batch")}
    result |= {
        "peak_gpu_gb": gb(peak),
        "reserve_gb": gb(reserve(peak, found["processes"])),
        "moments": {name: gb(moment["bytes"]) for name, moment in found["peaks"].items() if name != "first step"},
        "holders": {name: gb(size) for name, size in _top(found)["by"].items() if gb(size)},
        "peak_host_gb": gb(_host(found)),
        "disk_gb": gb(_disk(found)),
        "download_gb": gb(found["download"]),
        "moved_gb": {kind: gb(size) for kind, size in _moved(found).items() if gb(size)},
        "tflops": round(sum(found["step"]["flops"].values()) / 1e12, 1),
        "tokens_a_step": tokens,
        "steps": steps,
        "steps_are_estimated": "estimated" in found,
        "fits": {card.name: fits(card, found, peak) for card in CARDS},
        "largest_micro_batch": {card.name: largest(card, found) for card in CARDS},
        "step_seconds": {},
        "tokens_per_second": {},
        "hours": {},
        "price": {},
    }
    for card in CARDS:
        if found["bf16"] and not card.bf16:
            continue
        low, high = step_seconds(card, found)
        result["step_seconds"][card.name] = [round(low, 3), round(high, 3)]
        result["tokens_per_second"][card.name] = [round(tokens / high), round(tokens / low)]
        if steps:
            hours = [round(steps * seconds / 3600, 2) for seconds in (low, high)]
            result["hours"][card.name] = hours
            if price:
                result["price"][card.name] = [round(h * price * found["processes"], 2) for h in hours]
    return result


def _moved(found: dict) -> dict:
    """Bytes of a step by kind, on one GPU; what of them it gets from other nodes and sends there, as "across_nodes"."""
    moved, local = found["step"]["moved"], found["processes"] // found["nodes"]
    if found["nodes"] == 1:
        return moved
    if found["shards"] <= local:  # sharded within a node, or not at all
        return moved | {"across_nodes": 2 * moved.get("all_reduced", 0) * (found["nodes"] - 1) / found["nodes"]}
    away = (found["shards"] - local) / found["shards"]
    return moved | {"across_nodes": (moved.get("gathered", 0) + moved.get("reduced", 0)) * away}


def _top(found: dict) -> dict:
    return max(found["peaks"].values(), key=lambda moment: moment["bytes"])


def _host(found: dict) -> float:
    """Bytes of host memory on a node: the model while it is loaded, what offload keeps there, the whole model to be saved."""
    local, held = found["processes"] // found["nodes"], {name: at["bytes"] for name, at in found["host_peaks"].items()}
    loading = held.pop("load", 0) * found["copies"]
    saving = 0 if found["adapter"] else 4 * found["parameters"]  # gathered on the first process, in float32
    return local * PROCESS + max(loading, local * max(held.values(), default=0), saving)


def _disk(found: dict) -> float:
    """Bytes: what is downloaded, 4-bit weights made of it, two checkpoints, one of which may be being written, the model."""
    checkpoint = 12 * found["trained"]  # weights and Adam's two moments, float32
    model = 4 * found["trained"] if found["adapter"] else found["parameters"] * found["hub_bytes"]
    return found["download"] + found["packed"] + 2 * checkpoint + model


def gb(size: float) -> float:
    return round(size / GB, 3)
