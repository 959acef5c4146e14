"""Restoring from the memory of hosts: any layout into any layout, and what happens to copies that are not good."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from restoring_helpers import (
    GIGABIT,
    Host,
    groups,
    replicate,
    restore_all,
    save_durable,
    some_tensors,
    take,
)
from support.chunk_sums import chunk_sums

from phalanx.checkpoint.format.manifest import Meta
from phalanx.core.layout import Layout

LAYOUTS = [Layout(), Layout(replicate=2), Layout(replicate=4), Layout(replicate=2, tensor=2), Layout(replicate=8)]
LAYOUTS += [Layout(tensor=3), Layout(replicate=4, tensor=2)]


@pytest.mark.parametrize("after", LAYOUTS, ids=str)
@pytest.mark.parametrize("before", [Layout(replicate=4, tensor=2), Layout(tensor=3), Layout(replicate=2)], ids=str)
def test_any_layout_goes_into_any_other(before: Layout, after: Layout) -> None:
    tensors, host = some_tensors(seed=3), Host("a")
    take(tensors, before, 5, [host])
    for copies in (None, groups(after, "replicate")):
        for outcome in restore_all(tensors, after, [host], copies=copies):
            assert outcome.restored is not None and outcome.lines == []
            assert (outcome.restored.step, outcome.restored.source) == (5, "memory")
            assert outcome.restored.state == {"step": 5}
            assert outcome.restored.bytes_by_kind.keys() == {"memory"}


def test_a_copy_on_another_host_is_fetched_once_and_given_to_the_group() -> None:
    layout, tensors = Layout(replicate=4), some_tensors(seed=1)
    here, there = Host("a"), Host("b")
    take(tensors, layout, 2, [here, there])
    copies = groups(layout, "replicate")
    outcomes = restore_all(tensors, layout, [here, there], copies=copies)
    restored = outcomes[0].restored
    assert restored is not None and restored.source == "memory"  # each shared block is read where it lies
    assert restored.bytes_by_kind.keys() == {"memory"}
    assert copies[0]._group.given_bytes > 0


def test_a_lost_host_is_made_good_from_its_peer() -> None:
    layout, tensors = Layout(tensor=2), some_tensors(seed=1)
    old, kept, new = Host("old"), Host("kept"), Host("new")
    take(tensors, layout, 2, [old, kept])
    replicate(old, kept)
    restored = restore_all(tensors, layout, [new, kept])[0].restored
    assert restored is not None and restored.source == "peer" and restored.bytes_by_kind["peer"] > 0
    [rate] = [rate for rate in restored.rates if rate.kind == "peer"]
    assert rate.place == "eth0 of host kept" and rate.possible_bytes_per_s == GIGABIT
    assert str(rate).startswith("eth0 of host kept: ") and "% of what is possible" in str(rate)


def test_a_rank_without_a_keeper_reads_from_others() -> None:
    layout, tensors, host = Layout(replicate=2), some_tensors(seed=1), Host("a")
    take(tensors, layout, 2, [host])
    for copies in (None, groups(layout, "replicate")):
        outcomes = restore_all(tensors, layout, [None, host], copies=copies)
        assert [o.restored.step for o in outcomes if o.restored] == [2, 2]
        assert outcomes[0].lines == []


def test_the_next_source_is_used_and_every_refusal_told(tmp_path: Path) -> None:
    layout, tensors = Layout(tensor=2), some_tensors(seed=1)
    a, b = Host("a"), Host("b")
    save_durable(tmp_path, some_tensors(seed=9), layout, 3)
    damaged = save_durable(tmp_path, tensors, layout, 7)
    snapshot = take(tensors, layout, 7, [a, b])
    replicate(b, a)
    replicate(a, b)

    def flip(host: Host, rank: int) -> None:
        host.copies[snapshot, rank].memory[0] ^= 1

    def run(expected: int) -> list[str]:
        found = some_tensors(seed=9) if expected == 3 else tensors
        outcomes = restore_all(found, layout, [a, b], tmp_path)
        assert all(o.restored is not None and o.restored.step == expected for o in outcomes)
        assert outcomes[1].lines == [] and all(
            o.restored.refusals == tuple(outcomes[0].lines) for o in outcomes if o.restored
        )
        return outcomes[0].lines

    def line(host: str, following: str) -> str:
        record, plan = a.copies[snapshot, 0].record, a.copies[snapshot, 0].plan
        names = f"{plan.pieces[0].name} and {len(plan.pieces) - 1} more"
        [found] = chunk_sums(a.copies[snapshot, 0].memory, record.data_bytes)
        cause = (
            f"chunk 0 (bytes 0 to {record.data_bytes}) of step 7, rank 0, which holds {names}, has the sum {found:016x}"
        )
        refused = f"step 7: the copy of rank 0 in memory of host {host} is refused ({cause}, not {record.sums[0]:016x})"
        return f"{refused}; trying {following}"

    assert run(7) == []
    flip(a, 0)
    assert run(7) == [line("a", "another host's")]
    flip(b, 0)
    both = [line(host, "durable storage or an older state") for host in ("a", "b")]  # read by one rank each
    assert run(7) == both
    content = bytearray((damaged / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "__1_0.distcp").write_bytes(content)
    *first, last = run(3)
    assert first == both
    assert last.startswith("checkpoint step-00000007 is damaged (__1_0.distcp: bytes ")
    assert last.endswith("do not match their checksum); trying the one before it")


def test_every_flipped_bit_is_found() -> None:
    layout, tensors, chance = Layout(replicate=2), some_tensors(seed=1), random.Random(0)
    host = Host("a")
    snapshot = take(tensors, layout, 1, [host])
    for _ in range(100):
        rank = chance.randrange(2)
        copy = host.copies[snapshot, rank]
        piece = chance.choice(copy.plan.pieces)
        place, bit = piece.start_bytes + chance.randrange(piece.length_bytes), 1 << chance.randrange(8)
        copy.memory[place] ^= bit
        outcomes = restore_all(tensors, layout, [host])
        assert all(outcome.restored is None and outcome.is_spoilt for outcome in outcomes)
        assert f"the copy of rank {rank} in memory of host a is refused" in outcomes[0].lines[0]
        copy.memory[place] ^= bit
    assert restore_all(tensors, layout, [host])[0].restored is not None


def test_a_state_or_record_that_is_not_what_was_written_is_refused() -> None:
    tensors, host = some_tensors(), Host("a")
    take(tensors, Layout(), 1, [host], state='{"step": 2}')
    [outcome] = restore_all(tensors, Layout(), [host])
    assert outcome.restored is None and "the state of step 1, rank 0 has the sum" in outcome.lines[0]


@pytest.mark.parametrize("reads", range(4))
def test_a_keeper_that_dies_half_way(tmp_path: Path, reads: int) -> None:
    layout, tensors = Layout(replicate=2), some_tensors(seed=1)
    save_durable(tmp_path, tensors, layout, 4, Meta())
    a, b = Host("a"), Host("b")
    take(tensors, layout, 4, [a, b])
    a.reads_left = reads
    outcomes = restore_all(tensors, layout, [a, b], tmp_path)
    assert all(outcome.restored is not None and outcome.restored.step == 4 for outcome in outcomes)
    assert all("all copies in memory of host a are refused" in line for line in outcomes[0].lines)
    assert outcomes[0].lines or reads > 1


def test_a_snapshot_in_large_pieces_is_copied_by_several_threads() -> None:
    tensors, host = {"w": torch.randn(9 << 20), "b": torch.randn(3, 1 << 20)}, Host("a")
    take(tensors, Layout(), 1, [host])
    assert restore_all(tensors, Layout(), [host])[0].restored is not None
