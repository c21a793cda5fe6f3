"""The time of a step on a card, as a roofline. All of it is a forecast.

The host starts one kernel after the other. A step takes at least the time for that: small micro-batches leave the GPU idle.

Matrix products run at a share of the card's rate, all other operators at a share of its memory's rate. Transfers overlap with
compute. With offload, what the GPU waits for is added: the work of the host, and with one process the copies of the weights.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

from planner.cards import LAUNCH, LAUNCH_GENERATING, Card
from planner.simulation import Simulation

PRODUCT_RATE = 0.6  # share of the card's FLOP/s; assumed
MEMORY_RATE = 0.75  # share of the card's memory bandwidth, for all other operators; assumed
NETWORK = 3e9  # bytes/s between nodes: 25 Gbit/s Ethernet; assumed
# Seconds per parameter on two cores of a host, which were shared with other work (measured, 2026-11-22; for clipping and adding,
# half the time of one core is assumed).
ADAM_ON_HOST = 0.95e-9  # fused AdamW
CLIP_ON_HOST = 0.4e-9  # the norm of the gradients, and scaling them
ADD_ON_HOST = 0.85e-9  # copying gradients into new memory, and adding them to those of earlier micro-batches
PINNING = 4e9  # bytes/s; allocating pinned memory for the first gradients of every step; assumed


Together = Callable[[float, float], float]


def step_seconds(card: Card, simulation: Simulation, together: Together = max) -> float:
    """Seconds of one optimizer step, with the texts that are generated for it. `together`: of the seconds of GPU and host."""
    return generating_seconds(card, simulation) + training_seconds(card, simulation, together=together)


def generating_seconds(card: Card, simulation: Simulation) -> float:
    """Seconds in which texts are generated for a step, one token of each after the other; without the pass over the prompts."""
    tokens = simulation.generations * simulation.completion
    token = dataclasses.replace(simulation, step=simulation.token, trained_here=0)
    return tokens * training_seconds(card, token, LAUNCH_GENERATING)


def training_seconds(card: Card, simulation: Simulation, launch: float = LAUNCH, together: Together = max) -> float:
    """Seconds of the forward and backward passes of a step, and of the optimizer. `launch`: of a kernel, by the host."""
    transfers, waiting = transfer_seconds(card, simulation)
    computing = compute_seconds(card, simulation)
    starting = simulation.step.launches * launch
    return together(max(computing, transfers), starting) + waiting


def compute_seconds(card: Card, simulation: Simulation) -> float:
    """Seconds of compute on the GPU."""
    step = simulation.step
    single = step.flops.get("torch.float32", 0)
    half = sum(step.flops.values()) - single
    products = (half / card.half + single / card.single) / PRODUCT_RATE
    others = step.touched / card.bandwidth / MEMORY_RATE
    copies = step.moved.get("activations", 0) / card.pcie  # on the stream that computes
    return products + others + copies


def transfer_seconds(card: Card, simulation: Simulation) -> tuple[float, float]:
    """Seconds of transfers, and of waiting for the host."""
    moved = Counter(simulation.step.moved)
    group = simulation.processes
    replicas = simulation.replicas
    near = far = card.link
    if simulation.nodes > 1:
        near = far = NETWORK
    if replicas > 1 and simulation.shards > 1:  # hybrid
        group = simulation.shards
        near = card.link
    transfer = (moved["gathered"] + moved["reduced"]) * (group - 1) / group / near
    transfer += 2 * moved["all_reduced"] * (replicas - 1) / replicas / far
    to_gpu = moved["to_gpu"]
    to_host = moved["to_host"]
    waiting = 0.0
    if simulation.is_offloaded:
        added = moved["added_on_host"]
        to_host -= added
        waiting = simulation.trained_here * (ADAM_ON_HOST + CLIP_ON_HOST)
        waiting += to_host / PINNING
        # The GPU waits while gradients are copied and added to those of earlier micro-batches.
        waiting += added / card.pcie
        waiting += added / 4 * ADD_ON_HOST
        if simulation.shards == 1:  # with one process, FSDP2 copies weights on the stream of the compute
            waiting += to_gpu / card.pcie
            to_gpu = 0
    return transfer + (to_gpu + to_host) / card.pcie, waiting


def moved_bytes(simulation: Simulation) -> dict[str, float]:
    """Bytes of a step by kind, on one GPU; "across_nodes" is what it exchanges with other nodes."""
    moved = Counter(simulation.step.moved)
    nodes = simulation.nodes
    shards = simulation.shards
    if nodes == 1:
        return moved
    per_node = simulation.processes // nodes
    if shards <= per_node:  # sharded within a node, or not at all
        moved["across_nodes"] = 2 * moved["all_reduced"] * (nodes - 1) / nodes
    else:
        moved["across_nodes"] = (moved["gathered"] + moved["reduced"]) * (shards - per_node) / shards
    return moved
