"""Which snapshots count as restorable: only whole ones, never a mixture, the newest of the attempt in charge first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.format.shard_plan import Record
from phalanx.checkpoint.keeper_contract import brief, restorable


def a_record(step: int, rank: int, shards: int, attempt: int = 1, set_id: str = "s", plan: str = "") -> Record:
    return Record(step, attempt, set_id, rank, shards, plan or f"plan {rank}", 100, (1, 2), changed=True)


records = st.builds(
    a_record,
    step=st.integers(1, 4),
    rank=st.integers(0, 3),
    shards=st.integers(1, 3),
    attempt=st.integers(1, 2),
    set_id=st.sampled_from("st"),
    plan=st.sampled_from(["", "", "", "another"]),
)
holdings = st.dictionaries(st.sampled_from("abc"), st.lists(records, max_size=12))


@given(holdings)
def test_a_choice_is_one_whole_snapshot(held: dict[str, list[Record]]) -> None:
    choices = restorable(held)
    for choice in choices:
        found = [(host, r) for host, copies in held.items() for r in copies if r.snapshot == choice.snapshot]
        assert {r.shards for _, r in found} == {len(choice.hosts)}
        for rank, hosts in choice.hosts.items():
            assert hosts and len(set(hosts)) == len(hosts)
            for host in hosts:
                copies = [r for name, r in found if (name, r.rank) == (host, rank)]
                assert copies and {r.plan_sha256 for r in copies} == {choice.plans[rank]}
    keys = [(choice.snapshot.attempt, choice.snapshot.step) for choice in choices]
    assert keys == sorted(keys, reverse=True) and len({choice.snapshot for choice in choices}) == len(choices)


@given(holdings)
def test_no_whole_snapshot_is_left_out(held: dict[str, list[Record]]) -> None:
    found: dict[object, dict[int, list[Record]]] = {}
    for copies in held.values():
        for record in copies:
            found.setdefault(record.snapshot, {}).setdefault(record.rank, []).append(record)
    whole = {
        snapshot
        for snapshot, ranks in found.items()
        if all(len({r.plan_sha256 for r in copies}) == 1 for copies in ranks.values())
        and {r.shards for copies in ranks.values() for r in copies} == {len(ranks)}
    }
    assert {choice.snapshot for choice in restorable(held)} == whole


@given(st.integers(2, 5), st.data())
def test_without_one_shard_it_does_not_count(shards: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, shards - 1))
    kept = [a_record(1, rank, shards) for rank in range(shards) if rank != lost]
    assert restorable({"a": kept, "b": kept}) == []
    assert len(restorable({"a": kept, "b": [a_record(1, lost, shards)]})) == 1


def test_stale_and_sick_snapshots_do_not_count() -> None:
    good = [a_record(1, rank, 2) for rank in range(2)]
    stale = [replace(r, step=2, stepped=True, changed=False) for r in good]
    sick = [good[0], replace(good[1], sick=("w",))]
    assert restorable({"a": stale}) == [] and restorable({"a": sick}) == []
    assert restorable({"a": [stale[0], replace(good[1], step=2)]}) != []  # one shard changed: it is not stale
    assert restorable({"a": [replace(r, stepped=False) for r in stale]}) != []
    assert [c.snapshot.step for c in restorable({"a": good + stale})] == [1]


def test_a_later_attempt_goes_before_a_higher_step() -> None:
    held = {"a": [a_record(12, 0, 1, attempt=1), a_record(5, 0, 1, attempt=2), a_record(4, 0, 1, attempt=2)]}
    assert [(c.snapshot.attempt, c.snapshot.step) for c in restorable(held)] == [(2, 5), (2, 4), (1, 12)]


def test_what_is_told_to_all_ranks_is_short() -> None:
    record = Record(1, 1, "s", 0, 1, "p", 1 << 40, tuple(range(1 << 18)), state="x" * 10_000, state_sum=3)
    text = brief(record)
    assert len(text) < 400
    assert restorable({"a": [Record.from_text(text)]}) == restorable({"a": [record]})
