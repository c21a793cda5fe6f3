"""The functions that a recipe calls: `parse`, `load`, `load_tokenizer`, `tokenize` and `train`,
and for images `load_processor` and `image_collator`.

`import harness` does not import torch; the first import of one of these functions does.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from harness import launched, torchvision_operators
from harness.messages import exit_on_user_error

if TYPE_CHECKING:  # for editors, which do not call `__getattr__`
    from harness.data.images import image_collator as image_collator
    from harness.data.loading import load as load
    from harness.data.tokenization import load_processor as load_processor
    from harness.data.tokenization import load_tokenizer as load_tokenizer
    from harness.data.tokenization import tokenize as tokenize
    from harness.start.recipes import parse as parse
    from harness.start.recipes import train as train

launched.begin()
torchvision_operators.install()  # in an environment that launch.sh has not made
# On a CPU with bf16 arithmetic, bitsandbytes logs in every process that it misses a package that training does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# Offline, `kernels` reports that it did not check the publisher of a kernel; it did when the kernel was downloaded.
logging.getLogger("kernels.hf_hub").addFilter(lambda record: "offline mode" not in record.getMessage())

# Where they are. docs/your-recipe.md has a complete recipe, and what each expects.
MODULES = {
    "parse": "harness.start.recipes",
    "load": "harness.data.loading",
    "load_tokenizer": "harness.data.tokenization",
    "load_processor": "harness.data.tokenization",
    "tokenize": "harness.data.tokenization",
    "image_collator": "harness.data.images",
    "train": "harness.start.recipes",
}
__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    """One of these functions, for a recipe: a UserError in it ends the process with one message."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return exit_on_user_error()(getattr(importlib.import_module(MODULES[name]), name))
