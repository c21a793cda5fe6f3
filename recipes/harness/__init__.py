"""What happens around every recipe. A recipe uses two names: `parse` and `train`.

Importing this package is cheap: torch and the rest are loaded by the first call.
"""

import logging

# Where the CPU has bf16 arithmetic, bitsandbytes asks for a package, in every process, that training does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def parse(config_class, **defaults):
    """See `harness.start.arguments.parse`."""
    from harness.start.arguments import parse

    return parse(config_class, **defaults)


def train(trainer):
    """See `harness.run.session.train`."""
    from harness.run.session import train

    return train(trainer)


__all__ = ["parse", "train"]
