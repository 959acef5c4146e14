"""A rank is called slow when it computes longer than those that do the same, and else nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.slow_ranks import find_slow_ranks
from phalanx.telemetry.summaries import compare, summarize
from tests.telemetry.trace_runs import GROUPS, MS, four_ranks, span, write_run

STAGES = {"pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]]}


def eight_ranks(ms: dict[int, Any], steps: int = 8) -> list[dict[str, Any]]:
    """Two stages of four; forward lasts 20 ms, in the second stage 30, or as `ms` says by rank: one or each step's."""
    rows = []
    for step in range(steps):
        for rank in range(8):
            usual = 20.0 if rank < 4 else 30.0
            own = ms.get(rank, usual)
            length = own[step % len(own)] if isinstance(own, list) else own
            rows += [span(rank, step, "step", 100 * step, 100 * step + 90)]
            rows += [span(rank, step, "forward", 100 * step, 100 * step + length)]
            rows += [span(rank, step, "wait", 100 * step + length, 100 * step + 85)]
    return rows


def test_the_rank_that_computes_longer_is_found_and_by_how_much(tmp_path: Path) -> None:
    found = find_slow_ranks(write_run(tmp_path, eight_ranks({5: 36.0}), STAGES))
    assert [row["rank"] for row in found.slow] == [5]
    assert found.slow[0]["excess"] == pytest.approx(0.2) and found.slow[0]["stage"] == 1
    assert found.slow[0]["peers_s"] == pytest.approx(0.030) and found.ranked[0]["rank"] == 5
    assert found.verdict == "slow: rank 5 (host host2, stage 1); the first computes 20% longer than its stage"


def test_a_host_all_of_whose_ranks_are_slow_is_named_once(tmp_path: Path) -> None:
    rows = eight_ranks({2: 26.0, 3: 25.0})
    rows += [row | {"rank": row["rank"] + 8, "host": f"host{row['rank'] // 2 + 4}"} for row in eight_ranks({})]
    stages = [*STAGES["pipeline"], *([rank + 8 for rank in pair] for pair in STAGES["pipeline"])]
    found = find_slow_ranks(write_run(tmp_path, rows, {"pipeline": stages}))
    assert found.verdict == "slow: host host1 (2 ranks from 2 to 3); the first computes 30% longer than its stage"


def test_a_heavier_stage_blames_nobody(tmp_path: Path) -> None:
    found = find_slow_ranks(write_run(tmp_path, eight_ranks({}), STAGES))
    assert not found.slow and not found.abstains
    assert found.verdict == "no slow rank: none of 8 computes more than 0.0% longer than its stage's median"


def test_long_batches_that_meet_another_rank_each_time_blame_nobody(tmp_path: Path) -> None:
    turns: dict[int, Any] = {rank: [20.0 + 15.0 * (step == rank) for step in range(4)] for rank in range(4)}
    assert not find_slow_ranks(write_run(tmp_path, eight_ranks(turns), STAGES)).slow


def three_ranks(ms: dict[int, Any], steps: int = 12) -> list[dict[str, Any]]:
    """The first three of `eight_ranks`, which have one stage."""
    return [row for row in eight_ranks(ms, steps) if row["rank"] < 3]


def test_a_fast_rank_of_three_does_not_hide_a_slow_one(tmp_path: Path) -> None:
    found = find_slow_ranks(write_run(tmp_path, three_ranks({0: 16.0, 1: 20.0, 2: 35.0})))
    assert [row["rank"] for row in found.slow] == [2] and not found.unsure
    assert found.verdict == "slow: rank 2 (host host1, stage 0); the first computes 75% longer than its stage"


def test_of_few_ranks_that_differ_anyway_nobody_is_slow_and_not_all_is_well(tmp_path: Path) -> None:
    found = find_slow_ranks(write_run(tmp_path, three_ranks({0: 17.0, 1: 20.0, 2: 24.0})))
    assert not found.slow and [row["rank"] for row in found.unsure] == [2]
    assert found.verdict == (
        "no verdict: rank 2 (host host1, stage 0) computes 20% longer than its stage, but its 3 ranks differ by 15%"
        " anyway, too much to be sure"
    )
    assert found.doubt == "rank 2 takes 20% longer, which is not sure to be its own fault"


