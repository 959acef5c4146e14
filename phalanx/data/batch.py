"""What the loader hands to the training loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Some samples. Shape letters: B samples, S positions.

    Attributes:
        tokens_BS: int64, what the model reads.
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
        """Those that there are."""
        known = (self.tokens_BS, self.targets_BS, self.weights_BS, self.documents_BS, self.sample_index_B)
        return tuple(tensor for tensor in known if tensor is not None)

    def rows(self, begin: int, end: int) -> Batch:
        """Samples ``begin..end`` of this batch, without a copy."""
        return Batch(
            self.tokens_BS[begin:end],
            self.targets_BS[begin:end],
            self.weights_BS[begin:end],
            None if self.documents_BS is None else self.documents_BS[begin:end],
            self.sample_index_B[begin:end],
        )

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
        documents = None if self.documents_BS is None else self.documents_BS.to(device, non_blocking=True)
        return Batch(
            self.tokens_BS.to(device, non_blocking=True),
            self.targets_BS.to(device, non_blocking=True),
            self.weights_BS.to(device, non_blocking=True),
            documents,
            self.sample_index_B.to(device, non_blocking=True),
        )

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory, from where a GPU can copy it while it computes."""
        documents = None if self.documents_BS is None else self.documents_BS.pin_memory()
        return Batch(
            self.tokens_BS.pin_memory(),
            self.targets_BS.pin_memory(),
            self.weights_BS.pin_memory(),
            documents,
            self.sample_index_B.pin_memory(),
        )
