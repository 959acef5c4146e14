"""Bytes of the interfaces that training uses: fewer than usual is worth an alert, none at all with no steps a recovery.

As MegaScale does (arXiv 2402.15627, section 4). A job on one host has no such traffic, and is not judged; nor is one
whose interfaces have never carried any (training may use others than those that are watched).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from phalanx.core.config import Config

Floats = npt.NDArray[np.float64]

# The median of the last 30 windows is the usual rate, once there are 3. Two low windows in a row make an alert, so that
# one pause that no rank has named makes none.
_USUAL_WINDOWS = 30
_ENOUGH_WINDOWS = 3
_LOW_WINDOWS = 2


class TrafficConfig(Config):
    """When traffic is too little."""

    decline: float = Field(0.5, gt=0, lt=1, description="share of the usual rate below which there is an alert")
    window_s: float = Field(10.0, gt=0, description="seconds that a rate is taken over, if that is several steps")
    silence_s: float = Field(60.0, gt=0, description="seconds without traffic until it is silence, at least")
    silence_steps: float = Field(10.0, gt=0, description="the same in usual step times; the longer of the two counts")
    least_rate: float = Field(
        10_000.0, gt=0, description="bytes per second and host; less is what a link carries when nobody uses it"
    )


@dataclass(frozen=True)
class TrafficVerdict:
    """What the interfaces say.

    Attributes:
        kind: not known (one host, or no traffic ever, or too short), as usual, less than usual (alert), none but ranks
            move or the silence is still short (alert), none and no steps (recover).
        share: of the usual rate; None: not known.
        hosts: those that declined most, or are silent.
    """

    kind: Literal["unknown", "usual", "decline", "quiet", "silent"]
    share: float | None = None
    hosts: tuple[str, ...] = ()
    why: str = ""


@dataclass(slots=True)
class _HostCounter:
    """Bytes of one host.

    Attributes:
        heard_s: when it last grew by more than an unused link's does.
        unused_rate: of an unused link, bytes per second.
        carried_bytes, read_s: the last reading, and when that was; None: not yet.
        window_bytes: since the present window began.
    """

    heard_s: float
    unused_rate: float
    carried_bytes: int = 0
    read_s: float | None = None
    window_bytes: int = 0


class _UsualRates:
    """Bytes per second of each host in past windows: of twelve thousand hosts at once.

    Attributes:
        rates: the median of each; 0: not known.
    """

    def __init__(self, hosts: int) -> None:
        self.rates = np.zeros(hosts)
        self._past = np.full((hosts, _USUAL_WINDOWS), np.nan)
        self._count = np.zeros(hosts, dtype=np.int64)

    def add(self, rates: Floats, which: npt.NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(which)
        self._past[rows, self._count[rows] % _USUAL_WINDOWS] = rates[rows]
        self._count[rows] += 1
        known = np.minimum(self._count[rows], _USUAL_WINDOWS)
        past, each = np.sort(self._past[rows], axis=1), np.arange(len(rows))  # what is not there comes last
        median = (past[each, (known - 1) // 2] + past[each, known // 2]) / 2
        self.rates[rows] = np.where(known >= _ENOUGH_WINDOWS, median, 0.0)


class TrafficJudge:
    """The traffic of one attempt."""

    def __init__(self, hosts: Iterable[str], now_s: float, config: TrafficConfig | None = None) -> None:
        self._config = config or TrafficConfig()
        self._hosts = {host: _HostCounter(now_s, self._config.least_rate) for host in hosts}
        self._usual = _UsualRates(len(self._hosts))
        self._window_began_s = now_s
        self._shares = np.full(len(self._hosts), np.nan)
        """Of the usual rate, in the last window."""
        self._low_windows = 0

    def observe(self, host: str, carried_bytes: int, now_s: float) -> None:
        """Take in what a host's training interfaces have carried since its executor began, as heartbeats say it."""
        known = self._hosts.get(host)
        if known is None:
            return
        new, read_s = carried_bytes - known.carried_bytes, known.read_s
        known.carried_bytes, known.read_s = carried_bytes, now_s
        if read_s is None or new <= 0:  # less: another executor
            return
        known.window_bytes += new
        if new > known.unused_rate * (now_s - read_s):
            known.heard_s = now_s

    def judge(
        self, now_s: float, quiet_s: float, usual_step_s: float | None, is_paused: bool = False
    ) -> TrafficVerdict:
        """What the traffic says.

        Args:
            quiet_s: since any rank made progress.
            usual_step_s: None: not known yet, and then there is no verdict.
            is_paused: ranks evaluate, write a checkpoint or the like; nothing is concluded then.
        """
        if len(self._hosts) < 2:
            return TrafficVerdict("unknown", why="one host has no traffic between hosts")
        # A pause must not count as a window of little traffic, nor as the beginning of a silence.
        if is_paused or usual_step_s is None:
            self._begin_window(now_s)
            for host in self._hosts.values():
                host.heard_s = now_s
            return TrafficVerdict("unknown", why="the ranks do something else" if is_paused else "too few steps yet")
        window_s = max(self._config.window_s, 3 * usual_step_s)
        if now_s - self._window_began_s >= window_s:
            self._close_window(now_s, is_usual=quiet_s < window_s)
        if self._usual.rates.sum() < self._config.least_rate * len(self._hosts):
            return TrafficVerdict("unknown", why="no traffic has been seen on the training interfaces")
        needed_s = max(self._config.silence_s, self._config.silence_steps * usual_step_s)
        silent = tuple(sorted(name for name, host in self._hosts.items() if now_s - host.heard_s >= needed_s))
        if silent and len(silent) < len(self._hosts):
            return TrafficVerdict("decline", None, silent, f"no traffic of {', '.join(silent)} for {needed_s:.0f} s")
        if silent and quiet_s < needed_s:
            return TrafficVerdict("quiet", 0.0, silent, f"no traffic for {needed_s:.0f} s, but something moves")
        if silent:
            return TrafficVerdict("silent", 0.0, silent, f"no traffic of any host and no step for {needed_s:.0f} s")
        if np.isnan(self._shares).all():
            return TrafficVerdict("usual")
        share = float(np.nansum(self._shares * self._usual.rates) / self._usual.rates.sum())
        if self._low_windows < _LOW_WINDOWS:
            return TrafficVerdict("usual", share)
        # The hosts whose share is at most half of what all have kept, or the least.
        is_low = self._shares <= max(0.5 * share, float(np.nanmin(self._shares)))
        lowest = tuple(sorted(name for name, low in zip(self._hosts, is_low, strict=True) if low))
        return TrafficVerdict(
            "decline", share, lowest, f"traffic is at {share:.0%} of the usual, least at {', '.join(lowest)}"
        )

    def _close_window(self, now_s: float, is_usual: bool) -> None:
        elapsed_s = now_s - self._window_began_s
        rates = np.fromiter((host.window_bytes for host in self._hosts.values()), float, len(self._hosts)) / elapsed_s
        is_known = self._usual.rates > 0
        self._shares = np.divide(rates, self._usual.rates, out=np.full(len(rates), np.nan), where=is_known)
        if is_usual:  # a window without steps says nothing of what is usual
            self._usual.add(rates, (rates > self._config.least_rate) | ~is_known)
            for host, usual in zip(self._hosts.values(), self._usual.rates.tolist(), strict=True):
                # Up to a thousandth of the usual rate is what a link carries when training does not use it.
                host.unused_rate = max(self._config.least_rate, 0.001 * usual)
        # Of all hosts together: hosts of one job send at different rates, as their stages do.
        is_low = rates.sum() < self._config.decline * self._usual.rates.sum()
        self._low_windows = self._low_windows + 1 if is_low else 0
        self._begin_window(now_s)

    def _begin_window(self, now_s: float) -> None:
        self._window_began_s = now_s
        for host in self._hosts.values():
            host.window_bytes = 0
