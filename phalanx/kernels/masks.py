"""Attention masks: a causal mask, with an optional sliding window and document boundaries, built once per forward.

FlexAttention's block mask is made straight from where documents begin and end. torch's own ``create_block_mask``
evaluates the mask of every pair of positions first: 2.6 GiB at 16,384 positions on a GPU. Here a block of 128 x 128 is
judged by its corners: by the first and last position of its queries and keys, and by the first and last document among
them. Memory is that of the blocks, 16,384 times less.

Shapes: B batch, S queries, K keys (S <= K: the queries are the last S positions of the keys); of block masks Q and K
are blocks of queries and of keys.
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
    positions earlier, and lies in the same document (``documents_BS``: (B, K) integers; None for one document). What a
    back end needs (a boolean tensor, the tensors of chunks, a FlexAttention block mask) is made on first use and kept
    (see `remember`).

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
        # A window as long as the keys hides nothing; without it kernels can use their own causal flag.
        self.window = None if window is None or window >= key_length else window
        self.documents_BS = documents_BS
        self._made: dict[Hashable, Any] = {}

    @property
    def is_plain_causal(self) -> bool:
        """Whether nothing but causality restricts attention, so that a kernel's own causal flag is enough."""
        # torch's `is_causal` aligns queries with the first keys, so it is wrong where there are more keys than queries.
        return self.window is None and self.documents_BS is None and self.query_length == self.key_length

    @property
    def sees_everything(self) -> bool:
        """Whether a single query sees every key (a step of generation), so that no mask is needed."""
        return self.window is None and self.documents_BS is None and self.query_length == 1

    def block(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """The mask of some queries (by position among the keys) and some keys: bool (B or 1, 1, q, k), True = seen."""
        key = ("block", queries.start, queries.stop, keys.start, keys.stop, device)
        block: Tensor = self.remember(key, lambda: seen_keys(queries, keys, self.window, self.documents_BS, device))
        return block

    def bias(self, queries: slice, keys: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """:meth:`block` as what is added to the scores: 0 where seen, -inf elsewhere.

        Without documents a block depends on relative positions alone, so that blocks of one shape share a tensor.
        """
        if self.documents_BS is None:
            shift = keys.start
            queries, keys = slice(queries.start - shift, queries.stop - shift), slice(0, keys.stop - shift)

        def make() -> Tensor:
            seen = seen_keys(queries, keys, self.window, self.documents_BS, device)
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
        """What ``make()`` returned when it was first asked for under ``key``; what compiled code makes is not kept.

        A tensor that compiled code made must not leave it by a way that the compiler does not see, and code for "not
        kept yet" would be compiled anew for "kept already". There it is made again, fused into what uses it.
        """
        if key in self._made:
            return self._made[key]
        made = make()
        if not torch.compiler.is_compiling():
            self._made[key] = made
        return made


def seen_keys(
    queries: slice, keys: slice, window: int | None, documents_BS: Tensor | None, device: torch.device
) -> Tensor:
    """Which keys some queries see, all by their positions in a sequence: bool (B or 1, 1, q, k)."""
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)[None, :]
    seen = j <= i
    if window is not None:
        seen = seen & (i - j < window)
    if documents_BS is None:
        return seen[None, None]
    documents = documents_BS.to(device)
    return ((documents[:, queries, None] == documents[:, None, keys]) & seen)[:, None]


BLOCK = 128
"""Positions of a block: FlexAttention's own choice."""


def flex_mask(mask: AttentionMask, device: torch.device) -> Any:
    """The ``BlockMask`` of `mask`, made when it is first asked for."""

    def make() -> Any:
        queries, keys = _ranges(mask)
        documents = mask.documents_BS
        if documents is None:
            seen = _seen(queries.start, mask.window)
        else:
            documents = documents.to(device)
            mine = documents[:, queries.start :] if queries.start else documents
            seen = _seen(queries.start, mask.window, mine, documents)
        return _assembled(block_kinds(mask, device), queries, keys, seen)

    return mask.remember(("flex", device), make)


def block_mask(
    queries: range, keys: range, window: int | None, documents_BS: Tensor | None, device: torch.device
) -> Any:
    """The ``BlockMask`` of some queries on some keys, by their positions in a sequence.

    Blocks of equally many queries and keys share one compiled kernel, wherever they lie.
    """
    # On the device, since the compiler makes another kernel for every number that it sees.
    shift = torch.full((), queries.start - keys.start, dtype=torch.int32, device=device)
    if documents_BS is None:
        return _assembled(_kinds(queries, keys, window, None, device), queries, keys, _seen(shift, window))
    here = documents_BS.to(device)
    mine, theirs = here[:, queries.start : queries.stop], here[:, keys.start : keys.stop]
    kinds = _kinds(queries, keys, window, (mine, theirs), device)
    return _assembled(kinds, queries, keys, _seen(shift, window, mine, theirs))


def _ranges(mask: AttentionMask) -> tuple[range, range]:
    return range(mask.key_length - mask.query_length, mask.key_length), range(mask.key_length)


def _assembled(kinds: tuple[Tensor, Tensor], queries: range, keys: range, seen: Any) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    # FlexAttention evaluates `mask_mod` only in the partial blocks; full ones are computed without it.
    partial, full = kinds
    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(len(queries), len(keys))
    )


