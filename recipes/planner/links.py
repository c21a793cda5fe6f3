"""The links between GPUs, host and nodes: their rates, and whether the GPUs of this machine have NVLink."""

import dataclasses
import itertools
import re

from planner.cards import Card

NVLINK = {"RTX 3090": 56e9}  # bytes/s with a bridge, of cards whose links in `cards.CARDS` are PCIe
PCIE = (10e9, 24e9)  # bytes/s between host and GPU: PCIe 4 x8, or x16
NETWORK = (1.1e9, 11e9)  # bytes/s between nodes: 10 or 100 Gbit/s Ethernet


def has_nvlink_rate(card: Card) -> bool:
    """Whether the links are NVLinks of a data centre's card; a bridge between two RTX 3090s has no more channels than PCIe."""
    return card.links[1] > 100e9


def nvlink_rate(card: Card) -> float | None:
    """Bytes/s over NVLink, None if that is not known: most cards have none, and --card does not say."""
    return card.links[1] if has_nvlink_rate(card) else NVLINK.get(card.name)


def with_nvlink(card: Card) -> Card:
    """The card with the rates of NVLink, which must be known."""
    rate = nvlink_rate(card)
    return dataclasses.replace(card, links=(0.7 * rate, rate))


def with_pcie(card: Card) -> Card:
    """The card with the rates of PCIe, with half and with all lanes."""
    slow = card.links[0]
    return dataclasses.replace(card, links=(slow / 2, slow)) if has_nvlink_rate(card) else card


def are_linked(topology: str, gpus: list[int]) -> bool | None:
    """Whether NVLink connects each two of these GPUs; None if that is not known, or there is one GPU.

    `topology`: what `nvidia-smi topo -m` prints, a matrix of GPUs and network cards. NV12 is NVLink, other words mean PCIe.
    """
    lines = [[cell.strip() for cell in line.split("\t")] for line in re.sub(r"\x1b\[\d*m", "", topology).splitlines()]
    header = next((cells for cells in lines if "GPU0" in cells[1:]), [])
    rows = {cells[0]: dict(zip(header, cells, strict=False)) for cells in lines if cells[0].startswith("GPU")}
    links = [rows.get(f"GPU{one}", {}).get(f"GPU{other}", "") for one, other in itertools.combinations(gpus, 2)]
    if not links or not all(links):
        return None
    return all(link.startswith("NV") for link in links)
