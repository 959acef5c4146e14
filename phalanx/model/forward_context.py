"""What a forward pass carries beside the activations (position, dropout, cached keys), and layers compiled one by one.

What is compiled for one layer serves all of its kind, so deep models start as fast as flat ones. What must not be
traced (a mask whose key is another in every step, a wait for another rank) is left out of what is compiled, which then
falls into pieces: norms, rotary position, the activation and sums are fused all the same.

*The KV cache* keeps keys and values of earlier tokens in buffers of fixed size: all steps of generation have the same
addresses. How many tokens a row has is known on the device, so that a step neither waits for the host nor differs from
the one before in anything that a CUDA graph holds on to.

Shapes: B batch rows, S new tokens, H query heads, K key/value heads, E head size, C slots of a layer, N keys in sight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.core.errors import UserError
from phalanx.kernels.attention import AttentionDropout, Backend, CausalKernel, attention
from phalanx.kernels.counter import dropout, make_key
from phalanx.kernels.masks import AttentionMask
from phalanx.model.config import ModelConfig


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``."""
    return function(*arguments)


def call_untraced() -> Callable[..., Any]:
    """`call` out of the compiler's sight; to be kept, since layers would be compiled anew for another."""
    opaque: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return opaque


def compile_layers(layers: Iterable[nn.Module], **options: Any) -> None:
    """Compile each block, in place, with the `options` of `torch.compile`.

    Nothing is compiled before it is called, so what is recomputed may be settled later.
    """
    for layer in layers:
        # Not `forward`: hooks, which may wait for weights, stay outside. Where a whole layer is computed again, that is
        # compiled too; where some of its results are kept, the compiler sees the choice (`choosing`).
        for name in ("layer", "choosing"):
            setattr(layer, name, torch.compile(getattr(layer, name), **options))


def leave_out(modules: Iterable[nn.Module]) -> None:
    """Run `modules` as they are written within what is compiled."""
    for module in modules:
        module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class DropoutState:
    """What decides the dropped elements: (seed, step, sample, position, site, column) and nothing else.

    `sample_index_B` (int64) is each sequence's number in the global order, so that any micro-batching or layout drops
    the same elements, and a recomputed block drops them again.
    """

    seed: int
    step: int
    sample_index_B: Tensor

    def key(self, site: str) -> int:
        """The hash key of a dropout site in this step."""
        return make_key(self.seed, "dropout", self.step, site)


@dataclass(frozen=True)
class Site:
    """A place where elements are dropped. Not its bare name: a compiled layer would be another for every name."""

    name: str


@dataclass(frozen=True)
class Context:
    """The constants of one forward pass."""

    # batch, length: B and S of this pass
    batch: int
    length: int
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin for `phalanx.model.rotary.rotate_heads`, or None
    # the attention mask of each kind of layer, by window; empty where keys are cached already
    masks: Mapping[int | None, AttentionMask] = field(default_factory=dict)
    dropout: DropoutState | None = None  # None outside training
    rows_T: Tensor | None = None  # hash row of every row of the residual stream, for dropout
    cache: CachePass | None = None
    # hash row of every query, where a layout splits the rows of the stream; None: the same
    attention_rows_BS: Tensor | None = None
    # attention of a layout that splits sequences, in place of `phalanx.kernels.attention`; called with the local
    # queries, keys and values, and with how the layer attends
    attend_with: Callable[[Tensor, Tensor, Tensor, Attending], Tensor] | None = None
    apart: Callable[..., Any] = call  # calls what must not be compiled with a layer
    kernel: CausalKernel | None = None  # for plain causal attention on CUDA; None: what torch prefers

    def drop(self, x_TD: Tensor, rate: float, site: Site) -> Tensor:
        """`x` with elements dropped at `rate` and the rest scaled up; the mask belongs to (step, `site`)."""
        if self.dropout is None or self.rows_T is None or not rate:
            return x_TD
        out: Tensor = self.apart(_drop, x_TD, rate, self.dropout, site, self.rows_T)
        return out

    def attend(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, how: Attending) -> Tensor:
        """Attention of one layer over the keys of this pass, with its masks and dropout; (B, H, S, E)."""
        if self.attend_with is not None:
            out: Tensor = self.apart(_attend_with, self, q_BHSE, k_BKSE, v_BKSE, how)
            return out
        mask = self.masks.get(how.window)
        if self.dropout is None or self.rows_T is None or not how.dropout:
            if how.backend == "chunked":  # the compiler would write out each chunk, of each sequence, for minutes
                chunked: Tensor = self.apart(_attend_in_chunks, q_BHSE, k_BKSE, v_BKSE, mask, how)
                return chunked
            return attention(
                q_BHSE, k_BKSE, v_BKSE, window=how.window, mask=mask, backend=how.backend, kernel=self.kernel
            )
        rows_BS = self.attention_rows_BS
        if rows_BS is None:
            rows_BS = self.rows_T.view(self.batch, self.length)
        dropped: Tensor = self.apart(_attend_dropping, q_BHSE, k_BKSE, v_BKSE, mask, how, self.dropout, rows_BS)
        return dropped


