"""How far two runs are apart: relative errors of gradients, losses and norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from support.parity.task import Seen

BAR = 1e-5

# Some gradients are zero in theory (a key's bias where nothing is rotated: softmax does not see what all keys share):
# what is left of them is rounding, and is measured by the rounding of others.
_NOTHING = 1e-3


@dataclass(frozen=True)
class Difference:
    """Of a run from the one it should equal.

    Attributes:
        weights_equal: whether all initial weights are, bit for bit.
        gradients: largest error of an element of a gradient of the first step, over the largest element of that tensor.
        losses, norms: largest relative error over all steps; that of the loss on held-out text counts among losses.
    """

    weights_equal: bool
    gradients: float
    losses: float
    norms: float

    @property
    def passes(self) -> bool:
        return self.weights_equal and max(self.gradients, self.losses, self.norms) <= BAR


def difference(found: Seen, expected: Seen) -> Difference:
    return Difference(
        _equal_weights(found, expected),
        _gradient_error(found, expected),
        relative_error([*found.losses, found.held_out], [*expected.losses, expected.held_out]),
        relative_error(found.norms, expected.norms),
    )


def worst(differences: Sequence[Difference]) -> Difference:
    """The largest of every error."""
    return Difference(
        all(d.weights_equal for d in differences),
        _largest(d.gradients for d in differences),
        _largest(d.losses for d in differences),
        _largest(d.norms for d in differences),
    )


def relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest over pairs; infinite where a number is none."""
    return _largest(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _equal_weights(found: Seen, expected: Seen) -> bool:
    same_names = found.weights.keys() == expected.weights.keys()
    return same_names and all(torch.equal(found.weights[name], w) for name, w in expected.weights.items())


def _gradient_error(found: Seen, expected: Seen) -> float:
    if found.gradients.keys() != expected.gradients.keys():
        return float("inf")
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    return _largest(
        float((found.gradients[name] - gradient).abs().max()) / max(float(gradient.abs().max()), _NOTHING * largest)
        for name, gradient in expected.gradients.items()
    )


def _largest(errors: object) -> float:
    values = torch.tensor(list(errors), dtype=torch.float64)  # type: ignore[call-overload]
    return float("inf") if bool(values.isnan().any()) else float(values.max())
