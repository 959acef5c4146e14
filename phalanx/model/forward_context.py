"""What a forward pass carries beside the activations (position, dropout, cached keys), and layers compiled one by one.

What is compiled for one layer serves all of its kind, so deep models start as fast as flat ones. What must not be
traced (a mask whose key is another in every step, a wait for another rank) is left out of what is compiled, which then
falls into pieces: norms, rotary position, the activation and sums are fused all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.kernels.attention import AttentionDropout, Backend, CausalKernel, attention
from phalanx.kernels.counter import dropout, make_key
from phalanx.kernels.masks import AttentionMask
from phalanx.model.cache import CachePass


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` gives for `arguments`."""
    return function(*arguments)


def call_untraced() -> Callable[..., Any]:
    """`call` out of the compiler's sight; to be kept, since layers would be compiled anew for another."""
    opaque: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return opaque


def compile_layers(layers: Iterable[nn.Module], **options: Any) -> None:
    """Compile each of `layers`, in place.

    Hooks stay outside of what is compiled: they may wait for weights. Where a whole layer is computed again, that is
    compiled too; a layer that keeps some of its results is compiled with the choice, which the compiler makes.

    Args:
        layers: blocks. Nothing is compiled before it is called, so what is recomputed may be settled later.
        options: of `torch.compile`.
    """
    for layer in layers:
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
    """The constants of one forward pass.

    Attributes:
        batch, length: B and S of this pass.
        rotary: cos and sin for `phalanx.model.rotary.rotate_heads`, or None.
        masks: the attention mask of each kind of layer, by window; empty where keys are cached already.
        dropout: None outside training.
        rows_T: hash row of every row of the residual stream, for dropout.
        cache: this pass over the cache of keys and values, or None.
        attention_rows_BS: hash row of every query, where those are not the rows of the stream (which a layout may
            have split); None: they are.
        attend_with: attention of a layout that splits sequences, in place of `phalanx.kernels.attention`; called with
            the local queries, keys and values, and with how the layer attends.
        apart: calls what must not be compiled with a layer: a mask whose 64-bit key is another in every step, a wait
            for another rank.
        kernel: of plain causal attention on CUDA; None: what torch prefers.
    """

    batch: int
    length: int
    rotary: tuple[Tensor, Tensor] | None = None
    masks: Mapping[int | None, AttentionMask] = field(default_factory=dict)
    dropout: DropoutState | None = None
    rows_T: Tensor | None = None
    cache: CachePass | None = None
    attention_rows_BS: Tensor | None = None
    attend_with: Callable[[Tensor, Tensor, Tensor, Attending], Tensor] | None = None
    apart: Callable[..., Any] = call
    kernel: CausalKernel | None = None

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
    """How one layer attends.

    Attributes:
        window: keys that a query sees; None: all of the past.
        dropout, site: the rate and the site of dropped weights.
        first_head, num_heads: logical number of the first query head here, and of all (None: those here are all).
    """

    window: int | None
    backend: Backend
    dropout: float
    site: str
    first_head: int = 0
    num_heads: int | None = None


def _drop(x_TD: Tensor, rate: float, state: DropoutState, site: Site, rows_T: Tensor) -> Tensor:
    return dropout(x_TD, rate, state.key(site.name), rows_T)


def _attend_with(context: Context, q: Tensor, k: Tensor, v: Tensor, how: Attending) -> Tensor:
    assert context.attend_with is not None
    return context.attend_with(q, k, v, how)


def _attend_dropping(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, how: Attending, state: DropoutState, rows_BS: Tensor
) -> Tensor:
    weights = AttentionDropout(how.dropout, state.key(how.site), rows_BS, how.first_head, how.num_heads)
    return attention(q, k, v, window=how.window, mask=mask, dropout=weights, backend=how.backend)


def dropout_rows(state: DropoutState, length: int, max_sequence: int) -> Tensor:
    """Hash rows (B*S,) int64: the number of each token in the endless row of all samples' tokens."""
    positions = torch.arange(length, dtype=torch.int64, device=state.sample_index_B.device)
    return (state.sample_index_B.to(torch.int64)[:, None] * max_sequence + positions).flatten()
