"""The files of a data set that lies on this machine: whether they have changed, which of them are read."""

from pathlib import Path

from harness import hub
from harness.data import FILES
from harness.launched import say

import xxhash
from datasets import load_dataset_builder

ENDS = 2**20  # bytes at each end of a file that tell whether it has changed


def digest(data) -> str:
    """Of their names, sizes, and the first and last MiB of each; "" for a data set of the hub."""
    path = data.path()
    if not path.exists():
        return ""
    found = xxhash.xxh3_64()
    for file in [path] if path.is_file() else _below(path):
        with hub.errors("data set", data.named), file.open("rb", buffering=0) as content:
            size = file.stat().st_size
            found.update(f"{file.relative_to(path.parent)} {size} ".encode())
            for start in sorted({0, max(0, size - ENDS)}):
                content.seek(start)
                found.update(content.read(ENDS))
    return found.hexdigest()


def name_those_passed_over(data):
    """Says which files of a folder are left out, for `datasets` reads those of one format."""
    path = data.path()
    if not path.is_dir():
        return
    with hub.errors("data set", data.named):
        chosen = load_dataset_builder(str(path), data.dataset_config).config.data_files or {}
    read = {Path(name) for names in chosen.values() for name in names}
    kinds = {suffix for file in read for suffix in file.suffixes}
    if left := sorted({file.suffix for file in _below(path) if file.suffix in FILES and file not in read} - kinds):
        say(f"Of {data.named} the {' and '.join(sorted(kinds))} files are read, none that end in {' or '.join(left)}.")


def _below(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("[!.]*")) if file.is_file()]
