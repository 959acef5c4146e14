"""Keys and values of earlier tokens, in buffers of fixed size: all steps of generation have the same addresses.

How many tokens a row has is known on the device, so that a step neither waits for the host nor differs from the one
before in anything that a CUDA graph holds on to.

Shapes: B batch rows, S new tokens, H query heads, K key/value heads, E head size, C slots of a layer, N keys in sight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig


class KVCache:
    """Keys and values of each row's tokens; a pass writes into them, and nothing grows.

    Slot c of a layer holds the newest token of a row whose position is c modulo the number of slots. A layer has as
    many slots as its window, or `max_length` rounded up for the kernels' sake.

    Args:
        config: the decoder's.
        batch: rows.
        max_length: tokens that a row will have at most.
        dtype: the decoder's compute dtype.

    Attributes:
        length_B: tokens of each row, int64 on the device.
        length: tokens of the longest row at most, as the host knows it.
    """

    def __init__(
        self, config: ModelConfig, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.max_length = max_length
        self.length = 0
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.rows_B = torch.arange(batch, device=device)
        # Attention looks at a power of two of keys: few shapes, and at most twice the keys that there are. A GPU holds
        # a graph for each, and reads 512 keys as fast as one.
        self._fewest_keys = 512 if torch.device(device).type == "cuda" else 64
        self._most_keys = -(-max_length // 64) * 64
        self.windows = [config.window_of(layer) for layer in range(config.layers)]
        slots = [min(window or self._most_keys, self._most_keys) for window in self.windows]
        shapes = [(2, batch, config.num_kv_heads, count, config.head_dim) for count in slots]
        # Zeros, since a slot that is not seen yet has the weight 0, and 0 times what lies in memory may be NaN.
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    def positions(self, new: int) -> Tensor:
        """(B, S) int64 positions of the next `new` tokens of each row."""
        return self.length_B[:, None] + torch.arange(new, device=self.length_B.device)

    def reach(self, new: int) -> int:
        """Keys that a pass of `new` tokens looks at, in layers that have as many slots."""
        reach = max(self._fewest_keys, 1 << (self.length + new - 1).bit_length())
        return min(reach, self._most_keys)

    def begin(self, new: int, lengths_B: Tensor | None) -> CachePass:
        """A pass of `new` tokens a row, of which `lengths_B` count (None: all).

        Raises:
            UserError: a row would have more than `max_length` tokens.
        """
        end = self.length + new
        if end > self.max_length:
            raise UserError(f"is too short for {end} tokens", cure="make the cache longer", value=self.max_length)
        return CachePass(self, new, lengths_B)

    def advance(self, new: int, lengths_B: Tensor | None) -> None:
        """Count the tokens of a pass, after all layers have taken them."""
        self.length_B.add_(new if lengths_B is None else lengths_B)
        self.length += new

    def clear(self) -> None:
        """Forget all tokens; their keys stay where they are, out of sight."""
        self.length = 0
        self.length_B.zero_()

    def newest(self, slots: int, length_B: Tensor) -> Tensor:
        """(B, C) position that each of `slots` slots holds in rows of `length_B` tokens; negative where it is empty."""
        slot_C = torch.arange(slots, device=length_B.device)
        turns = torch.div(length_B[:, None] - 1 - slot_C, slots, rounding_mode="floor")
        return slot_C + slots * turns


class CachePass:
    """One pass over a cache, with what its layers share, made once."""

    def __init__(self, cache: KVCache, new: int, lengths_B: Tensor | None) -> None:
        self._cache, self._new, self._lengths_B = cache, new, lengths_B
        self._shared: dict[tuple[str, int, int | None], Tensor] = {}

    def attend(self, layer: int, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, alone: Callable[[], Tensor]) -> Tensor:
        """Attention of a layer over the cached and the new keys, which are cached; (B, H, S, E).

        Args:
            alone: attention over the new keys alone, for a cache that has none.
        """
        kept, window = self._cache.layers[layer], self._cache.windows[layer]
        slots = kept.shape[3]
        if self._new == 1:
            return self._attend_one(kept, q_BHSE, k_BKSE, v_BKSE)
        if not self._cache.length:
            out = alone()
        else:
            reach = min(slots, self._cache.reach(0))
            k, v = (torch.cat([kept[i, :, :, :reach], x], dim=2) for i, x in enumerate((k_BKSE, v_BKSE)))
            bias = self._bias("many", slots, window, q_BHSE.dtype, lambda: self._sees_many(slots, reach, window))
            out = _attend(q_BHSE, k, v, bias)
        self._store_many(kept, k_BKSE, v_BKSE)
        return out

    def _attend_one(self, kept: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The new token is cached first; then everything in sight is in the cache, and nothing else."""
        cache, slots = self._cache, kept.shape[3]
        reach = min(slots, cache.reach(1))
        slot_B = self._made("slot", slots, lambda: cache.length_B.remainder(slots))
        for cached, x in zip(kept, (k, v), strict=True):
            cached.transpose(1, 2).index_put_((cache.rows_B, slot_B), x[:, :, 0])
        bias = self._bias("one", slots, None, q.dtype, lambda: self._sees_one(reach))
        return _attend(q, kept[0, :, :, :reach], kept[1, :, :, :reach], bias)

    def _sees_one(self, reach: int) -> Tensor:
        """All slots that hold a token: those of a window layer are its window, those of others are the past."""
        cache = self._cache
        return (torch.arange(reach, device=cache.length_B.device) <= cache.length_B[:, None])[:, None]

    def _sees_many(self, slots: int, reach: int, window: int | None) -> Tensor:
        """Which cached and which new keys the new queries see: bool (B, S, N)."""
        cache, new = self._cache, self._new
        held_BC = cache.newest(slots, cache.length_B)[:, :reach]
        ahead_BS = cache.positions(new)
        cached = (held_BC >= 0)[:, None].expand(-1, new, -1)
        distance = torch.arange(new, device=held_BC.device)[:, None] - torch.arange(new, device=held_BC.device)
        fresh = distance >= 0
        if window is not None:
            cached = cached & (ahead_BS[:, :, None] - held_BC[:, None] < window)
            fresh = fresh & (distance < window)
        return torch.cat([cached, fresh.expand(len(held_BC), -1, -1)], dim=2)

    def _store_many(self, kept: Tensor, k: Tensor, v: Tensor) -> None:
        """Each slot takes the newest token that belongs there, or keeps what it has; padding goes nowhere."""
        slots = kept.shape[3]
        index_BC = self._made("index", slots, lambda: self._taken(slots))
        taken = (index_BC >= 0)[:, None, :, None]
        index = index_BC.clamp(min=0)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        for cached, x in zip(kept, (k, v), strict=True):
            cached.copy_(torch.where(taken, x.gather(2, index), cached))

    def _taken(self, slots: int) -> Tensor:
        """(B, C) which of the new tokens each slot takes; negative: none."""
        cache = self._cache
        length_B = cache.length_B + (self._new if self._lengths_B is None else self._lengths_B)
        return cache.newest(slots, length_B) - cache.length_B[:, None]

    def _bias(self, what: str, slots: int, window: int | None, dtype: torch.dtype, see: Callable[[], Tensor]) -> Tensor:
        """A bias (B, 1, S, N) of the scores, 0 where a query sees and -inf elsewhere."""

        def make() -> Tensor:
            seen = see()
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]

        return self._made(what, slots, make, window)

    def _made(self, what: str, slots: int, make: Callable[[], Tensor], window: int | None = None) -> Tensor:
        key = (what, slots, window)
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


def _attend(q_BHSE: Tensor, k_BKNE: Tensor, v_BKNE: Tensor, bias_B1SN: Tensor) -> Tensor:
    """Attention under a bias. The query heads of a group become queries of its one head: no key is expanded."""
    batch, heads, new, size = q_BHSE.shape
    kv_heads = k_BKNE.shape[1]
    group = heads // kv_heads
    q = q_BHSE.reshape(batch, kv_heads, group * new, size)
    bias = bias_B1SN if new == 1 or group == 1 else bias_B1SN.repeat(1, 1, group, 1)
    with _kernels(q.device):
        out = F.scaled_dot_product_attention(q, k_BKNE, v_BKNE, attn_mask=bias)
    return out.reshape(batch, heads, new, size)


def _kernels(device: torch.device) -> AbstractContextManager[None]:
    """On CUDA the kernels that take a bias; cuDNN's plans, made for each shape, stay out of graphs."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
