"""Whether NVLink connects the GPUs of this machine, and what that means for a card."""

import dataclasses
import itertools
import re

from planner.cards import Card


def with_links(card: Card, has_nvlink: bool) -> Card:
    return dataclasses.replace(card, has_nvlink=has_nvlink)


def are_linked(topology: str, gpus: list[int]) -> bool | None:
    """Whether NVLink connects each two of these GPUs; None if that is not known, or there is one GPU.

    `topology`: what `nvidia-smi topo -m` prints, a matrix of GPUs and network cards. NV12 is NVLink, other words mean PCIe.
    """
    header: list[str] = []
    links: dict[tuple[str, str], str] = {}  # of two GPUs
    for line in re.sub(r"\x1b\[\d*m", "", topology).splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if "GPU0" in cells[1:]:
            header = cells
        elif cells[0].startswith("GPU"):
            links |= {(cells[0], other): link for other, link in zip(header, cells, strict=False)}
    found = [links.get((f"GPU{one}", f"GPU{other}")) for one, other in itertools.combinations(gpus, 2)]
    if not found or not all(found):
        return None
    return all(link.startswith("NV") for link in found)