def test_who_is_slow_in_too_few_steps_is_not_called_well(tmp_path: Path) -> None:
    often: list[float] = [34.0, 20.0, 34.0]
    found = find_slow_ranks(write_run(tmp_path, three_ranks({0: 20.0, 1: 20.0, 2: often})))
    assert not found.slow and "is slower in 67% of steps only" in found.verdict


@pytest.mark.campaign(but=("8-3",))
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("steps", [8, 40])
def test_few_ranks_of_a_noisy_job_blame_nobody_and_raise_no_doubt(tmp_path: Path, ranks: int, steps: int) -> None:
    for seed in range(4):
        noise = np.random.default_rng(seed)
        ms = {rank: (20 * np.exp(noise.normal(0, 0.15, steps))).tolist() for rank in range(ranks)}
        rows = [row for row in eight_ranks(ms, steps) if row["rank"] < ranks]
        found = find_slow_ranks(write_run(tmp_path / str(seed), rows))
        assert not found.slow and not found.unsure and found.verdict.startswith("no slow rank"), seed


def test_of_four_ranks_two_may_be_slow(tmp_path: Path) -> None:
    rows = [row for row in eight_ranks({1: 30.0, 2: 31.0}, 12) if row["rank"] < 4]
    assert [row["rank"] for row in find_slow_ranks(write_run(tmp_path, rows)).slow] == [2, 1]


def test_waiting_within_compute_is_not_slowness(tmp_path: Path) -> None:
    rows = eight_ranks({2: 40.0})
    rows += [span(2, step, "wait", 100 * step + 5, 100 * step + 25) for step in range(8)]
    assert not find_slow_ranks(write_run(tmp_path, rows, STAGES)).slow


def test_with_too_little_to_compare_nothing_is_said(tmp_path: Path) -> None:
    two = find_slow_ranks(write_run(tmp_path / "ranks", four_ranks(slow={0: 2.0}), GROUPS))
    assert not two.slow and "stage 0 has 2 ranks" in two.verdict and two.ranked[0]["rank"] == 0
    few = find_slow_ranks(write_run(tmp_path / "steps", eight_ranks({5: 60.0}, steps=3), STAGES))
    assert not few.slow and "3 steps" in few.verdict
    none = find_slow_ranks(write_run(tmp_path / "none", [span(0, 0, "step", 0, 10)]))
    assert none.verdict == "no verdict: there are no forward or backward spans"


def test_a_summary_has_it_all(tmp_path: Path) -> None:
    found = summarize(write_run(tmp_path, four_ranks(slow={1: 1.5}), GROUPS))
    assert (found["hosts"], found["ranks"], found["steps"], found["spans"]) == (2, 4, 6, 4 * 6 * 9)
    assert sum(ms for kind, ms in found["breakdown"].items() if kind != "step") == pytest.approx(0.19)
    assert found["between"]["between_s"] == pytest.approx(0.010)
    assert found["skew"][0]["last_rank"] == 1 and found["skew"][0]["last_share"] == 1.0
    assert found["mfu"] is None and len(found["bubble"]) == 2
    with pytest.raises(UserError, match="no step"):
        summarize(write_run(tmp_path, four_ranks(), GROUPS), 100, 200)


def test_comparing_says_what_grew(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", _with_noise(four_ranks(10)), GROUPS)
    same = write_run(tmp_path / "same", _with_noise(four_ranks(10), seed=1), GROUPS)
    longer = write_run(tmp_path / "b", _longer(_with_noise(four_ranks(10))), GROUPS)
    found = compare(one, longer)
    assert found["parts"][0]["what"] == "optimizer" and found["parts"][0]["change_s"] == pytest.approx(0.020)
    assert found["step_s"]["is_certain"] and "most of it is optimizer: +0.02 s of +0.02 s" in found["verdict"]
    assert compare(longer, one)["verdict"].startswith("B's step is 9.")
    assert not compare(one, same)["step_s"]["is_certain"]
    assert compare(one, same)["verdict"].startswith("no difference beyond chance")


def _with_noise(rows: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Each step up to 1 ms longer."""
    return [
        row | {"end_ns": row["end_ns"] + (row["step"] * 7 + seed) % 10 * MS // 10} if row["kind"] == "step" else row
        for row in rows
    ]


def _longer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer takes 20 ms longer."""
    return [row | {"end_ns": row["end_ns"] + 20 * MS} if row["kind"] in ("step", "optimizer") else row for row in rows]
