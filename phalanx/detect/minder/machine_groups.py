"""Groups of machines that differ from each other and are healthy: pipeline stages, generations of GPUs.

They are found in what machines are like before they are judged: where a direction has a gap that is wide for the
scatter at both sides of it, and there are enough machines at each side, it is cut there; then each side is looked at.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.window_encoder import Floats

SMALLEST = 4
"""Machines of a group: of fewer, nobody could say which is the odd one."""

_SEPARATION = 3.0
"""Distance between the middles of both sides, in the sum of their deviations."""

_DIRECTIONS = 6

_MANY = 32
"""Machines from which on a cut is refined: fewer look apart by chance along some weighting of all numbers."""


def machine_groups(habits: Floats) -> NDArray[np.int64] | None:
    """Number of each machine's group; None: all are one.

    Args:
        habits: [numbers, machines]: what each machine is like, in units in which all numbers count the same.
    """
    machines = habits.shape[1]
    groups = np.zeros(machines, np.int64)
    waiting, known = [np.arange(machines)], 1
    while waiting:
        members = waiting.pop()
        side = _cut(habits[:, members].astype(np.float64))
        if side is None:
            continue
        groups[members[side]] = known
        known += 1
        waiting += [members[side], members[~side]]
    return groups if known > 1 else None


def _cut(habits: NDArray[np.float64]) -> NDArray[np.bool_] | None:
    """Who is on the far side of the widest gap; None: there is no gap."""
    machines = habits.shape[1]
    if machines < 2 * SMALLEST:
        return None
    away = habits - np.median(habits, axis=1, keepdims=True)
    # One odd machine must not turn the directions towards itself.
    limit = 6 * np.median(np.abs(away), axis=1, keepdims=True) + 1e-9
    limit = np.maximum(limit, np.quantile(np.abs(away), 1 - SMALLEST / machines, axis=1, keepdims=True))
    away = np.clip(away, -limit, limit)
    _, _, directions = np.linalg.svd(away - away.mean(axis=1, keepdims=True), full_matrices=False)
    best, found = _SEPARATION, None
    for line in directions[:_DIRECTIONS]:
        separation, side = _split(line)
        for _ in range(2 if machines >= _MANY else 0):
            separation, side = _split(_across(away, side))
        if separation > best:
            best, found = separation, side
    return found


def _split(line: NDArray[np.float64]) -> tuple[float, NDArray[np.bool_]]:
    """Separation of the best cut along a line, and who is on its far side."""
    order = np.argsort(line)
    separation, at = _widest(line[order])
    side = np.zeros(len(line), bool)
    side[order[at:]] = True
    return separation, side


def _across(away: NDArray[np.float64], side: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The line on which numbers count by how well they tell both sides apart, so that no one lands on the wrong one."""
    near, far = away[:, ~side], away[:, side]
    scatter = near.var(axis=1) + far.var(axis=1) + 0.02 * away.var(axis=1) + 1e-9
    line: NDArray[np.float64] = ((far.mean(axis=1) - near.mean(axis=1)) / scatter) @ away
    return line


def _widest(line: NDArray[np.float64]) -> tuple[float, int]:
    """Of sorted numbers: where two parts are furthest apart for their scatter, and how far."""
    count = len(line)
    ends = np.arange(1, count)
    sums, squares = np.cumsum(line), np.cumsum(line**2)
    left, right = sums[:-1] / ends, (sums[-1] - sums[:-1]) / (count - ends)
    left_var = np.maximum(squares[:-1] / ends - left**2, 0)
    right_var = np.maximum((squares[-1] - squares[:-1]) / (count - ends) - right**2, 0)
    scatter = np.sqrt(left_var) + np.sqrt(right_var) + 1e-9
    separation = (right - left) / scatter
    allowed = (ends >= SMALLEST) & (count - ends >= SMALLEST)
    separation[~allowed] = 0
    at = int(separation.argmax())
    return float(separation[at]), at + 1
