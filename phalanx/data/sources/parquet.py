"""Parquet sources, through pyarrow (an optional package)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.core.errors import UserError

ROWS = 256


def cut_row_groups(path: str, target_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a Parquet file into runs ``(first row group, end, bytes)`` of about `target_bytes`."""
    metadata = open_parquet(path).metadata
    begin, size = 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= target_bytes or group + 1 == metadata.num_row_groups:
            yield begin, group + 1, size
            begin, size = group + 1, 0


def open_parquet(path: str) -> Any:
    """A `pyarrow.parquet.ParquetFile`.

    Raises:
        UserError: pyarrow is not installed, or the file is no Parquet.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        cure = "install it: pip install 'phalanx-train[parquet]'"
        raise UserError("reading Parquet needs the package pyarrow", cure=cure, value=path) from None
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(f"is no readable Parquet file ({error})", cure="check the file", value=path) from None


def parquet_rows(
    path: str, begin_group: int, end_group: int, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(row number in the file, {column: value})`` of some row groups, a few rows in memory at a time.

    A column that is not in the file is left out of the rows.

    Raises:
        UserError: the file is damaged, or a text in it is not UTF-8.
    """
    file = open_parquet(path)
    row = sum(file.metadata.row_group(group).num_rows for group in range(begin_group))
    there = [column for column in columns if column in file.schema_arrow.names]
    groups = list(range(begin_group, end_group))
    batches = file.iter_batches(batch_size=ROWS, row_groups=groups, columns=there, use_threads=False)
    while True:
        try:
            batch = next(batches, None)
            records = [] if batch is None else batch.to_pylist() if there else [{}] * batch.num_rows
        except (OSError, ValueError) as error:  # damaged, or a text that is not UTF-8
            cure = "write the file again, its text as UTF-8"
            raise UserError(f"from row {row} on cannot be read ({error})", cure=cure, value=path) from None
        if batch is None:
            return
        for record in records:
            yield row, record
            row += 1
