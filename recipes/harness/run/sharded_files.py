"""Finds code in a sharded checkpoint before torch would run it.

torch.distributed.checkpoint unpickles `.metadata`, and entries that are not tensors, such as a learning rate, in files `.distcp`.
Both can call any function (torch 2.13: `FileSystemReader.read_metadata`, `DefaultLoadPlanner.load_bytes`). It reads tensors, and
transformers reads its other files, with `weights_only=True`.
"""

import io
import pickle
from pathlib import Path

from harness.compat.torch import CheckedUnpickler, Refused
from harness.folder import best_checkpoint, read_json
from harness.messages import UserError

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

METADATA = "torch.distributed.checkpoint.metadata"
# What torch writes into `.metadata`, besides dtypes.
ALLOWED = {
    METADATA: (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


def is_allowed(module: str, name: str) -> bool:
    return name in ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))


def check_sharded_files(checkpoint: Path) -> None:
    """Raises UserError if a file of a checkpoint would run code when torch reads it, which no run writes.

    Also for the best checkpoint that its trainer_state.json names, which --load_best_model_at_end reads.
    """
    saved = read_json(checkpoint / "trainer_state.json").get("best_model_checkpoint")
    for folder in filter(None, (checkpoint, best_checkpoint(checkpoint.parent, saved))):
        for path in sorted(folder.rglob("*")):
            try:
                _check_path(path)
            except Exception as error:  # a damaged pickle can raise any error
                raise UserError(
                    f"{path} was not written by a run, and reading it could run code: {type(error).__name__}: {error}. Nothing "
                    "was loaded. Delete the checkpoint, unless you can restore it from a copy that you trust"
                ) from error


def _check_path(path: Path) -> None:
    """Reads the entries that are not tensors, if `path` says where they are, without running code."""
    if path.is_symlink() and path.is_dir():
        raise Refused("a link to a folder")  # `rglob` does not follow it, and torch does
    if not path.name.endswith(".metadata"):  # torch also reads `__RANK.metadata`
        return
    with path.open("rb") as file:
        metadata = CheckedUnpickler(file, is_allowed).load()
    for name in ("storage_data", "state_dict_metadata"):
        if type(getattr(metadata, name)) is not dict:
            raise TypeError(f"{name} is no dictionary")
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
            continue
        file = path.parent / place.relative_path
        if file.parent != path.parent or place.transform_descriptors:
            raise Refused(f"an entry in {place.relative_path} {place.transform_descriptors or ''}".strip())
        if not file.is_file():  # the best checkpoint, on a disk of each node's own, has that node's files only
            continue
        with file.open("rb") as entries:
            entries.seek(place.offset)
            content = io.BytesIO(entries.read(place.length))
        try:
            torch.load(content, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise Refused(f"code in {file.name}") from error
