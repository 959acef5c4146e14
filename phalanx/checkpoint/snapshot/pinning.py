"""Page-locked memory: what a device copies into by itself, while threads do something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Pinned:
    """Some host memory that may be page-locked for CUDA, and is not to begin with.

    Args:
        memory: bytes; kept alive by this.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._refused = False
        self.is_pinned = False

    def pin(self) -> None:
        """Page-lock it; where the system refuses (a limit of locked memory), it stays as it is, and is slower."""
        if self.is_pinned or self._refused or not self._memory.nbytes:
            return
        error = _runtime().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
        self._refused = int(error) != 0
        self.is_pinned = not self._refused

    def close(self) -> None:
        """Unlock it; no copy may be under way."""
        if self.is_pinned:
            _runtime().cudaHostUnregister(self._memory.data_ptr())
        self.is_pinned = False
        self._memory = torch.empty(0)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
