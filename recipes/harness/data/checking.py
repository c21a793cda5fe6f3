"""Checks of the datasets before a run: every split exists, and its rows can be read and converted."""

from harness.data import reading
from harness.data.conversion import Conversion, PlacedRow, find_conversion
from harness.data.loading import (
    Rows,
    check_same_format,
    examine_all,
    features_of,
    one_of_every_kind,
    open_dataset,
    placed,
    without_decoding,
)
from harness.data.reading import TextFiles
from harness.data.sources import DataSettings, Source
from harness.data.splits import check_splits, evaluation_split
from harness.hub import without_progress_bars
from harness.messages import UserError

import datasets
from huggingface_hub.constants import HF_HUB_OFFLINE


@without_progress_bars(datasets)  # an error of a check is one line
def check_dataset(data: DataSettings) -> list[PlacedRow]:
    """Raises UserError unless every split that is used exists and has rows in a fitting format, the same in all datasets.

    Returns some converted rows of the training splits, of small files one of every kind of conversation; [] if nothing can be
    checked, offline.
    """
    for name in ("max_samples", "max_eval_samples"):
        value = getattr(data, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}, expected 1 or more")
    rows = []
    found = []
    unmapped = set(data.column_map or {})
    for source in data.sources:
        if checked := check_source(data, source):
            conversion, some = checked
            rows += some
            found.append((conversion.format, source.display_name))
            unmapped -= set(conversion.column_map or {})
    if unmapped and found:
        raise UserError(f"--column_map: no dataset has a column {sorted(unmapped)[0]}")
    check_same_format(found)
    return rows


def check_source(data: DataSettings, source: Source) -> tuple[Conversion, list[PlacedRow]] | None:
    """See `check_dataset`; of one dataset. Returns how it is converted, and some converted rows; None if that is not known."""
    is_local = reading.is_local(source.name)
    is_small = reading.is_small(source.name)
    if HF_HUB_OFFLINE and data.streaming and not is_local:
        return None  # only `datasets` can tell what its cache holds
    # Streaming downloads no more than it reads. Offline, only a dataset that is cached as a whole opens.
    splits = open_dataset(source, streaming=not is_small and (is_local or not HF_HUB_OFFLINE))
    if data.formats:
        splits = {split: without_decoding(rows, "images" in data.formats) for split, rows in splits.items()}
    test = evaluation_split(source, splits, data.needs_test_split)
    check_splits(source, test, splits, data.needs_test_split)
    if test in splits:
        check_rows(data, source, splits[test], test, is_small)
    return check_rows(data, source, splits[source.train_split], source.train_split, is_small)


def check_rows(data: DataSettings, source: Source, rows: Rows, split: str, is_small: bool) -> tuple[Conversion, list[PlacedRow]]:
    """Raises UserError unless the first rows of a split, of small files all, can be read and converted."""
    conversion, first = find_conversion(data, source, placed(rows, source, split), features_of(rows))
    if not is_small or not conversion.format:
        if is_small and isinstance(rows, TextFiles):
            rows.as_dataset(data.streaming)
        return conversion, first.converted
    examined = examine_all(rows, conversion, source, split)  # a run that does not stream reads the result from the cache
    return conversion, first.converted + one_of_every_kind(examined)
