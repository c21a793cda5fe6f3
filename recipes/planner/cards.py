"""The GPUs that --plan knows, and one that the user describes: memory, rates, and links between GPUs."""

import dataclasses
import re

from harness.messages import UserError

GB = 1e9
# Seconds in which a host starts a kernel, slow and fast: with the modules, autograd and autocast around it. Slow is what a
# virtual machine with an H100 took for 4-bit layers (see docs/measurements.md), fast is assumed of a desktop.
LAUNCH = (65e-6, 6e-6)


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
    launch: tuple[float, float] = LAUNCH


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
