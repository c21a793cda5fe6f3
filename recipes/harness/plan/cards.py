"""From a simulation to cards: which the run fits, how long a step takes on them, what that costs. All of it is a forecast.

The time of a step is a roofline: matrix products at a share of the card's rate, all other operators at a share of its memory's
rate, and the transfers over the slower and the faster of the usual links. At the better end of a range all transfers are
hidden behind compute, at the worse end none. With offload, what the GPU waits for is added at both ends: the work of the host,
and with one process the copies of the weights.

The second part proposes what would make a run fit.
"""

import dataclasses
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import configs
from harness.launched import UserError
from harness.model.loading import PROCESS_BYTES
from harness.plan.simulation import Refused, Simulation
from harness.start.flags import without

import yaml

GB = 1e9
MOST_ROWS = 4096  # of a micro-batch
PRODUCT_RATE = (0.40, 0.80)  # shares of the card's FLOP/s; assumed
MEMORY_RATE = (0.50, 1.00)  # shares of the card's memory bandwidth, for all other operators; assumed


@dataclasses.dataclass(frozen=True)
class Card:
    """Numbers of the maker's data sheet, dense; memory as the driver leaves it to CUDA. Rates are [slow, fast] ends."""

    name: str
    memory: float  # bytes, what torch reports for an empty card
    half: float  # FLOP/s in bf16 or fp16 with float32 accumulation
    single: float  # FLOP/s in float32, without TF32
    bandwidth: float  # bytes/s of its memory
    links: tuple[float, float]  # bytes/s between GPUs of a node, slow and fast: PCIe 3 x8 to 5 x16; NVLink
    bf16: bool = True


# H200 and B200: the SXM modules of HGX boards. A100 64 GB: NVIDIA has no public data sheet for the card of CINECA's Leonardo;
# it has 124 multiprocessors where the others have 108, and four stacks of memory instead of five (arXiv:2307.16885).
CARDS = (
    Card("T4", 15.6 * GB, 65e12, 8.1e12, 320e9, (5e9, 12e9), bf16=False),
    Card("RTX 3090", 25.4 * GB, 71e12, 35.6e12, 936e9, (6e9, 25e9)),
    Card("RTX 4090", 25.3 * GB, 165e12, 82.6e12, 1008e9, (6e9, 25e9)),
    Card("L4", 23.6 * GB, 121e12, 30.3e12, 300e9, (6e9, 25e9)),
    Card("RTX 5090", 33.7 * GB, 209.5e12, 104.8e12, 1792e9, (6e9, 50e9)),
    Card("A100 40 GB", 42.2 * GB, 312e12, 19.5e12, 1555e9, (25e9, 230e9)),
    Card("L40S", 47.7 * GB, 362e12, 91.6e12, 864e9, (6e9, 25e9)),
    Card("A100 64 GB", 68.1 * GB, 358e12, 22.4e12, 1640e9, (25e9, 230e9)),
    Card("A100 80 GB", 84.9 * GB, 312e12, 19.5e12, 2039e9, (25e9, 230e9)),
    Card("H100 80 GB", 84.9 * GB, 989e12, 67e12, 3350e9, (50e9, 370e9)),
    Card("H200", 150.1 * GB, 989e12, 67e12, 4800e9, (50e9, 370e9)),
    Card("B200", 191.5 * GB, 2250e12, 80e12, 8000e9, (50e9, 740e9)),
)
NVLINK = {"RTX 3090": 56e9}  # bytes/s with a bridge, of cards whose links above are PCIe
PCIE = (10e9, 24e9)  # bytes/s between host and GPU: PCIe 4 x8, or x16
NETWORK = (1.1e9, 11e9)  # bytes/s between nodes: 10 or 100 Gbit/s Ethernet
# Seconds per parameter on the host, on one and on two cores, which were shared with other work (measured, 2026-11-22; for
# clipping and adding, half the time on two cores is assumed).
ADAM_ON_HOST = (1.6e-9, 0.95e-9)  # fused AdamW
CLIP_ON_HOST = (0.8e-9, 0.4e-9)  # the norm of the gradients, and scaling them
ADD_ON_HOST = (1.7e-9, 0.85e-9)  # copying gradients into new memory, and adding them to those of earlier micro-batches
PINNING = (2e9, 6e9)  # bytes/s; allocating pinned memory for the first gradients of every step; assumed

