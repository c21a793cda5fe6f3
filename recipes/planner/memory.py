"""The memory of a run: what must stay free on a GPU next to the peak, on which cards it fits, host memory and disk."""

from pathlib import Path

from planner.cards import Card
from planner.simulation import Simulation

MOST_ROWS = 4096  # of a micro-batch
PROCESS_BYTES = 2_500_000_000  # of host memory: Python, torch, CUDA's libraries; assumed
# What a simulation does not see, on top of its peak.
CUDA_CONTEXT = 0.5e9  # with the loaded kernels
NCCL_BUFFERS = 0.5e9  # of a communicator over PCIe; assumed
# With NVLink: 544 and 688 MiB between A100s (NVIDIA/nccl#964).
NVLINK_BUFFERS_OF_TWO = 0.57e9
NVLINK_BUFFERS = 0.72e9  # of more than two GPUs
FRAGMENTATION = 0.05  # of the peak: the allocator's pages, cuBLAS workspaces


def reserve(simulation: Simulation, peak: float, card: Card | None = None) -> float:
    """Bytes that must stay free on top of the peak (of `card`, or of any)."""
    return CUDA_CONTEXT + nccl_buffers(simulation, card) + FRAGMENTATION * peak


def nccl_buffers(simulation: Simulation, card: Card | None) -> float:
    """Bytes on each GPU. All processes have a communicator; with hybrid sharding, so have the shards and the replicas."""
    groups = [simulation.processes]
    if simulation.replicas > 1 and simulation.shards > 1:
        groups += [simulation.shards, simulation.replicas]
    # NVLinks of a data centre's card; a bridge between two RTX 3090s has no more channels than PCIe
    has_nvlink = card is not None and card.link > 100e9
    total = 0.0
    for size in groups:
        if size > 1 and not has_nvlink:
            total += NCCL_BUFFERS
        elif size > 2:
            total += NVLINK_BUFFERS
        elif size == 2:
            total += NVLINK_BUFFERS_OF_TWO
    return total


def fits(card: Card, simulation: Simulation, peak: float) -> bool:
    return peak + reserve(simulation, peak, card) <= card.memory and (card.bf16 or not simulation.needs_bf16)


def largest_micro_batch(card: Card, simulation: Simulation) -> int:
    """The largest micro-batch that fits, up to MOST_ROWS; 0 if none does. Activations and loss are assumed proportional to it."""
    for rows in range(1, MOST_ROWS + 1):
        peak = max(fixed + growing * rows / simulation.micro_batch for fixed, growing in simulation.hull)
        if not fits(card, simulation, peak):
            return rows - 1
    return MOST_ROWS


def needed_host_memory(simulation: Simulation) -> float:
    """Bytes of host memory on a node: the model while it loads, what offload keeps there, the whole model to be saved.

    The file of the 4-bit weights is not counted: it is memory-mapped, so the kernel can drop its pages.
    """
    per_node = simulation.processes // simulation.nodes
    loading = 0
    if "load" in simulation.host_peaks:
        loaded = simulation.host_peaks["load"].bytes
        loading = simulation.copies * max(0, loaded - simulation.quantized)
    training = max((peak.bytes for moment, peak in simulation.host_peaks.items() if moment != "load"), default=0)
    saving = 0
    if not simulation.is_adapter:
        saving = 4 * simulation.parameters  # gathered on the first process, in float32
    return per_node * PROCESS_BYTES + max(loading, per_node * training, saving)


def disk_space(simulation: Simulation) -> float:
    """Bytes: the downloaded weights, the 4-bit copy made of them, two checkpoints with weights in float32, and the model."""
    published = simulation.parameters * simulation.hub_bytes
    download = 0 if Path(simulation.model).is_dir() else published
    checkpoint = 4 * simulation.trained + simulation.optimizer * simulation.shards
    model = 4 * simulation.trained if simulation.is_adapter else published
    return download + simulation.quantized + 2 * checkpoint + model
