"""Changes to datasets."""

import functools
import json
from pathlib import Path
from typing import Any

from harness.compat.guards import changes


@changes("datasets:Dataset.map")
def map_in_one_process() -> None:
    """Makes `Dataset.map` do the same work in one process at a time: the first computes, the others wait and read its cache.

    All processes of a run call it in the same lines of a recipe. They find no cache yet, so each would compute everything. A
    barrier before the others, `main_process_first`, would have to be in every recipe, and hangs where only one process maps.
    Upstream: no issue found.
    Checked with: datasets 5.2.0.
    Remove when: `map` locks the file that it writes.
    """
    from datasets import Dataset
    from datasets.fingerprint import Hasher, generate_fingerprint
    from filelock import FileLock

    before = Dataset.map

    @functools.wraps(before)
    def map_once(self: Dataset, *args: Any, **options: Any) -> Dataset:
        files = self.cache_files
        if not files or options.get("keep_in_memory") or options.get("load_from_cache_file") is False:
            return before(self, *args, **options)
        try:
            key = Hasher.hash([generate_fingerprint(self), args, sorted(options.items())])
        except Exception:  # what cannot be pickled has no place in the cache
            return before(self, *args, **options)
        with FileLock(Path(files[0]["filename"]).with_name(f"map-{key}.lock"), is_singleton=True):
            return before(self, *args, **options)

    Dataset.map = map_once


@changes(
    "datasets.features.features:ujson_dumps",
    "datasets.features.features:ujson_loads",
    "datasets.utils.json:ujson_dumps",
    "datasets.utils.json:ujson_loads",
)
def store_json_exactly() -> None:
    """Makes columns of the type `Json` give the numbers that were put into them.

    pandas writes ten decimals of each float, and no integer of more than 64 bits. It reads such integers wrapped
    (25000000000000000000 becomes 6553255926290448384) or refuses them, and one in seven floats of 16 digits becomes a neighbour.
    Upstream: no issue found.
    Checked with: datasets 5.2.0.
    Remove when: datasets has `json.dumps` and `json.loads` instead.
    """
    from datasets.features import features
    from datasets.utils import json as json_of_datasets

    for module in (features, json_of_datasets):
        module.ujson_dumps = functools.partial(json.dumps, ensure_ascii=False, default=str)
        module.ujson_loads = json.loads