def _seen(shift: int | Tensor, window: int | None, mine: Tensor | None = None, theirs: Tensor | None = None) -> Any:
    """Whether a query sees a key, as FlexAttention asks it; `shift`: first query's position less first key's."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        position = i + shift
        allowed = j <= position
        if window is not None:
            allowed = allowed & (position - j < window)
        return allowed if mine is None or theirs is None else allowed & (mine[b, i] == theirs[b, j])

    return seen


def block_kinds(mask: AttentionMask, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which blocks are seen in part, and which as a whole: bool (B or 1, 1, Q, K) each.

    Exact where the numbers of documents rise along a sequence, as those of batches do; where they come in any order,
    a block of which nothing is seen may be called one that is seen in part, which costs time alone.
    """
    queries, keys = _ranges(mask)
    if mask.documents_BS is None:
        return _kinds(queries, keys, mask.window, None, device)
    documents = mask.documents_BS.to(device)
    return _kinds(queries, keys, mask.window, (documents[:, queries.start :], documents), device)


def _kinds(
    queries: range, keys: range, window: int | None, documents: tuple[Tensor, Tensor] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    first_q, last_q = _ends(queries.start, queries.stop, device)
    first_k, last_k = _ends(keys.start, keys.stop, device)
    first_q, last_q = first_q[:, None], last_q[:, None]
    # By corners: a block has something to see if its last query sees its first key, and is seen as a whole if its first
    # query sees its last key. A block that the end of the sequence cuts short is never whole.
    some = first_k <= last_q
    whole = (last_k <= first_q) & (last_q - first_q + 1 == BLOCK) & (last_k - first_k + 1 == BLOCK)
    if window is not None:
        some = some & (first_q - last_k < window)
        whole = whole & (last_q - first_k < window)
    if documents is None:
        some, whole = some[None], whole[None]
    else:
        (least_q, most_q), (least_k, most_k) = (_extremes(x) for x in documents)
        # Two blocks share a document if their ranges of documents overlap, and share nothing else if both ranges are
        # that one.
        least_q, most_q = least_q[:, :, None], most_q[:, :, None]
        least_k, most_k = least_k[:, None], most_k[:, None]
        some = some & (least_k <= most_q) & (least_q <= most_k)
        whole = whole & (least_k == most_q) & (least_q == most_k)
    return (some & ~whole)[:, None], whole[:, None]


def _ends(begin: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(begin, end, BLOCK, device=device)
    return first, (first + (BLOCK - 1)).clamp(max=end - 1)


def _extremes(documents_BS: Tensor) -> tuple[Tensor, Tensor]:
    # Filled up with the last document, which changes neither the least nor the greatest of the last block.
    missing = -documents_BS.shape[1] % BLOCK
    filled = torch.cat([documents_BS, documents_BS[:, -1:].expand(-1, missing)], dim=1) if missing else documents_BS
    least, most = filled.view(len(filled), -1, BLOCK).aminmax(dim=2)
    return least, most


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row there are, and their columns, those first, in order: both int32."""
    # Stable, so that columns of one kind stay in ascending order.
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), columns.to(torch.int32)
