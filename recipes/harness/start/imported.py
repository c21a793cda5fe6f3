"""What every process of a run imports. The launcher imports it once, before it forks the server of all processes.

A fork copies locks but not the threads that hold them, and CUDA does not survive one. So nothing here starts a thread of
Python's or touches a GPU. (OpenBLAS and Arrow's allocator have threads; both look after a fork by pthread_atfork.)
"""

import gc
import importlib.machinery
import importlib.util
import sys
import threading

PROBLEM = ""  # why a process that has imported this must not fork


class LaterBitsandbytes:
    """bitsandbytes asks every GPU for its capability while it is imported, so it is executed by whoever first uses it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "bitsandbytes":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


gc.disable()  # thousands of modules make many objects and no garbage
sys.meta_path.insert(0, LaterBitsandbytes)
try:
    import harness.run.session
    import harness.start.arguments  # noqa: F401

    import torch
    import trl.trainer.sft_trainer  # noqa: F401

    if torch.cuda.is_initialized():
        PROBLEM = "an import has touched the GPUs"
    elif threading.active_count() > 1:
        PROBLEM = "an import has started a thread"
except Exception as error:  # a process that starts anew meets it again, and shows it whole
    PROBLEM = repr(error)
finally:
    sys.meta_path.remove(LaterBitsandbytes)
    gc.enable()
    gc.freeze()  # or the first collection of every process would copy all pages
