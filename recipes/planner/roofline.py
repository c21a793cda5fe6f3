"""The time of a step on a card, as a roofline. All of it is a forecast.

The host starts one kernel after the other. A step takes at least the time for that: small micro-batches leave the GPU idle.

Matrix products run at a share of the card's rate, all other operators at a share of its memory's rate, and the transfers over the
slower and the faster of the usual links. At the better end of the range all transfers are hidden behind compute, at the worse end
none. With offload, what the GPU waits for is added at both ends: the work of the host, and with one process the copies of the
weights.
"""

from planner.cards import Card
from planner.links import NETWORK, PCIE
from planner.simulation import Simulation

PRODUCT_RATE = (0.40, 0.80)  # shares of the card's FLOP/s; assumed
MEMORY_RATE = (0.50, 1.00)  # shares of the card's memory bandwidth, for all other operators; assumed
# Seconds per parameter on the host, on one and on two cores, which were shared with other work (measured, 2026-11-22; for
# clipping and adding, half the time on two cores is assumed).
ADAM_ON_HOST = (1.6e-9, 0.95e-9)  # fused AdamW
CLIP_ON_HOST = (0.8e-9, 0.4e-9)  # the norm of the gradients, and scaling them
ADD_ON_HOST = (1.7e-9, 0.85e-9)  # copying gradients into new memory, and adding them to those of earlier micro-batches
PINNING = (2e9, 6e9)  # bytes/s; allocating pinned memory for the first gradients of every step; assumed


def step_seconds(card: Card, simulation: Simulation) -> tuple[float, float]:
    """Seconds of one optimizer step, at best and at worst."""
    (slow, slow_host, waiting), (fast, fast_host, less_waiting) = (_limits(card, simulation, end) for end in (0, 1))
    return max(fast, fast_host) + less_waiting, max(slow, slow_host) + waiting


def can_wait_for_host(card: Card, simulation: Simulation) -> bool:
    """Whether the host may take longer to start the kernels of a step than the card takes to run them."""
    return any(host > gpu for gpu, host, _ in (_limits(card, simulation, end) for end in (0, 1)))


def _limits(card: Card, simulation: Simulation, end: int) -> tuple[float, float, float]:
    """Seconds of the GPU, of the host, which starts its kernels, and of waiting for the host. `end`: as in `_parts`."""
    compute, transfers, waiting = _parts(card, simulation, end)
    gpu = max(compute, transfers) if end else compute + transfers
    return gpu, host_seconds(card, simulation, end), waiting


def host_seconds(card: Card, simulation: Simulation, end: int) -> float:
    """Seconds in which the host of the card starts the kernels of a step. `end`: as in `_parts`."""
    return simulation.step.launches * card.launch[end]


def middle_seconds(card: Card, simulation: Simulation) -> float:
    """Seconds of a step, the middle of the range."""
    return sum(step_seconds(card, simulation)) / 2


def _parts(card: Card, simulation: Simulation, end: int) -> tuple[float, float, float]:
    """Seconds of compute, of transfers that can overlap with it, and of waiting for the host.

    `end`: 0 for the worse end of the assumptions, 1 for the better one.
    """
    flops = simulation.step.flops
    single = flops.get("torch.float32", 0)
    half = sum(flops.values()) - single
    compute = (half / card.half + single / card.single) / PRODUCT_RATE[end]
    compute += simulation.step.touched / card.bandwidth / MEMORY_RATE[end]
    compute += simulation.step.moved.get("activations", 0) / PCIE[end]  # on the stream that computes
    return compute, *_transfers(card, simulation, end)


def _transfers(card: Card, simulation: Simulation, end: int) -> tuple[float, float]:
    """Seconds of transfers, and of waiting for the host. `end`: as in `_parts`."""
    moved = simulation.step.moved
    is_hybrid = simulation.replicas > 1 and simulation.shards > 1
    group = simulation.shards if is_hybrid else simulation.processes
    near = card.links[end] if is_hybrid or simulation.nodes == 1 else NETWORK[end]
    far = NETWORK[end] if simulation.nodes > 1 else card.links[end]
    transfer = (moved.get("gathered", 0) + moved.get("reduced", 0)) * (group - 1) / group / near
    transfer += 2 * moved.get("all_reduced", 0) * (simulation.replicas - 1) / simulation.replicas / far
    to_gpu, to_host, added = (moved.get(kind, 0) for kind in ("to_gpu", "to_host", "added_on_host"))
    waiting = 0.0
    if simulation.is_offloaded:
        parameters = simulation.trained_here
        waiting = parameters * (ADAM_ON_HOST[end] + CLIP_ON_HOST[end]) + (to_host - added) / PINNING[end]
        # The GPU waits while gradients are copied and added to those of earlier micro-batches.
        waiting += added / PCIE[end] + added / 4 * ADD_ON_HOST[end]
        to_host -= added
        if simulation.shards == 1:  # with one process, FSDP2 copies weights on the stream of the compute
            waiting += to_gpu / PCIE[end]
            to_gpu = 0
    return transfer + (to_gpu + to_host) / PCIE[end], waiting


def moved_bytes(simulation: Simulation) -> dict[str, float]:
    """Bytes of a step by kind, on one GPU; "across_nodes" is what it exchanges with other nodes."""
    moved, per_node = simulation.step.moved, simulation.processes // simulation.nodes
    if simulation.nodes == 1:
        return moved
    if simulation.shards <= per_node:  # sharded within a node, or not at all
        return moved | {"across_nodes": 2 * moved.get("all_reduced", 0) * (simulation.nodes - 1) / simulation.nodes}
    elsewhere = (simulation.shards - per_node) / simulation.shards
    return moved | {"across_nodes": (moved.get("gathered", 0) + moved.get("reduced", 0)) * elsewhere}