# What a simulation does not see, on top of its peak.
CUDA_CONTEXT = 0.5 * GB  # with the loaded kernels
NCCL_BUFFERS = 0.5 * GB  # of a communicator over PCIe; assumed
# Of a communicator of two GPUs with NVLink, and of more: 544 and 688 MiB between A100s (NVIDIA/nccl#964).
NVLINK_BUFFERS = (0.57 * GB, 0.72 * GB)
FRAGMENTATION = 0.05  # of the peak, at least: the allocator's pages, cuBLAS workspaces


def card_of_user(name: str, gigabytes: float, teraflops: float, gigabytes_per_second: float) -> Card:
    """The card of --card: it connects over PCIe, and its float32 rate is a sixteenth, as on an A100."""
    if name in {card.name for card in CARDS}:
        raise UserError(f"--card: {name} is known already: leave out the flag, or give the card another name")
    return Card(name, gigabytes * GB, teraflops * 1e12, teraflops * 1e12 / 16, gigabytes_per_second * 1e9, (6e9, 25e9))


def find_card(name: str, all_cards: tuple[Card, ...] = CARDS) -> Card:
    """The card of a name like 3090, a100-80gb or "RTX 4090", or of the beginning of one.

    If several names begin so, it is the card with the least memory. Raises UserError if there is none.
    """
    wanted = plain_name(name)
    known = sorted(all_cards, key=lambda card: card.memory)
    exact = [card for card in known if plain_name(card.name) == wanted]
    beginning = [card for card in known if wanted and plain_name(card.name).startswith(wanted)]
    if not exact and not beginning:
        raise UserError(
            f"{name} is not a known GPU, expected one of {', '.join(card.name for card in known)}, or describe it: "
            f"--card {name.strip().replace(' ', '')}=48,155,768 (GB, TFLOPS, GB/s)"
        )
    return (exact or beginning)[0]


def plain_name(name: str) -> str:
    """A card's name in small letters and digits, without makers and units."""
    return re.sub(r"nvidia|geforce|rtx|tesla|gb|[^a-z0-9]", "", name.lower())


def card_of_gpu(name: str, memory: float, has_bf16: bool, all_cards: tuple[Card, ...] = CARDS) -> Card:
    """The card that nvidia-smi calls `name`, with `memory` bytes; one that is unknown, with the rates of an RTX 3090 or a T4."""
    for card in all_cards:
        words = card.name.lower().removeprefix("rtx ").split()
        if words[0] in re.split(r"[^a-z0-9]+", name.lower()) and 0.9 < card.memory / memory < 1.05:
            return card
    slower = find_card("3090" if has_bf16 else "T4")
    return dataclasses.replace(slower, name=name.removeprefix("NVIDIA "), memory=0.985 * memory)


def has_nvlink_rate(card: Card) -> bool:
    """Whether the links are NVLinks of a data centre's card; a bridge between two RTX 3090s has no more channels than PCIe."""
    return card.links[1] > 100e9


def with_links(card: Card, has_nvlink: bool) -> Card:
    """The card with the rates of NVLink, or those of PCIe with half and all lanes. Raises UserError if it has no NVLink."""
    (slow, fast), is_nvlink = card.links, has_nvlink_rate(card)
    if has_nvlink and not is_nvlink and card.name not in NVLINK:
        raise UserError(f"--for: {card.name} has no NVLink that this project knows: leave out nvlink")
    if has_nvlink:
        rate = fast if is_nvlink else NVLINK[card.name]
        return dataclasses.replace(card, links=(0.7 * rate, rate))
    return dataclasses.replace(card, links=(slow / 2, slow)) if is_nvlink else card


def reserve(simulation: Simulation, peak: float, card: Card | None = None) -> float:
    """Bytes that must stay free on top of the peak (of `card`, or of any)."""
    fragmentation = max(FRAGMENTATION, simulation.needed / simulation.peak.bytes - 1)
    return CUDA_CONTEXT + nccl_buffers(simulation, card) + fragmentation * peak


def nccl_buffers(simulation: Simulation, card: Card | None) -> float:
    """Bytes on each GPU. All processes have a communicator; with hybrid sharding, so have the shards and the replicas."""
    groups = [simulation.processes]
    if simulation.replicas > 1 and simulation.shards > 1:
        groups += [simulation.shards, simulation.replicas]
    has_nvlink = card is not None and has_nvlink_rate(card)
    return sum(NVLINK_BUFFERS[size > 2] if has_nvlink else NCCL_BUFFERS for size in groups if size > 1)


