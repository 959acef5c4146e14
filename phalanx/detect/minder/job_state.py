"""What the job does now, against what it did while habits were learnt; and what offsets machines should have then.

When a job hangs or is restarted, constant offsets of healthy machines have other sizes than while it trains: a machine
that draws 3 % more power draws 3 % more of something else now. Habits prove nothing then, but they foretell: over the
machines of a group, offsets now are a multiple of offsets before. Who is far from what its habit foretells differs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.window_encoder import Floats

_CHANGE, _SPREADS = 0.1, 4.0
"""The job is in another state once a group's centre has moved so far, and by so many of its usual deviations."""

_FEW = 8
"""Machines from which on a group has a multiple of its own."""

_CLIP = 3.0
"""Offsets count for the multiple up to so many of their medians, so that a faulty machine does not turn it."""

_ODD = 2.0
"""Of what an odd machine's habit has beyond usual ones, that its offset may be off."""

_EVERY = 8
"""Samples after which multiples are fitted again."""

_AVERAGED_S = 60.0
"""Offsets of another state are averaged over, or since it began."""

Groups = NDArray[np.int64] | None


class JobState:
    """Whether each machine's group does something else than it did, in one metric."""

    def __init__(self, hidden: int, machines: int, rate: float, memory: float) -> None:
        """Rate: of the average that shows the state; memory: samples in which what is new becomes usual."""
        self._rate, self._memory = np.float32(rate), np.float32(memory)
        self._now = np.zeros((hidden, machines), np.float32)
        self._usual: Floats = self._now.copy()
        self._spread: NDArray[np.floating] = np.zeros(machines, np.float32)

    def learn(self, centres: Floats) -> None:
        """What groups do while habits are learnt: [windows, hidden, machines]."""
        self._usual = np.median(centres, axis=0)
        self._now = self._usual.copy()
        away = []
        for one in centres:
            self._now += self._rate * (one - self._now)
            away.append(_lengths(self._now - self._usual))
        self._spread = np.quantile(np.stack(away), 0.75, axis=0).astype(np.float32)

    def follow(self, centre: Floats) -> NDArray[np.bool_]:
        """Whose group no longer does what it did: [machines]."""
        self._now += self._rate * (np.where(np.isnan(centre), self._now, centre) - self._now)
        change = self._now - self._usual
        self._usual += change / self._memory
        changed: NDArray[np.bool_] = _lengths(change) > np.maximum(_CHANGE, _SPREADS * self._spread)
        return changed


class ForetoldOffsets:
    """How far each machine is from the offset that its habit foretells, while its group is in another state."""

    def __init__(self, hidden: int, machines: int, period_s: float) -> None:
        self._habit = np.zeros((hidden, machines), np.float32)
        self._offset = np.zeros((hidden, machines), np.float32)
        self._scaled = np.zeros((hidden, machines), np.float32)
        self._since = np.zeros(machines, np.int64)
        self._averaged = max(1.0, _AVERAGED_S / period_s)

    def distance(self, offset: Floats, habit: Floats, changed: NDArray[np.bool_], groups: Groups) -> Floats | None:
        """Of each machine, [machines], as it was averaged since its group changed; None: no group has.

        What habits foretell is the multiple that fits most machines, or the habit itself, of what does not change with
        the load (another agent on the host), or anything between both.

        Args:
            offset: [hidden, machines], from the centre of each one's group, now.
            habit: the same while the job did what it usually does.
        """
        if not changed.any():
            self._since[:] = 0
            return None
        begins = changed & (self._since == 0)
        if begins.any():
            self._habit[:, begins] = habit[:, begins]
            self._offset[:, begins] = 0
        self._since = np.where(changed, self._since + 1, 0)
        rate = np.where(changed, 1 / np.clip(self._since, 1, self._averaged), 0).astype(np.float32)
        self._offset += rate * (offset - self._offset)
        if (self._since % _EVERY == 1).any():
            for members in _parts(changed, groups):
                self._scaled[:, members] = _multiples(self._habit[:, members], self._offset[:, members])
        way, rest = self._habit - self._scaled, self._offset - self._scaled
        share = np.einsum("hm,hm->m", way, rest) / np.maximum(np.einsum("hm,hm->m", way, way), 1e-12)
        beyond = _lengths((rest - np.clip(share, 0, 1) * way) * changed)
        # Of who has always been odd, it is foretold less well by how odd that is.
        odd = _lengths(self._habit)
        limited: Floats = np.maximum(beyond - _ODD * np.maximum(odd - _CLIP * np.median(odd), 0), 0)
        return limited


def _parts(changed: NDArray[np.bool_], groups: Groups) -> list[NDArray[np.int64]]:
    """Groups with a multiple of their own, and the machines of all others together."""
    if groups is None:
        return [np.flatnonzero(changed)]
    found, small = [], np.zeros(len(changed), bool)
    for group in np.unique(groups[changed]):
        members = changed & (groups == group)
        if np.count_nonzero(members) >= _FEW:
            found.append(np.flatnonzero(members))
        else:
            small |= members
    return [*found, np.flatnonzero(small)] if small.any() else found


def _multiples(habit: Floats, offset: Floats) -> Floats:
    """Of habits, that fit most offsets: all [hidden, machines]."""
    if habit.shape[1] < _FEW:
        return np.zeros_like(habit)
    clipped = _clipped(habit)
    _, directions = np.linalg.eigh(clipped @ clipped.T)
    main = directions[:, -1]  # along which most habits lie
    size = main @ clipped
    multiple = _clipped(offset) @ size / np.float32(max(float(size @ size), 1e-12))
    found: Floats = (multiple[:, None] * (main @ habit)).astype(np.float32)
    return found


def _clipped(values: Floats) -> Floats:
    half = values.shape[1] // 2
    # Of an even number the upper of both middles: a median of both takes several times as long.
    limit = _CLIP * np.partition(np.abs(values), half, axis=1)[:, half, None]
    found: Floats = np.clip(values, -limit, limit)
    return found


def _lengths(values: Floats) -> Floats:
    found: Floats = np.sqrt(np.einsum("hm,hm->m", values, values))
    return found
