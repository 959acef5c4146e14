"""Parquet sources, through pyarrow (an optional package)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from phalanx.core.errors import UserError


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