def reserved_on(card: Card, simulation: Simulation) -> float:
    """Bytes that PyTorch's allocator reserves at most. Where a card has no memory for more, it gives back what is free."""
    limit = card.memory - CUDA_CONTEXT - nccl_buffers(simulation, card)
    return min(simulation.reserved, max(simulation.needed, limit))


def fits(card: Card, simulation: Simulation, peak: float) -> bool:
    return peak + reserve(simulation, peak, card) <= card.memory and (card.bf16 or not simulation.needs_bf16)


def largest_micro_batch(card: Card, simulation: Simulation) -> int:
    """The largest micro-batch that fits, up to MOST_ROWS; 0 if none does. Activations and loss are assumed proportional to it."""
    for rows in range(1, MOST_ROWS + 1):
        peak = max(fixed + growing * rows / simulation.micro_batch for fixed, growing in simulation.hull)
        if not fits(card, simulation, peak):
            return rows - 1
    return MOST_ROWS


class StepParts(NamedTuple):
    """What the time of a step consists of, in seconds; pairs are [slow, fast] ends."""

    products: float  # matrix products at the full rate of the card
    others: float  # all other operators at its full memory bandwidth
    copies: tuple[float, float]  # of activations between layers, on the stream that computes
    transfers: tuple[float, float]  # over the slower and the faster of the usual links
    waiting: tuple[float, float]  # of the GPU for the host


def step_seconds(card: Card, simulation: Simulation) -> tuple[float, float]:
    """Seconds of one optimizer step, at best and at worst."""
    parts = step_parts(card, simulation)
    worst, best = (seconds_at(parts, PRODUCT_RATE[end], MEMORY_RATE[end], end) for end in (0, 1))
    return best, worst


def seconds_at(parts: StepParts, product_rate: float, memory_rate: float, place: float) -> float:
    """Seconds of a step with these rates. `place`: 0 for the slow end of links and overlap, 1 for the fast end."""

    def between(ends: tuple[float, float]) -> float:
        return (1 - place) * ends[0] + place * ends[1]

    compute = parts.products / product_rate + parts.others / memory_rate + between(parts.copies)
    transfers = between(parts.transfers)
    return max(compute + (1 - place) * transfers, transfers) + between(parts.waiting)


def step_parts(card: Card, simulation: Simulation) -> StepParts:
    """The seconds of a step by what they are spent on; pairs are the slow and the fast end."""
    flops, moved = simulation.step.flops, simulation.step.moved
    single = flops.get("torch.float32", 0)
    half = sum(flops.values()) - single
    copies = moved.get("activations", 0)
    (slow_transfers, slow_waiting), (fast_transfers, fast_waiting) = (_transfers(card, simulation, end) for end in (0, 1))
    return StepParts(
        products=half / card.half + single / card.single,
        others=simulation.step.touched / card.bandwidth,
        copies=(copies / PCIE[0], copies / PCIE[1]),
        transfers=(slow_transfers, fast_transfers),
        waiting=(slow_waiting, fast_waiting),
    )


def _transfers(card: Card, simulation: Simulation, end: int) -> tuple[float, float]:
    """Seconds of transfers, and of waiting for the host. `end`: 0 for the worse end of the assumptions, 1 for the better one."""
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


