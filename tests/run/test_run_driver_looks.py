"""Evidence of several hosts put together, and who did not answer."""

from __future__ import annotations

import pytest

from phalanx.run.clock import Now
from phalanx.run.driver.judgements import EvidenceGathering
from phalanx.run.messages import Evidence, RankEvidence

RANKS = {"a": (0, 1), "b": (2, 3)}


def at(seconds: float) -> Now:
    return Now(seconds, 1e9 + seconds)


def test_silence_of_a_host_or_a_rank_is_evidence() -> None:
    made = EvidenceGathering(3, RANKS, at(0), within_s=2.0)
    made.add("a", Evidence(2, [RankEvidence(0, "old")]))  # of an earlier attempt
    made.add("z", Evidence(3, [RankEvidence(0, "not asked")]))
    assert not made.is_over(at(1)) and made.left_s(at(1)) == pytest.approx(1.0)
    made.add("a", Evidence(3, [RankEvidence(1, "here"), RankEvidence(2, "not its own")]))
    assert not made.is_over(at(1))
    assert made.is_over(at(2))
    found = {one.rank: (one.stacks, one.is_silent) for one in made.evidence()}
    assert found == {0: ("", True), 1: ("here", False), 2: ("", True), 3: ("", True)}
    made.add("b", Evidence(3, [RankEvidence(2, "late"), RankEvidence(3, "late")]))
    assert made.is_over(at(1.5)) and made.evidence()[3].stacks == "late"
