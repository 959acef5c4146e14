"""Who attends to whom: a causal mask with an optional sliding window and document boundaries, built once per forward.

Shapes: B batch, S queries, K keys (S <= K: the queries are the last S positions of the keys).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import UserError


class AttentionMask:
    """The mask of one kind of attention layer in one forward; layers of that kind share it.

    Query i (position ``key_length - query_length + i``) sees key j when j is not later, is less than ``window``
    positions earlier, and lies in the same document. What a back end needs (a boolean tensor, the tensors of chunks, a
    FlexAttention block mask) is made on first use and kept.

    Args:
        query_length: S.
        key_length: K, at least S.
        window: number of positions a query sees, itself included; None for all.
        documents_BS: (B, K) integer document identity of every key position; None for one document.

    Raises:
        UserError: the lengths, the window or the documents do not fit together.
    """

    def __init__(
        self, query_length: int, key_length: int, *, window: int | None = None, documents_BS: Tensor | None = None
    ) -> None:
        if query_length > key_length:
            raise UserError(
                f"{query_length} queries are more than {key_length} keys", cure="pass the keys of every query position"
            )
        if window is not None and window < 1:
            raise UserError("a window must let a query see itself", cure="use 1 or more", field="window", value=window)
        if documents_BS is not None and documents_BS.shape[-1] != key_length:
            raise UserError(
                f"documents of shape {tuple(documents_BS.shape)} do not name {key_length} key positions",
                cure="give one document identity per key position",
                field="documents",
            )
        self.query_length = query_length
        self.key_length = key_length
        self.window = None if window is None or window >= key_length else window
        self.documents_BS = documents_BS
        self._made: dict[Hashable, Any] = {}

    @property
    def is_plain_causal(self) -> bool:
        """True when nothing but causality restricts attention, so that a kernel's own causal flag says it all."""
        return self.window is None and self.documents_BS is None and self.query_length == self.key_length

    @property
    def sees_everything(self) -> bool:
        """True when a single query sees every key (a step of generation), so that no mask is needed."""
        return self.window is None and self.documents_BS is None and self.query_length == 1

    def block(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """The mask of some queries (by position among the keys) and some keys: bool (B or 1, 1, q, k), True = seen."""
        key = ("block", queries.start, queries.stop, keys.start, keys.stop, device)
        block: Tensor = self.remember(key, lambda: self._block(queries, keys, device))
        return block

    def _block(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        i = torch.arange(queries.start, queries.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)[None, :]
        seen = j <= i
        if self.window is not None:
            seen = seen & (i - j < self.window)
        if self.documents_BS is None:
            return seen[None, None]
        documents = self.documents_BS.to(device)
        return ((documents[:, queries, None] == documents[:, None, keys]) & seen)[:, None]

    def bias(self, queries: slice, keys: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """:meth:`block` as what is added to the scores: 0 where seen, -inf elsewhere.

        Without documents a block depends on relative positions alone, so that blocks of one shape share a tensor.
        """
        if self.documents_BS is None:
            shift = keys.start
            queries, keys = slice(queries.start - shift, queries.stop - shift), slice(0, keys.stop - shift)

        def make() -> Tensor:
            seen = self._block(queries, keys, device)
            return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))

        key = ("bias", queries.start, queries.stop, keys.start, keys.stop, dtype, device)
        bias: Tensor = self.remember(key, make)
        return bias

    def dense(self, device: torch.device) -> Tensor:
        """The whole mask: bool (B or 1, 1, S, K), True = seen."""
        return self.block(
            slice(self.key_length - self.query_length, self.key_length), slice(0, self.key_length), device
        )

    def remember(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make()`` returned when it was first asked for under ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