@dataclass(frozen=True)
class Attending:
    """How one layer attends."""

    window: int | None  # keys that a query sees; None: all of the past
    backend: Backend
    # dropout, site: the rate and the site of dropped weights
    dropout: float
    site: str
    # first_head, num_heads: logical number of the first query head here, and of all (None: those here are all)
    first_head: int = 0
    num_heads: int | None = None


def _drop(x_TD: Tensor, rate: float, state: DropoutState, site: Site, rows_T: Tensor) -> Tensor:
    return dropout(x_TD, rate, state.key(site.name), rows_T)


def _attend_with(context: Context, q: Tensor, k: Tensor, v: Tensor, how: Attending) -> Tensor:
    assert context.attend_with is not None
    return context.attend_with(q, k, v, how)


def _attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, how: Attending) -> Tensor:
    return attention(q, k, v, window=how.window, mask=mask, backend=how.backend)


def _attend_dropping(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, how: Attending, state: DropoutState, rows_BS: Tensor
) -> Tensor:
    weights = AttentionDropout(how.dropout, state.key(how.site), rows_BS, how.first_head, how.num_heads)
    return attention(q, k, v, window=how.window, mask=mask, dropout=weights, backend=how.backend)


def dropout_rows(state: DropoutState, length: int, max_sequence: int) -> Tensor:
    """Hash rows (B*S,) int64: the number of each token in the endless row of all samples' tokens."""
    positions = torch.arange(length, dtype=torch.int64, device=state.sample_index_B.device)
    return (state.sample_index_B.to(torch.int64)[:, None] * max_sequence + positions).flatten()


class KVCache:
    """Keys and values of each row's tokens; a pass writes into them, and nothing grows.

    Slot c of a layer holds the newest token of a row whose position is c modulo the number of slots. A layer has as
    many slots as its window, or `max_length` rounded up for the kernels' sake.
    """

    def __init__(
        self, config: ModelConfig, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.max_length = max_length
        self.length = 0  # tokens of the longest row at most, as the host knows it
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens of each row, int64 on the device
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
        self.is_first = cache.length == 0
        self._shared: dict[tuple[str, int, int | None], Tensor] = {}

    def attend(self, layer: int, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, alone: Callable[[], Tensor]) -> Tensor:
        """Attention of a layer over the cached and the new keys, which are cached; (B, H, S, E).

        Args:
            alone: attention over the new keys alone, for an empty cache.
        """
        kept, window = self._cache.layers[layer], self._cache.windows[layer]
        slots = kept.shape[3]
        if self._new == 1:
            return self._attend_one(kept, q_BHSE, k_BKSE, v_BKSE)
        if self.is_first:
            out = alone()
        else:
            reach = min(slots, self._cache.reach(0))
            k, v = (torch.cat([kept[i, :, :, :reach], x], dim=2) for i, x in enumerate((k_BKSE, v_BKSE)))
            bias = self._bias("many", slots, window, q_BHSE.dtype, lambda: self._sees_many(slots, reach, window))
            out = _attend(q_BHSE, k, v, bias)
        # Each slot takes the newest token that belongs there, or keeps what it has; padding goes nowhere.
        index_BC = self._made("index", slots, lambda: self._taken(slots))
        taken = (index_BC >= 0)[:, None, :, None]
        index = index_BC.clamp(min=0)[:, None, :, None].expand(-1, k_BKSE.shape[1], -1, k_BKSE.shape[3])
        for cached, x in zip(kept, (k_BKSE, v_BKSE), strict=True):
            cached.copy_(torch.where(taken, x.gather(2, index), cached))
        return out

    def _attend_one(self, kept: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, slots = self._cache, kept.shape[3]
        reach = min(slots, cache.reach(1))
        # The new token is cached first; then everything in sight is in the cache, and nothing else.
        slot_B = self._made("slot", slots, lambda: cache.length_B.remainder(slots))
        for cached, x in zip(kept, (k, v), strict=True):
            cached.transpose(1, 2).index_put_((cache.rows_B, slot_B), x[:, :, 0])

        def sees() -> Tensor:
            # All slots that hold a token: those of a window layer are its window, those of others are the past.
            return (torch.arange(reach, device=cache.length_B.device) <= cache.length_B[:, None])[:, None]

        return _attend(q, kept[0, :, :, :reach], kept[1, :, :, :reach], self._bias("one", slots, None, q.dtype, sees))

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
    # On CUDA the kernels that take a bias; cuDNN's plans, made for each shape, stay out of graphs.
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels) if q.device.type == "cuda" else nullcontext():
        out = F.scaled_dot_product_attention(q, k_BKNE, v_BKNE, attn_mask=bias)
    return out.reshape(batch, heads, new, size)
