"""Bytes of all tensors that a thread made and that are still alive, after every operator that it runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Follows the storages of what operators give, forward and backward, until these are freed.

    What an operator needs inside of itself, and gives back before it ends, is not seen.

    Args:
        resized: storages may change their size (ZeRO-3's weights): all are weighed after every operator, which is slow.

    Attributes:
        peak: most bytes after any operator since `forget_peak`.
    """

    def __init__(self, resized: bool = False) -> None:
        super().__init__()
        self._resized = resized
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._total = 0
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return sum(storage.nbytes() for ref, _ in list(self._storages.values()) if (storage := ref()) is not None)

    def forget_peak(self) -> None:
        """Begin anew."""
        self.peak = self._total = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and take note of what it gave."""
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._see(value.untyped_storage())
        self.peak = max(self.peak, self.now if self._resized else self._total)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        known = self._storages.get(key)
        if known is not None and known[0]() is storage:
            return
        self._forget(key)
        self._storages[key] = weakref.ref(storage, lambda _, key=key: self._forget(key)), storage.nbytes()
        self._total += storage.nbytes()

    def _forget(self, key: int) -> None:
        _, size = self._storages.pop(key, (None, 0))
        self._total -= size


def bytes_of(tensors: Any) -> int:
    """Bytes of the storages behind some tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
