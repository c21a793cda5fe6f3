"""The GPUs that --plan knows, and one that the user describes: memory, rates, and links between GPUs."""

import dataclasses
import re

from harness.messages import UserError

GB = 1e9
# Seconds in which a host starts a kernel, with the modules, autograd and autocast around it (measured on two servers with an
# H100, see docs/measurements.md), and without autograd, when texts are generated (on a server with an H200).
LAUNCH = 26e-6
LAUNCH_GENERATING = 17e-6


@dataclasses.dataclass(frozen=True)
class Card:
    """Numbers of the maker's data sheet, dense; memory as the driver leaves it to CUDA."""

    name: str
    memory: float  # bytes, what torch reports for an empty card
    half: float  # FLOP/s in bf16 or fp16 with float32 accumulation
    single: float  # FLOP/s in float32, without TF32
    bandwidth: float  # bytes/s of its memory
    pcie: float  # bytes/s over PCIe, to the host or to another GPU: 60 % of what 16 lanes have; assumed
    nvlink: float | None = None  # bytes/s to another GPU over NVLink: 70 % of what the links have; assumed
    has_nvlink: bool = False  # whether the GPUs of a node are connected by it
    bf16: bool = True

    @property
    def link(self) -> float:
        """Bytes/s between GPUs of a node."""
        return self.nvlink if self.has_nvlink and self.nvlink else self.pcie


PCIE_3 = 9e9
PCIE_4 = 19e9
PCIE_5 = 38e9
# From NVIDIA's data sheets. H200 and B200: the SXM modules of HGX boards. RTX PRO 6000: the workstation's. A100 64 GB: NVIDIA has
# no public data sheet for the card of CINECA's Leonardo; it has 124 multiprocessors where the others have 108, and four stacks of
# memory instead of five (arXiv:2307.16885).
CARDS = (
    Card("T4", 15.6e9, 65e12, 8.1e12, 320e9, PCIE_3, bf16=False),
    Card("RTX 3090", 25.4e9, 71e12, 35.6e12, 936e9, PCIE_4, nvlink=39e9),  # with a bridge
    Card("RTX 4090", 25.3e9, 165e12, 82.6e12, 1008e9, PCIE_4),
    Card("A10", 23.7e9, 125e12, 31.2e12, 600e9, PCIE_4),
    Card("L4", 23.6e9, 121e12, 30.3e12, 300e9, PCIE_4),
    Card("RTX 5090", 33.7e9, 209.5e12, 104.8e12, 1792e9, PCIE_5),
    Card("A100 40 GB", 42.2e9, 312e12, 19.5e12, 1555e9, PCIE_4, 210e9, has_nvlink=True),
    Card("A40", 47.7e9, 149.7e12, 37.4e12, 696e9, PCIE_4, nvlink=39e9),  # with a bridge, as the next one
    Card("RTX A6000", 50.9e9, 154.8e12, 38.7e12, 768e9, PCIE_4, nvlink=39e9),
    Card("RTX 6000 Ada", 50.9e9, 364.2e12, 91.1e12, 960e9, PCIE_4),
    Card("L40S", 47.7e9, 362e12, 91.6e12, 864e9, PCIE_4),
    Card("A100 64 GB", 68.1e9, 358e12, 22.4e12, 1640e9, PCIE_4, 210e9, has_nvlink=True),
    Card("A100 80 GB", 84.9e9, 312e12, 19.5e12, 2039e9, PCIE_4, 210e9, has_nvlink=True),
    Card("H100 80 GB", 84.9e9, 989e12, 67e12, 3350e9, PCIE_5, 315e9, has_nvlink=True),
    Card("H100 PCIe", 84.9e9, 756e12, 51e12, 2000e9, PCIE_5, 210e9),
    Card("H100 NVL", 99.9e9, 835e12, 60e12, 3900e9, PCIE_5, 210e9),
    Card("GH200", 101.5e9, 989e12, 67e12, 4000e9, PCIE_5, 315e9),
    Card("RTX PRO 6000", 101.9e9, 503.8e12, 126e12, 1792e9, PCIE_5),
    Card("H200", 150.1e9, 989e12, 67e12, 4800e9, PCIE_5, 315e9, has_nvlink=True),
    Card("B200", 191.5e9, 2250e12, 80e12, 8000e9, PCIE_5, 630e9, has_nvlink=True),
)


def card_of_user(name: str, gigabytes: float, teraflops: float, gigabytes_per_second: float) -> Card:
    """The card of --card: it connects over PCIe, and its float32 rate is a sixteenth, as on an A100."""
    return Card(name, gigabytes * GB, teraflops * 1e12, teraflops * 1e12 / 16, gigabytes_per_second * 1e9, PCIE_4)


def find_card(name: str, all_cards: tuple[Card, ...] = CARDS) -> Card:
    """The card of a name like 3090, a100-80gb or "RTX 4090", or of the beginning of one.

    If several names begin so, it is the card with the least memory. Raises UserError if there is none.
    """
    wanted = plain_name(name)
    known = sorted(all_cards, key=lambda card: card.memory)
    found = [card for card in known if plain_name(card.name).startswith(wanted)] if wanted else []
    if found:
        return next((card for card in found if plain_name(card.name) == wanted), found[0])
    raise UserError(
        f"{name} is not a known GPU, expected one of {', '.join(card.name for card in known)}, or describe it: "
        f"--card {name.strip().replace(' ', '')}=48,155,768 (GB, TFLOPS, GB/s)"
    )


def plain_name(name: str) -> str:
    """A card's name in small letters and digits, without makers and units."""
    return re.sub(r"nvidia|geforce|rtx|tesla|gb|[^a-z0-9]", "", name.lower())


def card_of_gpu(name: str, memory: float, has_bf16: bool, all_cards: tuple[Card, ...] = CARDS) -> Card:
    """The card that nvidia-smi calls `name`, with `memory` bytes; one that is unknown, with the rates of an RTX 3090 or a T4."""
    parts = set(re.split(r"[^a-z0-9]+", name.lower()))
    found = []
    for card in all_cards:
        words = set(re.sub(r"\d+ gb", "", card.name.lower()).split()) - {"rtx"}
        is_named = words <= parts or plain_name(card.name) == plain_name(name)  # that of --card is one word
        if is_named and 0.9 < card.memory / memory < 1.05:
            found.append((len(words), card))  # "H100 PCIe" has more words of a name than "H100 80 GB"
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    slower = find_card("3090" if has_bf16 else "T4")
    return dataclasses.replace(slower, name=name.removeprefix("NVIDIA "), memory=0.985 * memory)
