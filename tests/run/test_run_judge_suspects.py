"""Who is named, by what, and when nobody is: a table of evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_helpers import BACKWARD, py_spy

from phalanx.detect.hangs.python_stacks import main_stack, waits_for_peers, without_lines
from phalanx.run.judge.suspects import find_suspects, waits_of
from phalanx.run.messages import RankEvidence

WAITS = py_spy(
    "all_reduce (torch/distributed/distributed_c10d.py:2501)",
    "wrapper (torch/distributed/c10d_logger.py:83)",
    "main (train.py:40)",
)
OTHER_WAIT = py_spy("recv (torch/distributed/distributed_c10d.py:2300)", "stage (pipeline.py:7)", "main (train.py:40)")
SLEEPS = py_spy("sleep_for_ever (train.py:12)", "main (train.py:33)")
READS = py_spy("get (queue.py:171)", "_next (torch/utils/data/dataloader.py:1300)", "main (train.py:31)")


def flight(last: int, group: str = "0", state: str = "completed") -> str:
    entries = [
        {"process_group": [group, "default_pg"], "collective_seq_id": n, "state": state} for n in range(last + 1)
    ]
    return json.dumps({"version": "2.4", "entries": entries})


def test_who_hears_all_ranks_waits_for_them() -> None:
    """Over our own connections, too."""
    hears = ("result (concurrent/futures/_base.py:451)", "_wait (phalanx/ipc/tree_peers.py:140)", "main (train.py:3)")
    assert waits_for_peers(main_stack(py_spy("wait (threading.py:359)", *hears)))
    assert waits_for_peers(main_stack(WAITS)) and not waits_for_peers(main_stack(SLEEPS))


def ranks(*others: RankEvidence, count: int = 8, **common: Any) -> list[RankEvidence]:
    """Ranks that wait at step 10, but for `others`."""
    common = {"stacks": WAITS, "state": "S", "step": 10, **common}
    replaced = {one.rank: one for one in others}
    return [replaced.get(rank) or RankEvidence(rank, **common) for rank in range(count)]


def hosts(count: int = 8, per_host: int = 2) -> dict[int, str]:
    return {rank: f"h{rank // per_host}" for rank in range(count)}


def silent(rank: int, state: str = "") -> RankEvidence:
    return RankEvidence(rank, is_silent=True, state=state)


def at(rank: int, stacks: str, step: int = 10, state: str = "S") -> RankEvidence:
    return RankEvidence(rank, stacks, state=state, step=step)


BEHIND = RankEvidence(3, WAITS, step=10, flight_record=flight(6))

CASES = [
    ("all wait", ranks(), (), ""),
    ("one is silent", ranks(silent(3)), (3,), "silence"),
    ("one is silent and stopped", ranks(silent(3, "T")), (3,), "silence"),
    ("one is missing", ranks()[:7], (7,), "silence"),
    ("a host is silent", ranks(silent(2), silent(3)), (2, 3), "silence"),
    ("two on two hosts are silent", ranks(silent(1), silent(6)), (1, 6), "silence"),
    ("half are silent", ranks(*map(silent, range(4))), (0, 1, 2, 3), "silence"),
    ("most are silent", ranks(*map(silent, range(5))), (), ""),
    ("all are silent", ranks(*map(silent, range(8))), (), ""),
    ("most are silent, one that answers is elsewhere", ranks(*map(silent, range(6)), at(7, SLEEPS)), (), ""),
    ("silence comes before steps", ranks(silent(3), at(5, WAITS, step=9)), (3,), "silence"),
    ("one is stopped", ranks(at(4, WAITS, state="T")), (4,), "state"),
    ("one is in the kernel", ranks(at(4, WAITS, state="D")), (4,), "state"),
    ("one is dead", ranks(at(0, "", state="Z")), (0,), "state"),
    ("most are in the kernel", ranks(state="D"), (), ""),
    ("one is behind", ranks(at(6, WAITS, step=9)), (6,), "step"),
    ("the furthest behind", ranks(at(6, WAITS, step=8), at(5, WAITS, step=9)), (6,), "step"),
    ("one is ahead", ranks(at(6, WAITS, step=11)), (), ""),
    ("no steps are known", ranks(at(6, SLEEPS, step=-1), step=-1), (6,), "stack"),
    ("one sleeps", ranks(at(5, SLEEPS)), (5,), "stack"),
    ("one sleeps, the others are in backward", ranks(at(0, SLEEPS), stacks=BACKWARD), (0,), "stack"),
    ("one reads data, the others wait here and there", ranks(at(1, READS), at(2, OTHER_WAIT)), (1,), "stack"),
    ("a host sleeps", ranks(at(4, SLEEPS), at(5, SLEEPS)), (4, 5), "stack"),
    ("all sleep", ranks(stacks=SLEEPS), (), ""),
    ("most sleep, those that wait for them are not named", ranks(at(0, WAITS), at(1, WAITS), stacks=SLEEPS), (), ""),
    ("one is elsewhere than the others' own code", ranks(at(3, READS), stacks=SLEEPS), (3,), "stack"),
    ("one waits for another", ranks(at(2, OTHER_WAIT)), (2,), "stack"),
    ("half wait here, half there", ranks(*(at(r, OTHER_WAIT) for r in range(4))), (), ""),
    ("one at another line", ranks(at(2, WAITS.replace(":40", ":55"))), (2,), "stack"),
    ("one has no stack", ranks(at(2, "")), (), ""),
    ("one of an older collective", ranks(BEHIND, flight_record=flight(7)), (3,), "collective"),
    ("nobody of an older collective", ranks(flight_record=flight(7)), (), ""),
]


@pytest.mark.parametrize(("name", "evidence", "expected", "by"), CASES, ids=[case[0] for case in CASES])
def test_who_is_named(name: str, evidence: list[RankEvidence], expected: tuple[int, ...], by: str) -> None:
    found = find_suspects(evidence, hosts())
    assert (found.ranks, found.by) == (expected, by), found.why
    assert found.hosts == tuple(sorted({hosts()[rank] for rank in expected}))
    assert ("cannot tell" in found.why) is (not expected)
    assert not found.is_group
    assert find_suspects(list(reversed(evidence)), hosts()) == found, "whatever the order"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two(rank: int) -> None:
    where = hosts(2, 1)
    for other in (silent(rank), at(rank, SLEEPS), at(rank, WAITS, step=9), at(rank, WAITS, state="T")):
        assert find_suspects(ranks(other, count=2), where).ranks == (rank,)
    assert find_suspects(ranks(at(rank, OTHER_WAIT), count=2), where).ranks == (), "either may be the wrong one"


def test_a_group_that_shares_the_fault_is_named() -> None:
    """Ranks of a tensor group over two hosts are elsewhere, each at its own place."""
    groups = [frozenset({0, 2}), frozenset({1, 3}), frozenset({0, 1, 2, 3}), frozenset(range(8))]
    evidence = ranks(at(0, SLEEPS), at(3, READS))
    found = find_suspects(evidence, hosts(), groups)
    assert (found.ranks, found.hosts, found.is_group) == ((0, 1, 2, 3), ("h0", "h1"), True)
    assert "rank" in found.why and "group" in found.why
    assert find_suspects(evidence, hosts()).ranks == (0, 3), "without a layout, they alone"
    assert find_suspects(ranks(silent(0), silent(2)), hosts(), groups).is_group is False


def test_the_reason_names_rank_host_and_place() -> None:
    why = find_suspects(ranks(at(5, SLEEPS)), hosts()).why
    assert why == "rank 5 on h2 in sleep_for_ever (train.py:12), all others in a collective"
    assert (
        find_suspects(ranks(silent(3, "T")), hosts()).why == "rank 3 on h1 did not answer (is stopped), the others did"
    )


ENDED = py_spy("_shutdown (python3.11/threading.py:1590)", "_leave (launch/rank.py:119)")
GATHERS = py_spy("all_gather (torch/distributed/distributed_c10d.py:4)", "main (train.py:30)")


def test_a_script_that_has_ended_in_a_process_that_has_not_is_named_for_that() -> None:
    left = RankEvidence(5, ENDED, state="S", step=10, kept_by=["uploader", "sender"])
    found = find_suspects(ranks(left), hosts())
    why = "has ended in its main thread, and threads 'uploader' and 'sender' keep its process alive"
    assert (found.ranks, found.why) == ((5,), f"rank 5 on h2 {why}, all others in a collective")
    unknown = find_suspects(ranks(at(5, ENDED)), hosts())
    assert "has ended in its main thread, and another thread keeps its process alive" in unknown.why


def test_what_ranks_wait_for_is_told_of_each() -> None:
    """Those that do the same together, whoever waits for no other rank first; the kernel says what for."""
    left = RankEvidence(0, ENDED, state="S", kept_by=["uploader"])
    reads = RankEvidence(1, READS, state="S", waits_in="wait_for_partner")
    loops = RankEvidence(8, SLEEPS, state="R")
    told = waits_of(ranks(left, reads, at(2, SLEEPS, state="T"), silent(3), at(6, GATHERS), loops, count=9))
    assert [(one.ranks, one.what) for one in told] == [
        ((0,), "has ended in its main thread, and thread 'uploader' keeps its process alive"),
        ((1,), "waits for a pipe (wait_for_partner), in get (queue.py:171)"),
        ((2,), "is stopped, in sleep_for_ever (train.py:12)"),
        ((3,), "did not answer"),
        ((8,), "runs, in sleep_for_ever (train.py:12)"),
        ((4, 5, 7), "waits for other ranks, in all_reduce (distributed/distributed_c10d.py:2501)"),
        ((6,), "waits for other ranks, in all_gather (distributed/distributed_c10d.py:4)"),
    ]
    assert [str(one) for one in told[-2:]] == [
        "ranks 4, 5, 7: each waits for other ranks, in all_reduce (distributed/distributed_c10d.py:2501)",
        "rank 6: waits for other ranks, in all_gather (distributed/distributed_c10d.py:4)",
    ]
    assert waits_of([]) == []
    assert [one.what for one in waits_of([RankEvidence(0)])] == ["could not be looked at"]


def test_ranks_that_are_not_of_the_attempt_are_ignored() -> None:
    assert find_suspects([*ranks(), silent(99)], hosts()).ranks == ()
    assert find_suspects([], {}).ranks == ()
    assert find_suspects([], {0: "a"}).ranks == ()


def test_both_kinds_of_stacks_are_read() -> None:
    faulthandler = (
        "Thread 0x00007f11 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
        "Current thread 0x00007f22 (most recent call first):\n"
        '  File "/x/site-packages/torch/_tensor.py", line 525 in backward\n'
        '  File "/home/me/train.py", line 40 in main\n'
        "  ...\n"
    )
    assert [str(frame) for frame in main_stack(faulthandler)] == [
        "backward (torch/_tensor.py:525)",
        "main (me/train.py:40)",
    ]
    assert without_lines(main_stack(faulthandler)) == ("backward (torch/_tensor.py)", "main (me/train.py)")
    several = py_spy("wait (threading.py:320)", name="Thread-1") + "\n" + py_spy("main (train.py:4)")
    assert [str(frame) for frame in main_stack(several)] == ["main (train.py:4)"]
    assert main_stack("") == () and len(main_stack("something 0x7f\nelse 5")) == 2


TEXTS = st.one_of(st.sampled_from([WAITS, SLEEPS, READS, BACKWARD, ""]), st.text(max_size=120))
EVIDENCE = st.builds(
    RankEvidence,
    st.integers(0, 7),
    TEXTS,
    st.booleans(),
    st.sampled_from(["", "S", "R", "D", "T", "Z", "?"]),
    step=st.integers(-1, 3),
    flight_record=st.one_of(st.sampled_from([flight(1), flight(2), ""]), st.text(max_size=40)),
)
GROUPS = st.lists(st.frozensets(st.integers(0, 9), max_size=9), max_size=4)


@given(st.lists(EVIDENCE, max_size=10), GROUPS, st.integers(1, 4))
def test_no_evidence_is_too_wild_and_never_all_are_blamed(
    evidence: list[RankEvidence], groups: list[frozenset[int]], per_host: int
) -> None:
    where = hosts(8, per_host)
    found = find_suspects(evidence, where, groups)
    assert set(found.ranks) <= set(where)
    assert len(found.ranks) < 8 and found.why
    assert bool(found.ranks) == bool(found.by) == bool(found.hosts)
