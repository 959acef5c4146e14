"""Who is named for bits that differ: by strict majority, and never where it cannot be known."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.detect.corruption.copy_judge import (
    CorruptionEvidence,
    CorruptionPolicy,
    judge_corruption,
    judge_run,
)
from phalanx.detect.corruption.digest_file import (
    RecomputedStep,
    StepDigests,
    UnlikeCopies,
    UnlikeReplays,
    append_digests,
    suspect_spans,
)
from phalanx.detect.corruption.norm_spikes import NormHistory
from phalanx.detect.detection import JudgeVerdict
from phalanx.train.corruption_response import host_name


def copies(
    digests: str, step: int = 100, start: int = 0, agreed: int = 50, programs: str = "", **more: str
) -> UnlikeCopies:
    """A digest, and a program, is one letter; rank by rank."""
    made = dict(enumerate(programs or "p" * len(digests)))
    hosts = {rank: f"h{rank}" for rank in range(len(digests))}
    named = dict(enumerate(digests))
    return UnlikeCopies(step, start, 1.5, "weight", more.get("tensor", "embedding"), named, hosts, made, agreed)


def judged(*unlike: UnlikeCopies | UnlikeReplays, evict_after: int = 2) -> JudgeVerdict:
    evidence = CorruptionEvidence((100,), 10, "dp4", tuple(unlike))
    return judge_corruption(evidence, CorruptionPolicy(evict_after=evict_after))


@pytest.mark.parametrize(
    ("digests", "named"),
    [
        ("aab", (2,)),
        ("baaa", (0,)),
        ("aabab", (2, 4)),
        ("ab", ()),
        ("aabb", ()),
        ("abcd", ()),
        ("aabc", ()),
        ("abcaa", (1, 2)),
    ],
)
def test_a_strict_majority_names_the_others(digests: str, named: tuple[int, ...]) -> None:
    verdict = judged(copies(digests))
    assert verdict.blamed_ranks == named and verdict.exit_status == 1
    assert verdict.blamed_hosts == tuple(f"h{rank}" for rank in named)


@given(st.integers(3, 40), st.data())
def test_one_of_many_is_always_named(ranks: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, ranks - 1))
    digests = "".join("b" if rank == guilty else "a" for rank in range(ranks))
    assert judged(copies(digests)).blamed_ranks == (guilty,)


def test_ranks_that_do_not_compute_alike_are_not_blamed() -> None:
    (found,) = judged(copies("aab", programs="ppq")).detections
    assert not found.blamed_ranks and found.advice == "program" and "rounding" in found.why[0]


def test_what_is_said_of_one_rank() -> None:
    (found,) = judged(copies("aab"), copies("aab", tensor="head"), copies("aab", step=200)).detections
    assert found.sentence == "rank 2 on host h2 holds other bits than 2 of its 2 peers (weight embedding, weight head)"
    assert found.since.step == 100 and found.figures["last_agreed_step"] == 50 and found.figures["tensors"] == 2
    assert found.then == (
        "run `phalanx check` on h2",
        "go on from a checkpoint of step 50 or before: later ones, up to 100, are suspect",
    )


def test_a_host_that_is_named_again_is_to_leave() -> None:
    twice = copies("aab"), copies("aab", start=1)
    assert judged(*twice).detections[0].advice == "evict"
    assert judged(*twice, evict_after=3).detections[0].advice == "check"
    other = UnlikeCopies(100, 1, 1.5, "weight", "embedding", {0: "a", 1: "a", 2: "b"}, {2: "h9"})
    assert {found.advice for found in judged(copies("aab"), other).detections} == {"check"}, "another host since"


def test_a_micro_batch_that_a_neighbour_computes_otherwise() -> None:
    two = UnlikeReplays(100, 0, 1.5, {0: {0: "a", 1: "a"}, 1: {1: "b", 2: "c"}})
    assert not judged(two).blamed_ranks and judged(two).exit_status == 1
    three = UnlikeReplays(100, 0, 1.5, {0: {0: "a", 1: "a", 2: "a"}, 1: {1: "b", 2: "c", 0: "c"}})
    (found,) = judged(three).detections
    assert found.blamed_ranks == (1,) and "computes other bits" in found.sentence


def test_nothing_differs(tmp_path: Path) -> None:
    append_digests(tmp_path, [StepDigests(100, 0, 1.5, "dp4", {}, compared=12)])
    verdict = judge_run(tmp_path)
    assert verdict.exit_status == 0 and not verdict.abstains
    assert verdict.looked_at == "1 checked step up to step 100, 12 tensors with copies on other ranks (layout dp4)"


def test_it_abstains_where_nothing_can_be_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run"):
        judge_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "telemetry.digests_every" in judge_run(tmp_path).abstains[0]
    append_digests(tmp_path, [StepDigests(100, 0, 1.5, "fs4", {})])
    assert "parallel.replicate" in judge_run(tmp_path).abstains[0]
    with pytest.raises(UserError, match="is no run"):
        judge_run(tmp_path / "none")


def test_of_a_job_without_a_run_of_ours_it_abstains(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    assert judge_run(tmp_path).abstains[0].startswith("no digests in ")


def test_states_from_after_the_last_agreement_are_suspect(tmp_path: Path) -> None:
    append_digests(tmp_path, [copies("aab"), copies("aab", step=200), copies("ab", step=30, start=4, agreed=-1)])
    append_digests(tmp_path, [copies("aab", start=5, programs="ppq")])  # it is rounding
    assert suspect_spans(tmp_path) == [(0, 50, 200, None), (4, -1, 30, None)]


def test_suspicion_ends_where_copies_are_equal_again(tmp_path: Path) -> None:
    append_digests(tmp_path, [copies("aab"), StepDigests(100, 0, 1.5, "dp3", {}, compared=12, unlike=1)])
    (span,) = suspect_spans(tmp_path)
    assert [bool(span.cause(0, step)) for step in (50, 51, 100, 999)] == [False, True, True, True]
    assert not span.cause(1, 60)
    append_digests(tmp_path, [StepDigests(150, 0, 1.5, "dp3", {}, compared=12)])
    (span,) = suspect_spans(tmp_path)
    assert [bool(span.cause(0, step)) for step in (50, 51, 149, 150)] == [False, True, True, False]


def test_the_command_says_who_and_what_next(tmp_path: Path) -> None:
    append_digests(tmp_path, [copies("aab")])
    shown = CliRunner().invoke(group, ["detect", "corruption", str(tmp_path)])
    assert shown.exit_code == 1 and shown.output.startswith("Rank 2 on host h2 holds other bits"), shown.output
    as_json = CliRunner().invoke(group, ["detect", "corruption", str(tmp_path), "--json", "--evict-after", "1"])
    (found,) = json.loads(as_json.output)["detections"]
    assert found["advice"] == "evict" and found["who"][0]["ranks"] == [2]


def test_norms_that_jump_and_those_that_only_vary() -> None:
    history = NormHistory(6.0)
    assert history.is_spike(float("inf")) and not history.is_spike(1e9), "nothing is known yet"
    for number in range(40):
        norm = 2.0 * 1.1 ** (number % 5 - 2)
        assert not history.is_spike(norm)
        history.add(norm)
    assert not history.is_spike(3.0) and history.is_spike(50.0) and not history.is_spike(0.01)


def test_a_step_that_gave_another_result_names_nobody(tmp_path: Path) -> None:
    append_digests(tmp_path, [RecomputedStep(30, 0, 1.5, "inf", "1.25")])
    (found,) = judge_run(tmp_path).detections
    assert "step 30" in found.sentence and "inf" in found.why[0] and not found.blamed_ranks
    assert suspect_spans(tmp_path) == []


@pytest.mark.parametrize(("start", "step", "recovered"), [(1, 100, True), (1, 150, False), (0, 150, False)])
def test_a_run_that_made_the_step_again_has_recovered(tmp_path: Path, start: int, step: int, recovered: bool) -> None:
    append_digests(tmp_path, [copies("aab"), StepDigests(100, 0, 1.5, "dp3", {}, compared=12, unlike=1)])
    append_digests(tmp_path, [StepDigests(at, start, 2.5, "dp3", {}, compared=12) for at in (step, 200)])
    (found,) = judge_run(tmp_path).detections
    assert ("the run has recovered: its start 1 made step 100 again" in found.then[1]) is recovered
    assert ("go on from a checkpoint of step 50" in found.then[1]) is not recovered


def test_a_rank_names_its_host_as_its_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_HOST", "host-4")
    assert host_name() == "host-4"
    monkeypatch.delenv("PHALANX_HOST")
    assert host_name() == socket.gethostname()
