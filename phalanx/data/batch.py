"""What the loader hands to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Some samples. Shape letters: B samples, S positions.

    Attributes:
        tokens_BS: int64, the input of the model.
        targets_BS: int64, the token that follows each.
        weights_BS: float32, how much each target counts: 1, or 0 where the loss mask or padding is.
        documents_BS: int32, the number of each position's document within its sample, rising from 0; None when
            attention does not stop at documents.
        sample_index_B: int64, the place of each sample in the global order (in the pass, for validation; -1: padding).
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    weights_BS: Tensor
    documents_BS: Tensor | None
    sample_index_B: Tensor

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """All but documents that are None."""
        known = (self.tokens_BS, self.targets_BS, self.weights_BS, self.documents_BS, self.sample_index_B)
        return tuple(tensor for tensor in known if tensor is not None)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        documents = None if self.documents_BS is None else change(self.documents_BS)
        before = (change(self.tokens_BS), change(self.targets_BS), change(self.weights_BS))
        return Batch(*before, documents, change(self.sample_index_B))

    def rows(self, begin: int, end: int) -> Batch:
        """Samples ``begin..end`` of this batch, without a copy."""
        return self._each(lambda tensor: tensor[begin:end])

    def filled(self, size: int) -> Batch:
        """This batch with `size` rows: those that are missing repeat the first with weight 0 and sample index -1."""
        missing = size - len(self)
        if missing <= 0:
            return self

        def grow(rows: Tensor, factor: float) -> Tensor:
            return torch.cat([rows, (rows[:1] * factor).to(rows.dtype).expand(missing, *rows.shape[1:])])

        return Batch(
            grow(self.tokens_BS, 1),
            grow(self.targets_BS, 1),
            grow(self.weights_BS, 0),
            None if self.documents_BS is None else grow(self.documents_BS, 1),
            torch.cat([self.sample_index_B, self.sample_index_B.new_full((missing,), -1)]),
        )

    def to(self, device: torch.device | str) -> Batch:
        """This batch on `device`, copied without waiting where memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory, from where a GPU can copy it while it computes."""
        return self._each(Tensor.pin_memory)
