"""The columns of Parquet and Arrow files that are one dataset: types that all their values fit, without a loss."""

from pathlib import Path
from typing import Any

from harness.messages import UserError

import pyarrow
from datasets import Features, LargeList, List, Value
from pyarrow import ArrowException, parquet


def schema_of(file: str, kind: str) -> pyarrow.Schema:
    """`kind`: parquet or arrow."""
    if kind == "parquet":
        return parquet.read_schema(file)
    with Path(file).open("rb") as opened:
        try:
            return pyarrow.ipc.open_stream(opened).schema
        except (OSError, ArrowException):
            return pyarrow.ipc.open_file(opened).schema


class Columns:
    """The columns of all files so far. A file can lack some of them, or have only nulls or whole numbers in one."""

    def __init__(self) -> None:
        self.features, self._files = Features(), {}

    def add(self, file: str, schema: pyarrow.Schema) -> None:
        """Raises UserError if a column has another type in this file than in an earlier one, and no type fits both.

        Of files on the Hub the first type is kept: a user cannot change them, and their rows are not cast.
        """
        for name, feature in Features.from_arrow_schema(schema).items():
            known = self.features.get(name, Value("null"))
            merged = merge(known, feature)
            if merged is None and "://" in file:
                continue
            if merged is None:
                raise UserError(
                    f"{file}: the column {name} is {in_words(feature)}, but {in_words(known)} in {self._files[name]}: write both "
                    "files with one type, or leave out the column"
                )
            if merged != known or name not in self.features:
                self.features[name] = merged
                self._files[name] = file


def merge(one: Any, other: Any) -> Any:
    """The feature that values of both features fit, None if there is none."""
    if one == other or other == Value("null"):
        return one
    if one == Value("null"):
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        fields = {name: merge(one.get(name, Value("null")), other.get(name, Value("null"))) for name in one | other}
        return None if None in fields.values() else fields
    if isinstance(one, List | LargeList) and isinstance(other, List | LargeList):
        inner = merge(one.feature, other.feature)
        lengths = {getattr(kind, "length", -1) for kind in (one, other)}  # -1: any
        is_large = isinstance(one, LargeList) or isinstance(other, LargeList)
        if inner is None:
            return None
        return LargeList(inner) if is_large else List(inner, length=lengths.pop() if len(lengths) == 1 else -1)
    if not (isinstance(one, Value) and isinstance(other, Value)):
        return None
    schemas = [pyarrow.schema([("value", feature.pa_type)]) for feature in (one, other)]
    try:
        merged = pyarrow.unify_schemas(schemas, promote_options="permissive")
    except ArrowException:
        return None
    merged = Features.from_arrow_schema(merged)["value"]
    return None if ("string" in one.dtype) != ("string" in merged.dtype) else merged  # a text would become bytes


def in_words(feature: Any) -> str:
    """A type, such as int64, list of string or object."""
    if isinstance(feature, List | LargeList):
        return f"list of {in_words(feature.feature)}"
    if isinstance(feature, dict):
        return f"object ({', '.join(f'{name}: {in_words(part)}' for name, part in feature.items())})"
    return getattr(feature, "dtype", None) or type(feature).__name__
