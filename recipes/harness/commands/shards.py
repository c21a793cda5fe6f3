"""A model written piece by piece: safetensors files of a few gigabytes, and the index that `from_pretrained` reads."""

from pathlib import Path

from harness.folder import write_json


class Shards:
    """Holds one file's tensors at a time. `size` is in bytes of weights a file."""

    def __init__(self, folder: Path, size: int = 2_000_000_000):
        self.folder, self.size, self.index, self.waiting = folder, size, {}, {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: dict):
        self.waiting |= tensors
        if sum(tensor.nbytes for tensor in self.waiting.values()) > self.size:
            self._write()

    def _write(self):
        file = f"model-{len(set(self.index.values())) + 1:05}.safetensors"
        save(self.waiting, self.folder / file)
        self.index |= dict.fromkeys(self.waiting, file)
        self.waiting = {}

    def close(self):
        if self.waiting:
            self._write()
        write_json(self.folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": self.index})


def save(tensors: dict, path: Path):
    """A file for whoever may read its folder; safetensors makes it one for its owner alone."""
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)
