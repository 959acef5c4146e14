"""Looks at ranks that make no step: evidence of all hosts put together, and two of them held against each other.

A hang needs more than time without a step: between two looks nothing may move. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from phalanx.run.judge.limits import Standing
from phalanx.run.judge.still import Stillness, compare
from phalanx.run.messages import Evidence, RankEvidence
from phalanx.run.now import Now

Wish = Literal["nothing", "look", "hang", "dismiss"]


@dataclass
class Look:
    """Evidence of one attempt that is being gathered.

    Args:
        attempt: its number.
        ranks: of each host that was asked.
        began: when it was asked for.
        within_s: how long answers are waited for; what has not come then is silent.
        is_unknown: whether nothing is heard of a host anyway, so that it is not waited for.
    """

    attempt: int
    ranks: Mapping[str, Sequence[int]]
    began: Now
    within_s: float
    is_unknown: Callable[[str], bool] = lambda host: False
    _found: dict[int, RankEvidence] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)

    def add(self, host: str, evidence: Evidence) -> None:
        """The answer of a host; of several the last counts."""
        if evidence.attempt != self.attempt or host not in self.ranks:
            return
        self._answered.add(host)
        mine = set(self.ranks[host])
        self._found.update({one.rank: one for one in evidence.ranks if one.rank in mine})

    def is_over(self, now: Now) -> bool:
        """Whether all have answered, or nobody is waited for any more."""
        return self.left_s(now) <= 0 or all(host in self._answered or self.is_unknown(host) for host in self.ranks)

    def left_s(self, now: Now) -> float:
        """Seconds for which answers are still waited for."""
        return self.began.monotonic_s + self.within_s - now.monotonic_s

    def evidence(self) -> list[RankEvidence]:
        """What is known of every rank that was asked for: silence is evidence too."""
        ranks = sorted(rank for mine in self.ranks.values() for rank in mine)
        return [self._found.get(rank, RankEvidence(rank, is_silent=True)) for rank in ranks]


@dataclass
class Looks:
    """What the standing of an attempt asks for, from one time without steps to the next.

    `wish` is asked again and again; when it says ``look``, a `Look` is begun with `begin`, and given back by whoever
    has gathered it with `done`.
    """

    first: Look | None = None
    second: Look | None = None
    pending: Look | None = None
    stillness: Stillness | None = None

    def wish(self, standing: Standing) -> Wish:
        """What is to be done now: nothing, look at the ranks, call it a hang, or dismiss what was due."""
        if standing.kind == "hang":
            return "hang"
        if standing.kind == "moving":
            self.first = self.second = self.pending = self.stillness = None
            return "nothing"
        if self.pending is not None:
            return "nothing"
        if self.first is None:
            return "look"
        if standing.kind == "watch":
            return "nothing"
        if self.second is None:
            return "look"
        return self._judge()

    def begin(self, look: Look) -> None:
        """Evidence has been asked for."""
        self.pending = look

    def done(self, now: Now) -> bool:
        """Take in the look that is pending if it is over; whether it was."""
        look = self.pending
        if look is None or not look.is_over(now):
            return False
        self.pending = None
        if self.first is None:
            self.first = look
        else:
            self.second = look
        return True

    def _judge(self) -> Wish:
        assert self.first is not None and self.second is not None
        elapsed_s = self.second.began.monotonic_s - self.first.began.monotonic_s
        self.stillness = compare(self.first.evidence(), self.second.evidence(), elapsed_s)
        if self.stillness.is_hang:
            return "hang"
        self.first, self.second = self.second, None  # the next look is held against this one
        return "dismiss"