def make_plan(simulation: Simulation, price: float = 0.0, all_cards: tuple[Card, ...] = CARDS) -> dict[str, Any]:
    """The plan as `--json` prints it; memory in GB (1e9 bytes), time in seconds, `price` per GPU and hour."""
    peak = simulation.peak.bytes
    tokens = simulation.tokens * simulation.accumulation * simulation.processes
    steps = simulation.max_steps if simulation.max_steps > 0 else None
    plan = {
        "recipe": simulation.recipe,
        "config": simulation.config,
        "processes": simulation.processes,
        "nodes": simulation.nodes,
        "parameters": simulation.parameters,
        "trained": simulation.trained,
        "micro_batch": simulation.micro_batch,
        "peak_gpu_gb": gb(peak),
        "reserve_gb": gb(reserve(simulation, peak)),
        "reserved_gb": gb(simulation.reserved),
        "moments": {moment: gb(of.bytes) for moment, of in simulation.peaks.items() if moment != "first step"},
        "holders": {holder: gb(size) for holder, size in simulation.peak.by_holder.items() if gb(size)},
        "peak_host_gb": gb(needed_host_memory(simulation)),
        "disk_gb": gb(disk_space(simulation)),
        "download_gb": gb(simulation.download),
        "moved_gb": {kind: gb(size) for kind, size in moved_bytes(simulation).items() if gb(size)},
        "tflops": round(sum(simulation.step.flops.values()) / 1e12, 1),
        "tokens_per_step": tokens,
        "steps": steps,
        "steps_are_estimated": simulation.steps_are_estimated,
        "fits": {card.name: fits(card, simulation, peak) for card in all_cards},
        "reserved_on_gb": {card.name: gb(reserved_on(card, simulation)) for card in all_cards},
        "free_gb": {card.name: gb(card.memory - (peak + reserve(simulation, peak, card))) for card in all_cards},
        "largest_micro_batch": {card.name: largest_micro_batch(card, simulation) for card in all_cards},
        "step_seconds": {},
        "tokens_per_second": {},
        "hours": {},
        "price": {},
    }
    for card in all_cards:
        if simulation.needs_bf16 and not card.bf16:
            continue
        best, worst = step_seconds(card, simulation)
        plan["step_seconds"][card.name] = [round(best, 3), round(worst, 3)]
        plan["tokens_per_second"][card.name] = [round(tokens / worst), round(tokens / best)]
        if steps:
            hours = [round(steps * seconds / 3600, 4) for seconds in (best, worst)]
            plan["hours"][card.name] = hours
            if price:
                plan["price"][card.name] = [round(number * price * simulation.processes, 2) for number in hours]
    return plan


def moved_bytes(simulation: Simulation) -> dict[str, float]:
    """Bytes of a step by kind, on one GPU; "across_nodes" is what it exchanges with other nodes."""
    moved, per_node = simulation.step.moved, simulation.processes // simulation.nodes
    if simulation.nodes == 1:
        return moved
    if simulation.shards <= per_node:  # sharded within a node, or not at all
        return moved | {"across_nodes": 2 * moved.get("all_reduced", 0) * (simulation.nodes - 1) / simulation.nodes}
    elsewhere = (simulation.shards - per_node) / simulation.shards
    return moved | {"across_nodes": (moved.get("gathered", 0) + moved.get("reduced", 0)) * elsewhere}


def needed_host_memory(simulation: Simulation) -> float:
    """Bytes of host memory on a node: the model while it loads, what offload keeps there, the whole model to be saved.

    The file of the 4-bit weights is not counted: it is memory-mapped, so the kernel can drop its pages.
    """
    per_node = simulation.processes // simulation.nodes
    loading = 0
    if "load" in simulation.host_peaks:
        loading = simulation.copies * max(0, simulation.host_peaks["load"].bytes - simulation.quantized)
    training = max((peak.bytes for moment, peak in simulation.host_peaks.items() if moment != "load"), default=0)
    saving = 0 if simulation.is_adapter else 4 * simulation.parameters  # gathered on the first process, in float32
    return per_node * PROCESS_BYTES + max(loading, per_node * training, saving)


def disk_space(simulation: Simulation) -> float:
    """Bytes: the download, the 4-bit copy made of it, two checkpoints with weights in float32, and the model."""
    checkpoint = 4 * simulation.trained + simulation.optimizer * simulation.shards
    model = 4 * simulation.trained if simulation.is_adapter else simulation.parameters * simulation.hub_bytes
    return simulation.download + simulation.quantized + 2 * checkpoint + model


def gb(size: float) -> float:
    return round(size / GB, 3)


