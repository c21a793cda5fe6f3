"""Changes to bitsandbytes."""

from harness.compat.guards import changes


@changes("bitsandbytes.nn.modules:has_avx512bf16()")
def keep_4bit_layout() -> None:
    """Keeps 4-bit weights on a CPU in the layout they were loaded in. Call it before 4-bit layers are made.

    On a CPU with AVX512-BF16, bitsandbytes repacks the weights in the first evaluation. Training and FSDP then read the new
    layout as the old one: the loss jumps from 8.0 to 9.0.
    Upstream: no issue found; bitsandbytes-foundation/bitsandbytes#2078 is about the same layout.
    Checked with: bitsandbytes 0.50.2.
    Remove when: repacked weights are unpacked again when the model returns to training.
    """
    from bitsandbytes.nn import modules

    modules.has_avx512bf16 = lambda: False
