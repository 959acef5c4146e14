"""A look at ranks that hang: evidence of all hosts put together. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.run.messages import Evidence, RankEvidence
from phalanx.run.now import Now


@dataclass
class Look:
    """Evidence of one attempt that is being gathered.

    Args:
        attempt: its number.
        ranks: of each host that was asked.
        began: when it was asked for.
        within_s: how long answers are waited for; what has not come then is silent.
    """

    attempt: int
    ranks: Mapping[str, Sequence[int]]
    began: Now
    within_s: float
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
        return self.left_s(now) <= 0 or all(host in self._answered for host in self.ranks)

    def left_s(self, now: Now) -> float:
        """Seconds for which answers are still waited for."""
        return self.began.monotonic_s + self.within_s - now.monotonic_s

    def evidence(self) -> list[RankEvidence]:
        """What is known of every rank that was asked for: silence is evidence too."""
        ranks = sorted(rank for mine in self.ranks.values() for rank in mine)
        return [self._found.get(rank, RankEvidence(rank, is_silent=True)) for rank in ranks]