def try_proposals(
    plan: dict[str, Any],
    simulation: Simulation,
    config: str,
    run: Callable[[str, list[str]], Simulation | Refused],
    card: Card | None = None,
    host: float = math.inf,
) -> list[dict[str, Any]]:
    """Simulates what could make the run fit, the cheapest change first, until one does; [] if it fits already.

    The target is `card`, or the one that the config is for, on nodes with `host` bytes of memory. `run(config, flags)` simulates.
    A change that saves memory is kept, and the next one is tried on top of it. Returns `{"change", "needs", "needs_host",
    "fits", "card"}` of each.
    """
    card = card or card_of_config(config)

    def is_enough(simulated: Simulation) -> bool:
        return fits(card, simulated, simulated.peak.bytes) and needed_host_memory(simulated) <= host

    if is_enough(simulation):
        return []
    kept, tried, rows, best = [], [], [], plan["peak_gpu_gb"] + plan["reserve_gb"]
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        # After a change that is kept, the next ones depend on it.
        while change := next((change for change in proposals(simulation, config) if change not in tried), None):
            tried.append(change)
            other_config = change.config or config
            if change.reduces_each_batch:
                other_config = copy_that_reduces_each_batch(config, folder)
            others = without("max_length", kept) if "--max_length" in change.flags else kept
            flags = [*others, *change.flags]
            simulated = run(other_config, flags)
            if isinstance(simulated, Refused):
                continue
            peak = simulated.peak.bytes
            needs, needs_host = gb(peak) + gb(reserve(simulated, peak, card)), needed_host_memory(simulated)
            words = " ".join([Path(other_config).stem, *flags])
            row = {"change": words, "needs": needs, "needs_host": gb(needs_host), "card": card.name}
            rows.append(row | {"fits": "yes" if is_enough(simulated) else "no"})
            if is_enough(simulated):
                break
            if needs < 0.98 * best and (needs_host <= host or needs_host <= needed_host_memory(simulation)):
                kept, best, config, simulation = flags, needs, other_config, simulated
    return rows


def card_of_config(config: str, all_cards: tuple[Card, ...] = CARDS) -> Card:
    """The card that a config is for: a T4 for fp16, else one of 24 GB."""
    return find_card("T4" if configs.read(config).mixed_precision == "fp16" else "3090", all_cards)


class Change(NamedTuple):
    """Something that could make a run need less memory."""

    flags: tuple[str, ...] = ()
    config: str = ""  # "" for the same one
    reduces_each_batch: bool = False  # in a copy of the config


def proposals(simulation: Simulation, config: str) -> list[Change]:
    """What could make a run need less memory: first what costs time, last what changes what is learnt."""
    changes = []
    if not simulation.has_checkpointing:
        changes.append(Change(("--activation_checkpointing", "true")))
    if simulation.micro_batch > 1:
        flags = ("--per_device_train_batch_size", "1")
        if not simulation.has_global_batch_flag:  # as many rows per step as before
            flags += ("--gradient_accumulation_steps", str(simulation.micro_batch * simulation.accumulation))
        changes.append(Change(flags))
    changes += [Change(config=other) for other in configs_that_save_more(config)]
    if simulation.accumulation > 1 and configs.read(config).could_reduce_each_batch:
        changes.append(Change(reduces_each_batch=True))
    use_peft = () if simulation.is_adapter else ("--use_peft", "true")
    if use_peft:
        changes.append(Change(use_peft))
    if not simulation.bytes_in_4bit:
        changes.append(Change((*use_peft, "--load_in_4bit", "true")))
    if simulation.max_length and simulation.max_length >= 2048:
        changes.append(Change(("--max_length", str(simulation.max_length // 2))))
    return changes


def copy_that_reduces_each_batch(config: str, folder: str) -> str:
    """The path of a copy of a config in `folder`, with `fsdp_reduce_each_batch: true`."""
    keys = yaml.safe_load(Path(config).read_text("utf-8"))
    keys["fsdp_config"]["fsdp_reduce_each_batch"] = True
    copy = Path(folder, f"{Path(config).stem} with fsdp_reduce_each_batch: true.yaml")
    copy.write_text(yaml.safe_dump(keys), "utf-8")
    return str(copy)


def configs_that_save_more(config: str) -> list[str]:
    """Configs for the same machines and precision that keep less on a GPU: sharded instead of whole, offloaded."""

    def saving(config: configs.AccelerateConfig) -> int:
        """A larger number for a config that keeps less on a GPU: DDP 0, FSDP 1 to 4."""
        return 1 + config.reshard_after_forward + 2 * config.offload_params if config.is_fsdp else 0

    own, others = configs.read(config), []
    folders = {Path(config).resolve().parent, Path(__file__).resolve().parents[3] / "accelerate_configs"}
    for path in sorted(path for folder in folders for path in folder.glob("*.yaml")):
        try:
            other = configs.read(str(path))
        except UserError:  # not a config that this project reads
            continue
        same_machines = (other.num_processes, other.num_machines) == (own.num_processes, own.num_machines)
        same_kind = (other.mixed_precision, other.replicas, other.shards) == (own.mixed_precision, own.replicas, own.shards)
        if same_machines and same_kind and saving(other) > saving(own):
            others.append((saving(other), str(path)))
    return [path for _, path in sorted(others)]
