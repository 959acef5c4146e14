"""What a rank does for one micro-batch: matrix products, fused attention, and kernels that wait for memory.

Sizes may be arrays, one number for each layout of a set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from phalanx.plan.types import Floats, Ints, Recompute

ALWAYS_FULL: frozenset[Recompute] = frozenset(("full",))
"""Computed again only where everything is."""
CHEAP: frozenset[Recompute] = frozenset(("elementwise", "mlp", "alternate", "full"))
"""Cheap to compute and large to keep: norms, activations, rotation."""
SECOND_PRODUCT: frozenset[Recompute] = frozenset(("alternate", "full"))
"""The second, fourth, … product of a layer, in the order in which it is computed."""
FIRST_PRODUCT: frozenset[Recompute] = frozenset(("mlp", "full"))
"""The first product of an MLP: one product to make again, for the widest tensor of a layer."""
CORE: frozenset[Recompute] = frozenset(("attention", "full"))
"""Scores and what is made of them, where they are written to memory (Korthikanti et al., section 5)."""


@dataclass(frozen=True)
class Product:
    """``(m, k) x (k, n)``, `batch` times.

    Backward takes two of the same size. Where `weight` is true, one of them sums the gradient of a weight over m
    tokens, which can wait; else both are needed to go on.

    Attributes:
        again: the kinds of recompute under which the forward product is made twice.
    """

    path: str
    m: Ints
    n: Ints
    k: Ints
    batch: Ints = 1
    weight: bool = True
    again: frozenset[Recompute] = ALWAYS_FULL


@dataclass(frozen=True)
class Attend:
    """Causal attention in one kernel: `flops` of both products over the keys that are seen, forward."""

    path: str
    flops: Floats
    queries: Ints
    head_dim: int
    again: frozenset[Recompute] = ALWAYS_FULL


@dataclass(frozen=True)
class Stream:
    """Kernels that are bound by memory: bytes read and written, and how many kernels that takes.

    Attributes:
        kernel: by which a device knows how much slower than their bytes its kernels are.
    """

    path: str
    forward_bytes: Floats
    backward_bytes: Floats
    forward_launches: int = 1
    backward_launches: int = 1
    again: frozenset[Recompute] = CHEAP
    kernel: str = ""


Operation: TypeAlias = Product | Attend | Stream


@dataclass(frozen=True)
class Passes:
    """Seconds of the passes over one micro-batch.

    Attributes:
        forward: of the forward pass.
        again: of what the backward pass computes once more.
        backward_input: gradients that the stage before waits for.
        backward_weight: gradients of weights, which can be put off.
    """

    forward: Floats = 0.0
    again: Floats = 0.0
    backward_input: Floats = 0.0
    backward_weight: Floats = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.again + other.again,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    @classmethod
    def sum(cls, several: Iterable[Passes]) -> Passes:
        """All of them together, in order; a few times as fast as adding one after the other."""
        passes = list(several)
        return cls(
            sum([each.forward for each in passes], 0.0),
            sum([each.again for each in passes], 0.0),
            sum([each.backward_input for each in passes], 0.0),
            sum([each.backward_weight for each in passes], 0.0),
        )

    def __mul__(self, times: Floats) -> Passes:
        return Passes(
            self.forward * times, self.again * times, self.backward_input * times, self.backward_weight * times
        )

    @property
    def backward(self) -> Floats:
        """The whole backward pass."""
        return self.again + self.backward_input + self.backward_weight

    @property
    def total(self) -> Floats:
        """Forward and backward."""
        return self.forward + self.backward
