"""Evidence of several hosts put together, and what two looks lead to."""

from __future__ import annotations

import pytest

from phalanx.run.driver.looks import Look, Looks
from phalanx.run.judge.limits import Standing
from phalanx.run.messages import Evidence, RankEvidence
from phalanx.run.now import Now

RANKS = {"a": (0, 1), "b": (2, 3)}
WAITING = (
    'Thread 1 (idle): "MainThread"\n'
    "    all_reduce (torch/distributed/distributed_c10d.py:2500)\n    <module> (train.py:9)"
)


def at(seconds: float) -> Now:
    return Now(seconds, 1e9 + seconds)


def look(seconds: float, cpu_s: float = 1.0, stacks: str = WAITING) -> Look:
    made = Look(3, RANKS, at(seconds), within_s=2.0)
    for host, ranks in RANKS.items():
        made.add(host, Evidence(3, [RankEvidence(rank, stacks, cpu_s=cpu_s, step=7) for rank in ranks]))
    return made


def standing(kind: str) -> Standing:
    return Standing(kind, 10.0, 8.0, 1.0, "no step")  # type: ignore[arg-type]


def take(looks: Looks, one: Look) -> None:
    looks.begin(one)
    assert looks.done(one.began)


def test_silence_of_a_host_or_a_rank_is_evidence() -> None:
    made = Look(3, RANKS, at(0), within_s=2.0)
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


def test_a_host_of_which_nothing_is_heard_is_not_waited_for() -> None:
    unknown = {"b"}
    made = Look(3, RANKS, at(0), 2.0, unknown.__contains__)
    assert not made.is_over(at(1))
    made.add("a", Evidence(3, [RankEvidence(0, WAITING), RankEvidence(1, WAITING)]))
    assert made.is_over(at(1))
    assert [one.is_silent for one in made.evidence()] == [False, False, True, True]
    unknown.clear()  # it is heard of again
    assert not made.is_over(at(1))


def test_nothing_is_done_while_steps_are_made() -> None:
    looks = Looks()
    assert looks.wish(standing("moving")) == "nothing"
    assert looks.wish(standing("watch")) == "look"
    looks.begin(Look(3, RANKS, at(0), 2.0))
    assert looks.wish(standing("due")) == "nothing" and not looks.done(at(1))
    assert looks.wish(standing("moving")) == "nothing"
    assert (looks.first, looks.pending) == (None, None)


def test_two_looks_at_ranks_that_stand_still_are_a_hang() -> None:
    looks = Looks()
    assert looks.wish(standing("watch")) == "look"
    take(looks, look(0))
    assert looks.wish(standing("watch")) == "nothing"
    assert looks.wish(standing("due")) == "look"
    take(looks, look(5))
    assert looks.wish(standing("due")) == "hang"
    assert looks.stillness is not None and looks.stillness.still == (0, 1, 2, 3)


def test_ranks_that_move_are_dismissed_and_looked_at_again() -> None:
    looks = Looks()
    for number, seconds in enumerate((0, 5, 10)):
        assert looks.wish(standing("due")) == "look"
        other = WAITING.replace("all_reduce", f"layer_{number}")
        take(looks, look(seconds, cpu_s=seconds, stacks=other))
        if number:
            assert looks.wish(standing("due")) == "dismiss"
    assert looks.wish(standing("due")) == "look"
    take(looks, look(15, cpu_s=10.0, stacks=WAITING.replace("all_reduce", "layer_2")))
    assert looks.wish(standing("due")) == "hang"


def test_beyond_patience_no_look_is_needed() -> None:
    assert Looks().wish(standing("hang")) == "hang"
