"""Makes the import of torch an error, in the process that runs this file, or in every Python with this folder in PYTHONPATH.

`importlib.util.find_spec("torch")` still finds it.
"""

import sys
from importlib.machinery import PathFinder


class TorchLoader:
    @staticmethod
    def create_module(spec):
        raise RuntimeError("a test with the mark `unit` imports torch, in its process or in one that it starts")

    @staticmethod
    def exec_module(module):
        pass


class TorchFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name) if name == "torch" else None
        if spec:
            spec.loader = TorchLoader
        return spec


sys.meta_path.insert(0, TorchFinder)
