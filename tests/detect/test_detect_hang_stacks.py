"""Stacks of a job that stands still: clusters, and who is elsewhere than the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.hangs.hang_judge import HangContext, judge_hang
from phalanx.detect.hangs.python_stacks import Frame
from phalanx.detect.hangs.rank_places import RankPlaces
from phalanx.detect.hangs.stack_clusters import clusters_of, odd_ones_out

WAITS = (Frame("all_reduce", "distributed/distributed_c10d.py", "2920"), Frame("train", "job/train.py", "40"))
LOADS = (Frame("read", "job/data.py", "7"), Frame("train", "job/train.py", "31"))
COMPUTES = (Frame("forward", "job/model.py", "9"), Frame("train", "job/train.py", "33"))


def odd(*stacks: Sequence[Frame]) -> tuple[int, ...] | None:
    found = odd_ones_out(dict(enumerate(stacks)))
    return found.ranks if found else None


def test_stacks_of_the_same_functions_are_one_cluster_the_smallest_first() -> None:
    elsewhere = (Frame("read", "job/data.py", "8"), LOADS[1])  # another line of the same function
    clusters = clusters_of({0: WAITS, 1: LOADS, 2: WAITS, 3: elsewhere, 4: WAITS})
    assert [(one.ranks, one.waits) for one in clusters] == [((1, 3), False), ((0, 2, 4), True)]


def test_who_is_elsewhere_while_the_others_wait_stands_out() -> None:
    assert odd(WAITS, WAITS, LOADS, WAITS) == (2,)
    assert odd(WAITS, LOADS) == (1,)
    assert odd(WAITS, LOADS, COMPUTES, WAITS, WAITS) == (1, 2)


def test_where_nobody_is_seen_to_wait_a_minority_stands_out() -> None:
    assert odd(COMPUTES, COMPUTES, LOADS, COMPUTES) == (2,)
    assert odd(COMPUTES, LOADS) is None


@pytest.mark.parametrize("stacks", [(WAITS, WAITS, WAITS), (LOADS, LOADS, COMPUTES, WAITS), (), ((), ())])
def test_else_nobody_does(stacks: tuple[Sequence[Frame], ...]) -> None:
    assert odd(*stacks) is None


def test_other_collectives_are_no_sign_of_guilt() -> None:
    other = (Frame("barrier", "distributed/distributed_c10d.py", "4000"), WAITS[1])
    assert odd(WAITS, WAITS, other) is None


def test_the_verdict_by_stacks_alone() -> None:
    stacks = dict(enumerate((WAITS, LOADS, WAITS, WAITS)))
    verdict = judge_hang(HangContext(RankPlaces(range(4), host_of={1: "h1"}), source="stacks", stacks=stacks))
    assert verdict.sentence == "Rank 1 (host h1) is in read (job/data.py:7); 3 others wait in collectives."
    assert verdict.blamed_ranks == (1,) and len(verdict.tables["stacks"]) == 2


def test_where_no_stack_stands_out_nothing_is_said() -> None:
    places = RankPlaces(range(3))
    verdict = judge_hang(HangContext(places, source="stacks", stacks=dict(enumerate((WAITS, WAITS, WAITS)))))
    assert verdict.exit_status == 3 and "no rank stands out by its stack" in verdict.sentence


def test_files_of_py_spy_and_faulthandler_are_read(tmp_path: Path) -> None:
    py_spy = 'Process 9: python\nThread 9 (idle): "MainThread"\n    {0} ({1}:5)\n    train (/job/train.py:40)\n'
    wait = py_spy.format("all_reduce", "/lib/torch/distributed/distributed_c10d.py")
    for rank in range(3):
        (tmp_path / f"stack_{rank}.txt").write_text(wait)
    (tmp_path / "stack_3.txt").write_text(
        'Current thread 0x00007f01 (most recent call first):\n  File "/job/data.py", line 7 in read\n'
    )
    done = CliRunner().invoke(command, ["hang", "--stacks", str(tmp_path), "--json"])
    found = json.loads(done.output)
    assert done.exit_code == 1 and found["detections"][0]["who"][0]["ranks"] == [3]
    assert found["sentence"].startswith("Rank 3 is in read (job/data.py:7)")


def test_a_job_that_has_recorded_no_spans_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "driver").write_text("127.0.0.1:1")
    done = CliRunner().invoke(command, ["hang", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "has recorded no spans; let its script record spans" in str(done.exception)
