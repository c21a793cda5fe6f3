"""The columns of Parquet and Arrow files that are one dataset: types that all their values fit."""

from collections.abc import Iterable
from pathlib import Path

from harness.messages import UserError

import pyarrow
from datasets import Features
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


def features_of_files(name: str, schemas: Iterable[pyarrow.Schema]) -> Features:
    """The columns of all files. A file can lack some of them, or have only nulls or whole numbers in one.

    `name`: of the dataset. Raises UserError if a column has types in two files that no type fits.
    """
    try:
        return Features.from_arrow_schema(pyarrow.unify_schemas(list(schemas), promote_options="permissive"))
    except ArrowException as error:
        raise UserError(
            f"--dataset_name: {name}: a column has different types in two files: {error}: write all files with one type"
        ) from error
